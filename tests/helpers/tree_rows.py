"""Trees of rows, and the recurrences of DeltaNet over states by slot, ours and upstream's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.tree_shapes import Parents
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder

Array = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Leaf = Callable[[str, npt.NDArray], Any]


def padded(parents: Sequence[int], rng: np.random.Generator) -> tuple[Parents, list[int]]:
    """Put padding between the rows of a tree; return the new parents and where the rows are."""
    places = np.cumsum(rng.integers(1, 3, len(parents))) - 1
    result = [-2] * (int(places[-1]) + 2)
    for at, parent in zip(places, parents):
        result[at] = int(places[parent]) if parent >= 0 else -1
    return result, places.tolist()


def compute(device: Device, build: Callable[[Builder, Leaf], Sequence[Any]]) -> list[Array]:
    """Compute a graph and return the tensors that `build` returns; leaf(name, array) is an input.

    Each keeps memory of its own. The first one is a node.
    """
    with Context(64, 64) as context:
        b, leaves = Builder(context, 64), []

        def leaf(name: str, array: npt.NDArray) -> Any:
            dtype = F32 if array.dtype == np.float32 else I32
            leaves.append((b.leaf(dtype, array.shape[::-1], name), np.ascontiguousarray(array)))
            return leaves[-1][0]

        wanted = build(b, leaf)
        b.expand(wanted[0])
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            for tensor, array in leaves:
                C.ggml_backend_tensor_set(tensor, ffi.from_buffer(array), 0, array.nbytes)
            device.check(C.mg_launch(device.compute.ptr, b.graph, ffi.NULL, 0), "tree")
            device.synchronize()
            return [_read(tensor) for tensor in wanted]


def _read(tensor: Any) -> Array:
    result = np.empty(tuple(tensor.ne)[::-1], np.float32)
    C.ggml_backend_tensor_get(tensor, ffi.from_buffer(result), 0, result.nbytes)
    while result.ndim > 1 and result.shape[0] == 1:
        result = result[0]
    return result


def check_lengths(case: DeltaCase | ConvCase, device: Device, lengths: Sequence[int]) -> None:
    """Check that each sequence has the bits of its first rows alone, and zeros after them."""
    got, pool = case.run(device, lengths=np.array(lengths, np.int32))
    expected = case.pool.copy()
    for seq, n in enumerate(lengths):
        n, slot = min(max(n, 0), got.shape[1]), int(case.slots[seq])
        assert not got[seq, n:].any()
        if n and 0 <= slot < len(expected):
            out, alone = case.pick(seq, range(n)).run(device)
            np.testing.assert_array_equal(got[seq, :n], out[0])
            expected[slot] = alone[slot]
    np.testing.assert_array_equal(pool, expected)


def after(pool: Array, slots: Ints, states: Array) -> Array:
    """Return the pool with the states of the sequences that are not padding."""
    pool = pool.copy()
    for slot, state in zip(slots, states, strict=True):
        if 0 <= slot < len(pool):
            pool[slot] = state.reshape(-1)
    return pool


@dataclass
class DeltaCase:
    """Operands of the delta rule in numpy order: q, k [B, T, Hk, S], v [B, T, H, S], gate and beta
    [B, T, H, 1], pool [n_slots, H * S * S], slots [B]."""

    q: Array
    k: Array
    v: Array
    gate: Array
    beta: Array
    pool: Array
    slots: Ints

    @classmethod
    def random(
        cls, rng: np.random.Generator, slots: Sequence[int], n_tokens: int, heads: tuple[int, int],
        s: int, n_slots: int = 5,
    ) -> DeltaCase:  # fmt: skip
        """Draw operands for (key heads, value heads) as a model has them: k of length 1."""
        (n_k, n_v), n = heads, len(slots)

        def normal(*ne: int) -> Array:
            return rng.standard_normal(ne).astype(np.float32)

        k = normal(n, n_tokens, n_k, s)
        return cls(
            q=normal(n, n_tokens, n_k, s),
            k=k / np.linalg.norm(k, axis=-1, keepdims=True),
            v=normal(n, n_tokens, n_v, s),
            gate=-np.abs(normal(n, n_tokens, n_v, 1)) / 4,
            beta=rng.uniform(0.1, 1, (n, n_tokens, n_v, 1)).astype(np.float32),
            pool=normal(n_slots, n_v * s * s),
            slots=np.array(slots, np.int32),
        )

    def run(
        self, device: Device, parents: Ints | None = None, lengths: Ints | None = None
    ) -> tuple[Array, Array]:
        """Return the result [B, T, H, S] and the pool after it.

        q, k and v are views of one tensor, as they are in a layer.
        """
        n, t = self.v.shape[:2]
        parts = [a.reshape(n, t, -1) for a in (self.q, self.k, self.v)]

        def build(b: Builder, leaf: Leaf) -> Sequence[Any]:
            joined = leaf("qkv", np.concatenate(parts, -1))
            views, offset = [], 0
            for array in (self.q, self.k, self.v):
                heads, s = array.shape[2:]
                strides = (4 * s, joined.nb[1], joined.nb[2])
                views.append(b.view(joined, (s, heads, t, n), strides, 4 * offset))
                offset += heads * s
            gates = leaf("gate", self.gate), leaf("beta", self.beta)
            pool, slots = leaf("pool", self.pool), leaf("slots", self.slots)
            tree = None if parents is None else leaf("parents", parents)
            rows = None if lengths is None else leaf("lengths", lengths)
            return b.delta_net(*views, *gates, pool, slots, tree, rows), pool

        out, pool = compute(device, build)
        return out.reshape(self.v.shape), pool.reshape(self.pool.shape)

    def upstream(self, device: Device) -> tuple[Array, Array]:
        """Return what ggml_gated_delta_net gives for the states in the slots: result and pool."""
        n, _, h, s = self.v.shape

        def build(b: Builder, leaf: Leaf) -> Sequence[Any]:
            rows = self.q, self.k, self.v, self.gate, self.beta
            operands = [leaf(name, a) for name, a in zip("qkvgb", rows)]
            before = leaf("state", self.pool[self.slots].reshape(n, h, s, s))
            return (C.ggml_gated_delta_net(b.ctx, *operands, before, 1),)

        flat = compute(device, build)[0].reshape(-1)
        states = flat[self.v.size :].reshape(n, -1)
        return flat[: self.v.size].reshape(self.v.shape), after(self.pool, self.slots, states)

    def pick(self, seq: int, rows: Sequence[int]) -> DeltaCase:
        """Return some rows of one sequence."""
        picked = [a[seq : seq + 1, rows] for a in (self.q, self.k, self.v, self.gate, self.beta)]
        return DeltaCase(*picked, self.pool, self.slots[seq : seq + 1])

    def alone(self, device: Device, seq: int, rows: Sequence[int]) -> Array:
        """Run some rows of a sequence as a chain: [len(rows), H, S]."""
        return self.pick(seq, rows).run(device)[0][0]


@dataclass
class ConvCase:
    """Rows [B, T, channels], kernel [channels, d_conv], pool [n_slots, channels * (d_conv - 1)] and
    slots [B], numpy order."""

    rows: Array
    kernel: Array
    pool: Array
    slots: Ints

    @classmethod
    def random(
        cls, rng: np.random.Generator, slots: Sequence[int], n_tokens: int, channels: int,
        d_conv: int, n_slots: int = 5,
    ) -> ConvCase:  # fmt: skip
        """Draw operands."""

        def normal(*ne: int) -> Array:
            return rng.standard_normal(ne).astype(np.float32)

        return cls(
            normal(len(slots), n_tokens, channels),
            normal(channels, d_conv),
            normal(n_slots, channels * (d_conv - 1)),
            np.array(slots, np.int32),
        )

    def run(
        self, device: Device, parents: Ints | None = None, silu: bool = False,
        lengths: Ints | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return the convolution [B, T, channels] and the pool after it.

        silu: activated, which is one kernel on CUDA. The rows are part of wider ones.
        """
        n, t, channels = self.rows.shape
        wide = np.concatenate([self.rows, np.full_like(self.rows[..., :3], np.nan)], -1)

        def build(b: Builder, leaf: Leaf) -> Sequence[Any]:
            x = leaf("rows", wide)
            x = b.view(x, (channels, t, n), (x.nb[1], x.nb[2]), 0)
            pool, slots = leaf("pool", self.pool), leaf("slots", self.slots)
            tree = None if parents is None else leaf("parents", parents)
            n_rows = None if lengths is None else leaf("lengths", lengths)
            out = b.conv(x, leaf("kernel", self.kernel), pool, slots, tree, n_rows)
            return b.silu(out) if silu else out, pool

        out, pool = compute(device, build)
        return out.reshape(self.rows.shape), pool.reshape(self.pool.shape)

    def upstream(self, device: Device, silu: bool = False) -> tuple[Array, Array]:
        """Return what ggml_ssm_conv gives for the states in the slots: result and pool."""
        (n, _, channels), past = self.rows.shape, self.kernel.shape[1] - 1
        before = self.pool[self.slots].reshape(n, channels, past)
        columns = np.concatenate([before, self.rows.transpose(0, 2, 1)], -1)

        def build(b: Builder, leaf: Leaf) -> Sequence[Any]:
            out = C.ggml_ssm_conv(b.ctx, leaf("x", columns), leaf("kernel", self.kernel))
            return (b.silu(out) if silu else out,)

        out = compute(device, build)[0].reshape(self.rows.shape)
        return out, after(self.pool, self.slots, columns[..., -past:])

    def pick(self, seq: int, rows: Sequence[int]) -> ConvCase:
        """Return some rows of one sequence."""
        slots = self.slots[seq : seq + 1]
        return replace(self, rows=self.rows[seq : seq + 1, rows], slots=slots)

    def alone(self, device: Device, seq: int, rows: Sequence[int], silu: bool = False) -> Array:
        """Run some rows of a sequence as a chain: [len(rows), channels]."""
        return self.pick(seq, rows).run(device, silu=silu)[0][0]
