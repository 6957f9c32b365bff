"""Find weights that are NaN or infinite, in values and in block scales.

A file that was damaged in transit often keeps its structure and holds such values in its data. One
of them turns every logit into NaN. The check reads the whole file once, at disk speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .file import GgufFile
from .tensorfile import TensorInfo

_Q = GGMLQuantizationType
_CHUNK_BYTES = 16 << 20

# (storage, mask, limit): a field is bad when its masked bits reach the limit. A float is NaN or
# infinite when all of its exponent bits are set.
_F32 = (np.dtype("<u4"), 0x7F80_0000, 0x7F80_0000)
_F16 = (np.dtype("<u2"), 0x7C00, 0x7C00)
_BF16 = (np.dtype("<u2"), 0x7F80, 0x7F80)
# 0xFF is NaN. From 0xFD (2^126, which ggml halves) on, the largest values of a block overflow.
_E8M0 = (np.dtype("u1"), 0xFF, 0xFD)

# Byte offsets of the floating-point fields of one block. Source: ggml/src/ggml-common.h.
_FIELDS: dict[GGMLQuantizationType, tuple[tuple[int, ...], tuple[np.dtype[Any], int, int]]] = {
    _Q.F32: ((0,), _F32),
    _Q.F16: ((0,), _F16),
    _Q.BF16: ((0,), _BF16),
    _Q.Q4_0: ((0,), _F16),
    _Q.Q4_1: ((0, 2), _F16),
    _Q.Q5_0: ((0,), _F16),
    _Q.Q5_1: ((0, 2), _F16),
    _Q.Q8_0: ((0,), _F16),
    _Q.Q2_K: ((80, 82), _F16),
    _Q.Q3_K: ((108,), _F16),
    _Q.Q4_K: ((0, 2), _F16),
    _Q.Q5_K: ((0, 2), _F16),
    _Q.Q6_K: ((208,), _F16),
    _Q.IQ4_NL: ((0,), _F16),
    _Q.IQ4_XS: ((0,), _F16),
    _Q.MXFP4: ((0,), _E8M0),
}


@dataclass(frozen=True)
class BadTensor:
    """A tensor that holds NaN or infinity.

    n_bad, n_blocks: bad and all blocks (single values for float types). first: index of the first
    bad block.
    """

    name: str
    type: str
    n_bad: int
    n_blocks: int
    first: int


def find_nonfinite(
    model: GgufFile, progress: Callable[[int, int], None] | None = None
) -> list[BadTensor]:
    """Return every tensor with a value or scale that is NaN or infinite.

    progress: called with (bytes read, bytes in total) after each chunk.
    """
    infos = [info for info in model.tensors.values() if info.type in _FIELDS]
    total, done = sum(info.nbytes for info in infos), 0
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    found = []
    for info in infos:
        bad, first = 0, -1
        block_bytes = GGML_QUANT_SIZES[info.type][1]
        step = _CHUNK_BYTES // block_bytes * block_bytes
        for start in range(0, info.nbytes, step):
            chunk = buffer[: min(step, info.nbytes - start)]
            model.read(info, chunk, start)
            blocks = _bad_blocks(info, chunk)
            if len(blocks):
                bad += len(blocks)
                first = first if first >= 0 else start // block_bytes + int(blocks[0])
            done += len(chunk)
            if progress is not None:
                progress(done, total)
        if bad:
            n_blocks = info.nbytes // block_bytes
            found.append(BadTensor(info.name, info.type.name, bad, n_blocks, first))
    return found


def _bad_blocks(info: TensorInfo, chunk: np.ndarray) -> np.ndarray:
    """Return the indices of blocks with a bad field."""
    offsets, (dtype, mask, limit) = _FIELDS[info.type]
    blocks = chunk.reshape(-1, GGML_QUANT_SIZES[info.type][1])
    bad = np.zeros(len(blocks), bool)
    for at in offsets:
        field = np.ascontiguousarray(blocks[:, at : at + dtype.itemsize]).view(dtype)[:, 0]
        bad |= (field & mask) >= limit
    return np.flatnonzero(bad)
