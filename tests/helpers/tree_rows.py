"""Trees of rows for the DeltaNet operations, and every row's path alone to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder

Array = npt.NDArray[np.float32]
Parents = list[int]
Leaf = Callable[[str, npt.NDArray], Any]


def chain(n: int, _: np.random.Generator) -> Parents:
    """Return a chain: row i continues row i - 1."""
    return [i - 1 for i in range(n)]


def star(n: int, _: np.random.Generator) -> Parents:
    """Return rows that all continue row 0."""
    return [min(i, 1) - 1 for i in range(n)]


def heap(n: int, _: np.random.Generator) -> Parents:
    """Return a complete binary tree whose root is the committed state: most states wait at once."""
    return [i // 2 - 1 for i in range(n)]


def forest(n: int, rng: np.random.Generator) -> Parents:
    """Return rows that continue any earlier row, or what is committed."""
    return [int(rng.integers(-1, i)) for i in range(n)]


def deep(n: int, rng: np.random.Generator) -> Parents:
    """Return a tree of one root where rows tend to continue recent ones."""
    return [max(i - int(rng.geometric(0.4)), 0) if i else -1 for i in range(n)]


TREES = (chain, star, heap, forest, deep)


def path(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows from a root to `row`, both included."""
    rows = []
    while row >= 0:
        rows.append(row)
        row = parents[row]
    return rows[::-1]


def compute(device: Device, build: Callable[[Builder, Leaf], Any]) -> Array:
    """Build and compute a graph; `build` makes its inputs with leaf(name, array)."""
    with Context(64, 64) as context:
        b, leaves = Builder(context, 64), []

        def leaf(name: str, array: npt.NDArray) -> Any:
            dtype = F32 if array.dtype == np.float32 else I32
            leaves.append((b.leaf(dtype, array.shape[::-1], name), np.ascontiguousarray(array)))
            return leaves[-1][0]

        out = b.expand(build(b, leaf))
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            for tensor, array in leaves:
                C.ggml_backend_tensor_set(tensor, ffi.from_buffer(array), 0, array.nbytes)
            device.check(C.mg_launch(device.compute.ptr, b.graph, ffi.NULL, 0), "tree")
            device.synchronize()
            result = np.empty(tuple(out.ne)[::-1], np.float32)
            C.ggml_backend_tensor_get(out, ffi.from_buffer(result), 0, result.nbytes)
    return result


@dataclass
class DeltaCase:
    """Operands of the delta rule in numpy order: q, k [B, T, Hk, S], v [B, T, H, S], ..."""

    q: Array
    k: Array
    v: Array
    gate: Array
    beta: Array
    state: Array

    @classmethod
    def random(
        cls, rng: np.random.Generator, n_seqs: int, n_tokens: int, heads: tuple[int, int], s: int
    ) -> DeltaCase:
        """Draw operands for (key heads, value heads) as a model has them: k of length 1."""
        n_k, n_v = heads

        def normal(*ne: int) -> Array:
            return rng.standard_normal(ne).astype(np.float32)

        k = normal(n_seqs, n_tokens, n_k, s)
        return cls(
            q=normal(n_seqs, n_tokens, n_k, s),
            k=k / np.linalg.norm(k, axis=-1, keepdims=True),
            v=normal(n_seqs, n_tokens, n_v, s),
            gate=-np.abs(normal(n_seqs, n_tokens, n_v, 1)) / 4,
            beta=rng.uniform(0.1, 1, (n_seqs, n_tokens, n_v, 1)).astype(np.float32),
            state=normal(n_seqs, n_v, s, s),
        )

    def run(self, device: Device, parents: npt.NDArray[np.int32] | None) -> Array:
        """Return the scores [B, T, H, S], of a tree or of plain sequences."""

        def build(b: Builder, leaf: Leaf) -> Any:
            operands = [leaf(name, array) for name, array in vars(self).items()]
            tree = None if parents is None else leaf("parents", parents)
            return b.gated_delta_net(*operands, parents=tree)

        flat = compute(device, build).reshape(-1)
        return flat[: self.v.size].reshape(self.v.shape)

    def alone(self, device: Device, seq: int, rows: Sequence[int]) -> Array:
        """Run some rows of a sequence as a plain one: [len(rows), H, S]."""
        picked = [a[seq : seq + 1, rows] for a in (self.q, self.k, self.v, self.gate, self.beta)]
        return DeltaCase(*picked, self.state[seq : seq + 1]).run(device, None)[0]


@dataclass
class ConvCase:
    """Columns [B, channels, d_conv - 1 + T] and kernel [channels, d_conv], numpy order."""

    columns: Array
    kernel: Array

    @classmethod
    def random(
        cls, rng: np.random.Generator, n_seqs: int, n_tokens: int, channels: int, d_conv: int
    ) -> ConvCase:
        """Draw operands."""
        columns = rng.standard_normal((n_seqs, channels, d_conv - 1 + n_tokens))
        kernel = rng.standard_normal((channels, d_conv))
        return cls(columns.astype(np.float32), kernel.astype(np.float32))

    def run(self, device: Device, parents: npt.NDArray[np.int32] | None, silu: bool) -> Array:
        """Return the convolution [B, T, channels], activated on request (fused on CUDA)."""

        def build(b: Builder, leaf: Leaf) -> Any:
            tree = None if parents is None else leaf("parents", parents)
            out = b.ssm_conv(leaf("x", self.columns), leaf("kernel", self.kernel), tree)
            return b.silu(out) if silu else out

        return compute(device, build)[0]

    def alone(self, device: Device, seq: int, rows: Sequence[int], silu: bool) -> Array:
        """Run some rows of a sequence as a plain one: [len(rows), channels]."""
        front = self.kernel.shape[1] - 1
        picked = [*range(front), *(front + row for row in rows)]
        columns = self.columns[seq : seq + 1, :, picked]
        return ConvCase(columns, self.kernel).run(device, None, silu)[0]
