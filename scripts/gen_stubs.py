#!/usr/bin/env python3
"""Write moegraph/ggml/_native.pyi, the type stub of the extension module.

The stub is derived from moegraph/ggml/decl, which the C compiler checks against ggml's headers, and
from our own headers in native/. Run the script after a change there. A test checks that the stub is
up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cffi
from cffi import model

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]
from _tools import write_or_check

from moegraph.ggml._build import declarations

STUB = ROOT / "moegraph" / "ggml" / "_native.pyi"
WIDTH = 100

HEAD = '''\
# Written by scripts/gen_stubs.py from C declarations; do not edit.
"""The patched ggml, and the C parts of moegraph, as cffi presents them."""

from typing import Any, Final, TypeAlias

from .ops import Tensor

# Any address: memory, or a struct that Python fills. cffi itself refuses a wrong one.
Address: TypeAlias = Any
'''

FFI = '''
class FFI:
    """The part of cffi's compiled FFI object that moegraph uses."""

    NULL: Final[Any]
    def new(self, cdecl: str, init: object = ..., /) -> Any: ...
    def cast(self, cdecl: str, value: object, /) -> Any: ...
    def string(self, cdata: Address, maxlen: int = ..., /) -> bytes: ...
    def buffer(self, cdata: Address, size: int = ..., /) -> Any: ...
    def from_buffer(self, cdecl: object, buffer: object = ..., /) -> Any: ...

ffi: FFI
lib: Lib
'''


def python_type(kind: model.BaseType, is_argument: bool) -> str:
    """Return the annotation of a C type."""
    if isinstance(kind, model.VoidType):
        return "None"
    if isinstance(kind, model.EnumType):
        return "int"
    if isinstance(kind, model.PrimitiveType):
        return {"_Bool": "bool", "float": "float", "double": "float"}.get(kind.name, "int")
    if isinstance(kind, model.ArrayType):
        is_text = getattr(kind.item, "name", "") == "char"
        return "Address" if is_text else f"MutableSequence[{python_type(kind.item, False)}]"
    if isinstance(kind, model.StructType):
        return class_of(kind)
    if isinstance(kind, model.PointerType) and isinstance(kind.totype, model.StructType):
        # A function that takes a struct by value gets the result of `ffi.new`, which is Any.
        is_plain = kind.totype.fldnames and kind.totype.name != "ggml_tensor"
        return "Address" if is_plain and is_argument else class_of(kind.totype)
    return "Address"


def class_of(kind: model.StructType) -> str:
    """Return the class for a struct and for a pointer to it, which cffi treats alike."""
    return "Tensor" if kind.name == "ggml_tensor" else f"{kind.name}_ptr"


def structs(declared: dict[str, model.BaseType]) -> Iterator[str]:
    """Yield a class for each struct, opaque structs first."""
    kinds = [kind for kind in declared.values() if isinstance(kind, model.StructType)]
    yield from (f"class {class_of(kind)}: ..." for kind in kinds if not kind.fldnames)
    for kind in kinds:
        if not kind.fldnames or kind.name == "ggml_tensor":
            continue
        yield f"\nclass {class_of(kind)}:"
        for name, field in zip(kind.fldnames, kind.fldtypes):
            # a struct has a field `async`, which is a keyword of Python
            if name != "async":
                yield f"    {name}: {python_type(field, False)}"


def constants(declared: dict[str, model.BaseType]) -> Iterator[str]:
    for key, kind in declared.items():
        if key.startswith("macro "):
            yield f"    {key.split()[1]}: Final[int]"
        elif isinstance(kind, model.EnumType):
            yield from (f"    {name}: Final[int]" for name in kind.enumerators)


def function(name: str, kind: model.BaseFunctionType) -> Iterator[str]:
    arguments = [f"a{i}: {python_type(a, True)}" for i, a in enumerate(kind.args)]
    result = python_type(kind.result, False)
    listed = ", ".join(["self", *arguments, "/"] if arguments else ["self"])
    line = f"    def {name}({listed}) -> {result}: ..."
    if len(line) <= WIDTH:
        yield line
        return
    yield f"    def {name}("
    yield from (f"        {part}," for part in ["self", *arguments, "/"])
    yield f"    ) -> {result}: ..."


def parse() -> dict[str, model.BaseType]:
    """Return what decl/*.h declares, by kind and name: 'struct ggml_tensor'."""
    # private, but cffi's own C generator reads it too, and there is no public equivalent
    ffi: Any = cffi.FFI()
    ffi.cdef(declarations())
    return {key: kind for key, (kind, _) in ffi._parser._declarations.items()}


def stub() -> str:
    """Return the text of the stub."""
    declared = parse()
    lines = ["", *structs(declared), "\nclass Lib:", *constants(declared)]
    for key, kind in declared.items():
        if key.startswith("function ") and isinstance(kind, model.BaseFunctionType):
            lines += function(key.split()[1], kind)
    return HEAD + "\n".join(lines) + "\n" + FFI


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, STUB, stub))
