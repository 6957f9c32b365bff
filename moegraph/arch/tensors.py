"""What a tensor of a model file must look like, and a check of one tensor."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.tensorfile import TensorInfo

_Q = GGMLQuantizationType
MATRIX_TYPES = frozenset(
    {
        _Q.F32,
        _Q.F16,
        _Q.BF16,
        _Q.Q8_0,
        _Q.Q4_0,
        _Q.Q4_1,
        _Q.Q5_0,
        _Q.Q5_1,
        _Q.Q2_K,
        _Q.Q3_K,
        _Q.Q4_K,
        _Q.Q5_K,
        _Q.Q6_K,
        _Q.IQ4_NL,
        _Q.IQ4_XS,
        _Q.MXFP4,
    }
)
# Norms, biases and the convolution go into element-wise ops and kernels that read only F32.
VECTOR_TYPES = frozenset({_Q.F32})

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.")


@dataclass(frozen=True)
class Expected:
    """What one tensor must look like. Shapes: ne in ggml order, trailing 1s left out."""

    ne: tuple[int, ...]
    types: frozenset[GGMLQuantizationType]
    required: bool = True

    @property
    def ne4(self) -> tuple[int, int, int, int]:
        """Return the shape padded with 1 to four entries."""
        a, b, c, d = self.ne + (1,) * (4 - len(self.ne))
        return a, b, c, d


def matrix(*ne: int, required: bool = True) -> Expected:
    """Return what a matrix, or a stack of them, must look like."""
    return Expected(ne, MATRIX_TYPES, required)


def vector(*ne: int, required: bool = True) -> Expected:
    """Return what operands of element-wise ops must look like."""
    return Expected(ne, VECTOR_TYPES, required)


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
