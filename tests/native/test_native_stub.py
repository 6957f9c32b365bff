"""The stub of the native module names what the module that was built has."""

from __future__ import annotations

import ast
from pathlib import Path

from moegraph.ggml.lib import C, ffi

STUB = Path(__file__).resolve().parents[2] / "moegraph" / "ggml" / "_native.pyi"


def names(class_name: str) -> set[str]:
    module = ast.parse(STUB.read_text(encoding="utf-8"))
    node = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    fields = {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    return fields | {n.name for n in node.body if isinstance(n, ast.FunctionDef)}


def test_the_library_has_exactly_the_names_of_the_stub() -> None:
    assert set(dir(C)) == names("Lib")


def test_ffi_has_the_methods_of_the_stub() -> None:
    assert names("FFI") <= set(dir(ffi))
