"""The stub of the native module says what the C declarations say."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gen_stubs


def class_fields(path: Path, name: str) -> dict[str, str]:
    """Return field -> annotation of a class in a Python file."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    node = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {
        ast.unparse(part.target): ast.unparse(part.annotation)
        for part in node.body
        if isinstance(part, ast.AnnAssign)
    }


def test_the_stub_is_what_the_declarations_give() -> None:
    assert gen_stubs.STUB.read_text(encoding="utf-8") == gen_stubs.stub(), (
        "run scripts/gen_stubs.py"
    )


def test_a_tensor_has_no_field_that_the_struct_lacks() -> None:
    mine = class_fields(ROOT / "moegraph" / "ggml" / "ops.py", "Tensor")
    theirs = gen_stubs.struct_fields("ggml_tensor")
    assert {name: theirs.get(name) for name in mine} == {
        **mine, "src": "MutableSequence[Tensor]", "data": "Address", "name": "Address",
    }  # fmt: skip
