"""Random but valid quantized blocks of every ggml type the engine reads.

A block is filled with random quants, and its scale fields are set so that the dequantized weights
have mean zero and a given standard deviation. Layouts: ggml/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Fill = Callable[[np.random.Generator, int, float], U8]
Constant = Callable[[float], U8]

# Block scales vary by +-25 % so that no two blocks of a row weigh the same.
JITTER = 0.25
JITTER_RMS = float(np.sqrt(1 + JITTER**2 / 3))
# Of the 8 magnitudes of MXFP4, doubled.
_FP4 = float(np.sqrt(np.mean(np.square(gguf.quants.MXFP4.kvalues[:8], dtype=np.float64))))


@dataclass(frozen=True)
class BlockType:
    """A ggml tensor type: its id, elements and bytes of a block, and how to fill blocks.

    constant: makes a block in which every weight is one value.
    """

    name: str
    ggml_id: int
    n_elem: int
    n_bytes: int
    fill: Fill
    constant: Constant

    def row_bytes(self, ne0: int) -> int:
        """Return the bytes of a row of `ne0` elements."""
        if ne0 % self.n_elem:
            raise ValueError(f"row of {ne0}: not a multiple of the {self.n_elem} of {self.name}")
        return ne0 // self.n_elem * self.n_bytes


def _uniform_rms(levels: int) -> float:
    """Return the standard deviation of a uniform choice of `levels` consecutive integers."""
    return float(np.sqrt((levels**2 - 1) / 12))


def _rms(values: object) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


def _random(rng: np.random.Generator, n: int, n_bytes: int) -> U8:
    return np.frombuffer(rng.bytes(n * n_bytes), np.uint8).reshape(n, n_bytes).copy()


def _jitter(
    rng: np.random.Generator, n: int, std: float, unit_rms: float, signed: bool = False
) -> F32:
    """Return n block scales that give weights of `std` where scale 1 gives `unit_rms`."""
    d = rng.uniform(1 - JITTER, 1 + JITTER, n) * (std / (unit_rms * JITTER_RMS))
    if signed:
        d *= rng.integers(0, 2, n) * 2 - 1
    return d.astype(np.float32)


def _put_f16(blocks: U8, at: int, values: F32) -> None:
    blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _floats(name: str) -> tuple[Fill, Constant]:
    """Return what fills a type of floats, and what makes one of them."""

    def cast(values: F32) -> U8:
        found = gguf.quants.quantize(values[None], Type[name])  # much slower by short rows
        return found.view(np.uint8).reshape(len(values), -1)

    return (
        lambda rng, n, std: cast(rng.standard_normal(n, np.float32) * np.float32(std)),
        lambda value: cast(np.array([value], np.float32))[0],
    )


def _fill_plain(
    n_bytes: int, d_at: int, unit_rms: float, min_at: int = -1, mid: float = 0.0
) -> Fill:
    """Fill types whose quants are all free; a signed d, or a min of -mid * d, removes the mean."""

    def fill(rng: np.random.Generator, n: int, std: float) -> U8:
        blocks = _random(rng, n, n_bytes)
        d = _jitter(rng, n, std, unit_rms, signed=min_at < 0)
        _put_f16(blocks, d_at, d)
        if min_at >= 0:
            _put_f16(blocks, min_at, -mid * d)
        return blocks

    return fill


def _fill_q8_0(rng: np.random.Generator, n: int, std: float) -> U8:
    blocks = _random(rng, n, 34)
    blocks[blocks == 0x80] = 0  # the quantizer never emits -128
    _put_f16(blocks, 0, _jitter(rng, n, std, _uniform_rms(255)))
    return blocks


def _fill_q2_k(rng: np.random.Generator, n: int, std: float) -> U8:
    blocks = _random(rng, n, 84)
    scale = rng.integers(8, 16, (n, 16), dtype=np.uint8)
    blocks[:, :16] = scale | (scale << 4)
    d = _jitter(rng, n, std, _rms(range(8, 16)) * _uniform_rms(4))
    _put_f16(blocks, 80, d)
    _put_f16(blocks, 82, 1.5 * d)
    return blocks


def _pack_scale_min(scale: U8, low: U8) -> U8:
    """Pack eight 6-bit scales and eight 6-bit mins into the 12 bytes of Q4_K and Q5_K."""
    packed = np.empty((len(scale), 12), np.uint8)
    packed[:, 0:4] = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    packed[:, 4:8] = low[:, :4] | ((low[:, 4:] >> 4) << 6)
    packed[:, 8:12] = (scale[:, 4:] & 15) | ((low[:, 4:] & 15) << 4)
    return packed


def _fill_q45_k(n_bytes: int, levels: int) -> Fill:
    def fill(rng: np.random.Generator, n: int, std: float) -> U8:
        blocks = _random(rng, n, n_bytes)
        scale = rng.integers(32, 64, (n, 8), dtype=np.uint8)
        blocks[:, 4:16] = _pack_scale_min(scale, scale)
        d = _jitter(rng, n, std, _rms(range(32, 64)) * _uniform_rms(levels))
        _put_f16(blocks, 0, d)
        _put_f16(blocks, 2, (levels - 1) / 2 * d)
        return blocks

    return fill


def _fill_q6_k(rng: np.random.Generator, n: int, std: float) -> U8:
    blocks = _random(rng, n, 210)
    scale = rng.integers(32, 128, (n, 16), dtype=np.int8)
    scale *= rng.integers(0, 2, (n, 16), dtype=np.int8) * 2 - 1
    blocks[:, 192:208] = scale.view(np.uint8)
    _put_f16(blocks, 208, _jitter(rng, n, std, _rms(range(32, 128)) * _rms(range(-32, 32))))
    return blocks


def _fill_mxfp4(rng: np.random.Generator, n: int, std: float) -> U8:
    blocks = _random(rng, n, 17)
    exponent = np.log2(std / _FP4) + 128
    low = np.floor(exponent)
    # Scales are powers of two: two neighbours are mixed so that the mean square is right.
    share = (4.0 ** (exponent - low) - 1) / 3
    blocks[:, 0] = (low + (rng.random(n) < share)).astype(np.uint8)
    return blocks


def _const(
    n_bytes: int, d_at: int, unit: float, *fields: tuple[int, int, int]
) -> Callable[[float], U8]:
    """Return a maker of one block in which every weight is `value`.

    fields: (start, stop, byte) runs that make all codes alike; the scale at d_at is value / unit.
    """

    def constant(value: float) -> U8:
        block = np.zeros(n_bytes, np.uint8)
        for start, stop, byte in fields:
            block[start:stop] = byte
        block[d_at : d_at + 2] = np.array([value / unit], "<f2").view(np.uint8)
        return block

    return constant


def _const_mxfp4(value: float) -> U8:
    block = np.full(17, 0x77 if value > 0 else 0xFF, np.uint8)
    block[0] = round(np.log2(abs(value) / 12) + 128)
    return block


_S6, _IQ4 = _rms(range(-32, 32)), _rms(gguf.quants.IQ4_NL.kvalues)
_Q3 = _S6 * _rms(range(-4, 4))
_HIGH = (8, 12, 0xFF), (12, 16, 0xF0)  # scales and mins of Q4_K and Q5_K

TYPES: dict[str, BlockType] = {
    name: BlockType(name, Type[name], *gguf.GGML_QUANT_SIZES[Type[name]], *makers)
    for name, makers in {
        "F32": _floats("F32"),
        "F16": _floats("F16"),
        "BF16": _floats("BF16"),
        "Q4_0": (_fill_plain(18, 0, _rms(range(-8, 8))), _const(18, 0, 7, (2, 18, 0xFF))),
        "Q4_1": (_fill_plain(20, 0, _uniform_rms(16), 2, 7.5), _const(20, 2, 1)),
        "Q5_0": (_fill_plain(22, 0, _rms(range(-16, 16))), _const(22, 0, 15, (2, 22, 0xFF))),
        "Q5_1": (_fill_plain(24, 0, _uniform_rms(32), 2, 15.5), _const(24, 2, 1)),
        "Q8_0": (_fill_q8_0, _const(34, 0, 127, (2, 34, 127))),
        "Q2_K": (_fill_q2_k, _const(84, 82, -15, (0, 16, 0xF0))),
        "Q3_K": (_fill_plain(110, 108, _Q3), _const(110, 108, 31 * 3, (0, 108, 0xFF))),
        "Q4_K": (_fill_q45_k(144, 16), _const(144, 2, -63, *_HIGH)),
        "Q5_K": (_fill_q45_k(176, 32), _const(176, 2, -63, *_HIGH)),
        "Q6_K": (_fill_q6_k, _const(210, 208, 31 * 64, (0, 192, 0xFF), (192, 208, 64))),
        "IQ4_NL": (_fill_plain(18, 0, _IQ4), _const(18, 0, 113, (2, 18, 0xFF))),
        "IQ4_XS": (_fill_plain(136, 0, _S6 * _IQ4), _const(136, 0, 31 * 113, (2, 136, 0xFF))),
        "MXFP4": (_fill_mxfp4, _const_mxfp4),
    }.items()
}
