"""What a tensor of a model file must look like, and a check of one tensor."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.tensorfile import TensorInfo

MATRIX_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in (
        "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4"
    ).split()
)
# Norms, biases and the convolution go into element-wise ops and kernels that read only F32.
VECTOR_TYPES = frozenset({GGMLQuantizationType.F32})

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.")


@dataclass(frozen=True)
class Expected:
    """What one tensor must look like. Shapes: ne in ggml order, trailing 1s left out.

    required: a file must have it, or the tensor named by `instead` of the same block.
    """

    ne: tuple[int, ...]
    types: frozenset[GGMLQuantizationType]
    required: bool = True
    instead: str = ""

    @property
    def ne4(self) -> tuple[int, int, int, int]:
        """Return the shape padded with 1 to four entries."""
        a, b, c, d = self.ne + (1,) * (4 - len(self.ne))
        return a, b, c, d


def matrix(*ne: int, required: bool = True, instead: str = "") -> Expected:
    """Return what a matrix, or a stack of them, must look like."""
    return Expected(ne, MATRIX_TYPES, required, instead)


def vector(*ne: int, required: bool = True) -> Expected:
    """Return what operands of element-wise ops must look like."""
    return Expected(ne, VECTOR_TYPES, required)


def with_biases(matrices: Mapping[str, Expected]) -> dict[str, Expected]:
    """Return what matrices, and what the biases of each, must look like, by their names."""
    biases = {name.replace("weight", "bias"): vector(*of.ne[1:]) for name, of in matrices.items()}
    return {**matrices, **biases}


def block_index(name: str) -> int | None:
    """Return N of a 'blk.N.' tensor name, or None for a tensor outside the blocks."""
    match = _BLOCK.match(name)
    return int(match.group(1)) if match else None


def check_tensor(path: os.PathLike[str], info: TensorInfo, spec: Expected) -> None:
    """Check the shape and type of one tensor that runs."""
    if info.ne != spec.ne4:
        raise ModelFileError(
            f"{path}: tensor {info.name} has shape {list(info.ne[: info.n_dims])}; "
            f"the keys of the file ask for {list(spec.ne)}"
        )
    if info.type not in spec.types:
        names = ", ".join(t.name for t in sorted(spec.types))
        raise UnsupportedModel(
            f"{path}: tensor {info.name} has type {info.type.name}; moegraph runs {names} here"
        )


def check_tensors(
    path: os.PathLike[str], tensors: Mapping[str, TensorInfo], expected: Mapping[str, Expected]
) -> list[str]:
    """Check that a file holds what it needs; return a warning if it holds more, without the path.

    tensors: those of the file that are to be looked at.
    """
    missing = [name for name, spec in expected.items() if _is_missing(name, spec, tensors)]
    if missing:
        raise ModelFileError(
            f"{path}: tensor {_listed(missing)} missing; the file is incomplete "
            "or its keys describe another model"
        )
    for name, spec in expected.items():
        if name in tensors:
            check_tensor(path, tensors[name], spec)
    unknown = [name for name in tensors if name not in expected]
    what = "not part of this architecture, ignored"
    return [f"tensor {_listed(unknown)}: {what}"] if unknown else []


def _is_missing(name: str, spec: Expected, tensors: Collection[str]) -> bool:
    block = _BLOCK.match(name)
    instead = (block.group() if block else "") + spec.instead
    return spec.required and name not in tensors and instead not in tensors


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
