"""Tensor bytes: quantized matrices copied from pools, and the few vectors that have a structure.

A pool holds random blocks of one type and deviation. A matrix is a run of the pool from a random
offset, and an expert stack is one run for each expert, so writing needs no arithmetic. The number
of blocks is prime and above the number of rows, so that no two rows of a matrix are equal: equal
rows of the head would tie in every argmax.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .blocks import TYPES, U8
from .calibrate import Calibration
from .gguf_write import Bytes
from .shape import Shape
from .tensors import Tensor

Array = npt.NDArray[np.float64]

POOL_MIN = 256 << 10
POOL_MAX = 16 << 20


def _next_prime(n: int) -> int:
    while any(n % p == 0 for p in range(2, int(n**0.5) + 1)):
        n += 1
    return n


class Filler:
    """Makes the bytes of every tensor of one model; the same seed gives the same bytes."""

    def __init__(self, shape: Shape, cal: Calibration, embd_type: str, seed: int) -> None:
        self.shape, self.cal, self.seed = shape, cal, seed
        self.embd_type = embd_type
        self.n_const = cal.const_dims(shape, embd_type)
        self.const, self.embd_std = cal.embd_scale(shape, embd_type)
        # gemma4 multiplies embeddings by sqrt(n_embd)
        self._gain = shape.n_embd**-0.5 if shape.arch == "gemma4" else 1.0
        self._pools: dict[tuple[str, float, int], U8] = {}

    def data(self, t: Tensor) -> Bytes:
        """Return the data of tensor `t`."""
        if t.fill == "pool":
            return self._tiled(t)
        if t.fill == "embd":
            return self._embedding(t)
        values: Array = getattr(self, f"_{t.fill}")(t, self._rng(t.name))
        return values.astype("<f4").tobytes()

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, zlib.crc32(name.encode())]))

    def _pool(self, type_name: str, std: float, n_rows: int, n_bytes: int) -> U8:
        kind = TYPES[type_name]
        size = min(max(4 * n_bytes, POOL_MIN), POOL_MAX)
        n = _next_prime(max(size // kind.n_bytes, n_rows + 1))
        key = (type_name, std, n)
        if key not in self._pools:
            self._pools[key] = kind.fill(self._rng(f"{key}"), n, std)
        return self._pools[key]

    def _tiled(self, t: Tensor) -> Bytes:
        n_experts = t.ne[2] if len(t.ne) == 3 else 1
        rows = t.n_rows // n_experts
        pool = self._pool(t.type, t.std, rows, rows * t.row_bytes)
        starts = self._rng(t.name).integers(0, len(pool), n_experts)
        return b"".join(piece for at in starts for piece in _run(pool, int(at), rows * t.row_bytes))

    def _embedding(self, t: Tensor) -> Bytes:
        kind, n_bytes = TYPES[t.type], t.n_rows * t.row_bytes
        fixed = np.tile(kind.constant(self.const * self._gain), self.n_const // kind.n_elem)
        pool = self._pool(t.type, self.embd_std * self._gain, t.n_rows, n_bytes)
        rows = np.frombuffer(bytearray().join(_run(pool, 0, n_bytes)), np.uint8)
        rows = rows.reshape(t.n_rows, t.row_bytes)
        rows[:, : len(fixed)] = fixed
        return rows.reshape(-1).data

    def _norm(self, t: Tensor, rng: np.random.Generator) -> Array:
        return 1 + 0.1 * rng.standard_normal(t.ne[0])

    def _block_norm(self, t: Tensor, rng: np.random.Generator) -> Array:
        weights = self._norm(t, rng)
        weights[: self.n_const] = 1  # the router's static part is read through these
        return weights

    def _mixer_norm(self, t: Tensor, rng: np.random.Generator) -> Array:
        weights = self._norm(t, rng)
        weights[: self.n_const] *= self.cal.mixer_boost
        return weights

    def _qk_norm(self, t: Tensor, rng: np.random.Generator) -> Array:
        return self.cal.qk_norm * t.std * self._norm(t, rng)

    def _scaled_norm(self, t: Tensor, rng: np.random.Generator) -> Array:
        return t.std * self._norm(t, rng)

    def _rope_freqs(self, t: Tensor, rng: np.random.Generator) -> Array:
        # a quarter of the pairs rotates
        return np.where(np.arange(t.ne[0]) < t.ne[0] // 4, 1.0, 1e30)

    def _output_norm(self, t: Tensor, rng: np.random.Generator) -> Array:
        weights = self._norm(t, rng)
        if self.shape.tied:
            # Signs part the head from the embedding: without them every token predicts itself.
            signs = rng.integers(0, 2, t.ne[0]) * 2 - 1
            std = self.embd_std * self._gain
            weights *= signs * self.cal.logit_std / (std * np.sqrt(t.ne[0]))
        return weights

    def _normal(self, t: Tensor, rng: np.random.Generator) -> Array:
        return t.std * rng.standard_normal(t.ne[::-1])

    def _ssm_dt(self, t: Tensor, rng: np.random.Generator) -> Array:
        # Step sizes of 0.001 to 0.1, as state-space models are initialised, before softplus.
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), t.ne[0]))
        return np.log(np.expm1(dt))

    def _ssm_a(self, t: Tensor, rng: np.random.Generator) -> Array:
        return -np.exp(rng.uniform(0, np.log(16), t.ne[0]))

    def _router(self, t: Tensor, rng: np.random.Generator) -> Array:
        """Return rows [n_expert, n_embd]: a static score of each expert and a random projection."""
        s, cal, n = self.shape, self.cal, self.n_const
        energy = cal.stream_energy(s, t.il)
        share = cal.const_share / energy if n else 0.0
        a = cal.static_part(s, t.il, rng) if n else 0.0
        rows = rng.standard_normal((s.n_expert, s.n_embd))
        rows *= cal.router_std * np.sqrt((1 - a**2) / (s.n_embd * (1 - share)))
        if n:
            static = cal.router_std * a * rng.standard_normal((s.n_expert, 1))
            rows[:, :n] = static * np.sqrt(energy) / (n * self.const)
        return rows


def _run(pool: U8, start: int, n_bytes: int) -> Iterator[memoryview]:
    """Yield `n_bytes` of the pool from block `start` on, cyclically."""
    flat = pool.reshape(-1).data
    at = start * pool.shape[1]
    while n_bytes:
        n = min(n_bytes, len(flat) - at)
        yield flat[at : at + n]
        at, n_bytes = 0, n_bytes - n
