"""Attention over pages, on any device, beside a model of it in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import ATTN_PATH, ATTN_WORDS, F16, F32, I32, Builder, Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

Array = npt.NDArray[Any]
KINDS = ("F16", "Q8_0", "Q4_0")


class Row(NamedTuple):
    """One row: its sequence, the committed positions, and its path: where rows are stored."""

    seq: int
    n_past: int
    path: tuple[int, ...]

    @property
    def n_keys(self) -> int:
        """Positions that the row attends to: its own and all before."""
        return self.n_past + len(self.path)

    def words(self) -> list[int]:
        """Return the row as the op reads it; the rest of the path is out of range."""
        path = [*self.path, *[2**30] * (ATTN_PATH - len(self.path))]
        return [self.seq, self.n_past, self.n_keys, -1, *path]


PADDING = Row(0, 0, ())


@dataclass(frozen=True)
class Case:
    """Queries, a pool, pages and rows. k, v: numpy [n_pool_rows, bytes]; q [row, head, d].

    window: positions that a row attends to, 0: all. sinks: numpy F32 [n_head], or None.
    """

    kinds: tuple[str, str]
    d: int
    n_head: int
    n_head_kv: int
    page_size: int
    pages: Array
    rows: tuple[Row, ...]
    q: Array
    k: Array
    v: Array
    window: int = 0
    sinks: Array | None = None

    @property
    def scale(self) -> float:
        """The usual scale of the products."""
        return float(self.d**-0.5)

    def pool_rows(self, row: Row) -> Array:
        """Return where the row's keys are in the pool, in order of position."""
        index = np.array([*range(row.n_past), *(row.n_past + i for i in row.path)], np.int64)
        pages = self.pages[row.seq][index // self.page_size].astype(np.int64)
        return pages * self.page_size + index % self.page_size

    def gather(self, row: Row, part: int) -> Array:
        """Return a row's keys (part 0) or values (1) as float64 [position, head, element]."""
        data = (self.k, self.v)[part][self.pool_rows(row)[-self.window :]]
        values = dequantize(self.kinds[part], data)
        return values.reshape(len(data), self.n_head_kv, self.d)

    def expected(self) -> Array:
        """Return the result in float64: [row, head, element]."""
        out = np.zeros(self.q.shape, np.float64)
        n_group = self.n_head // self.n_head_kv
        for i, row in enumerate(self.rows):
            if row.n_keys == 0:
                continue
            keys, values = self.gather(row, 0), self.gather(row, 1)
            q = self.q[i].astype(np.float64).reshape(self.n_head_kv, n_group, self.d)
            scores = np.einsum("hgd,phd->hgp", q, keys) * self.scale
            most = scores.max(axis=2, keepdims=True)
            weights = np.exp(scores - most)
            total = weights.sum(axis=2, keepdims=True)
            if self.sinks is not None:
                total += np.exp(self.sinks.astype(np.float64).reshape(most.shape) - most)
            weights /= total
            out[i] = np.einsum("hgp,phd->hgd", weights, values).reshape(self.n_head, self.d)
        return out

    def words(self) -> Array:
        """Return the rows as the op reads them: I32 [row, word]."""
        return np.array([row.words() for row in self.rows], np.int32)

    def take(self, chosen: Sequence[int]) -> Case:
        """Return the case with some of its rows, in another order maybe."""
        rows = tuple(self.rows[i] for i in chosen)
        return replace(self, rows=rows, q=self.q[list(chosen)])


def dequantize(kind: str, data: Array) -> Array:
    """Return bytes [n, row bytes] as float64 [n, elements]."""
    if kind == "F16":
        return data.view(np.float16).astype(np.float64)
    size = 34 if kind == "Q8_0" else 18
    blocks = data.reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    quants = blocks[:, 2:]
    if kind == "Q8_0":
        values = quants.view(np.int8).astype(np.float64)
    else:
        values = np.concatenate([quants & 15, quants >> 4], axis=1).astype(np.float64) - 8
    return (values * scale).reshape(len(data), -1)


class Heads(NamedTuple):
    """Elements of a head, heads of queries, heads of keys and values."""

    d: int = 256
    n_head: int = 16
    n_head_kv: int = 2


MODEL = Heads()  # the 35B-A3B's


def make_case(
    rng: np.random.Generator, rows: Sequence[Row], heads: Heads = MODEL,
    kinds: tuple[str, str] = ("F16", "F16"), page_size: int = 64, spare_pages: int = 2,
    loud: float = 1.0,
) -> Case:  # fmt: skip
    """Draw a pool with pages in any order, and queries. loud: how much scores differ."""
    n_seqs = 1 + max(row.seq for row in rows)
    stored = [0] * n_seqs
    for row in rows:
        last = max((row.n_past + 1 + i for i in row.path), default=row.n_past)
        stored[row.seq] = max(stored[row.seq], last)
    needed = [-(-n // page_size) for n in stored]
    n_pages = max(needed) + spare_pages
    n_pool = sum(needed) + spare_pages
    order = rng.permutation(n_pool)
    pages = rng.choice(np.array([-1, 2**31 - 1, n_pool + 5], np.int64), (n_seqs, n_pages))
    for seq, n in enumerate(needed):
        pages[seq, :n], order = order[:n], order[n:]
    k, v = (draw(rng, kind, n_pool * page_size, heads.d * heads.n_head_kv) for kind in kinds)
    q = rng.standard_normal((len(rows), heads.n_head, heads.d)).astype(np.float32) * loud
    return Case(
        kinds, *heads, page_size, pages.astype(np.int32), tuple(rows), q.astype(np.float32), k, v
    )


def draw(rng: np.random.Generator, kind: str, n: int, n_elements: int) -> Array:
    """Draw n rows of about normally distributed elements: U8 [n, bytes]."""
    if kind == "F16":
        values = rng.standard_normal((n, n_elements), np.float32).astype(np.float16)
        return values.view(np.uint8)
    n_quants = 32 if kind == "Q8_0" else 16
    n_blocks = n * n_elements // 32
    scale = (1 + rng.random((n_blocks, 1), np.float32)) / (110.0 if kind == "Q8_0" else 7.0)
    quants = rng.integers(0, 256, (n_blocks, n_quants), np.uint8)
    blocks = np.concatenate([scale.astype(np.float16).view(np.uint8), quants], axis=1)
    return blocks.reshape(n, -1)


def in_window(
    rng: np.random.Generator, case: Case, window: int, n_ring: int = 0, loud: float = 2.0
) -> Case:
    """Return a case with sinks and a window; n_ring: pages of a ring, which repeat."""
    at = np.arange(case.pages.shape[1])
    pages = case.pages[:, at % n_ring] if n_ring else case.pages
    sinks = loud * rng.standard_normal(case.n_head).astype(np.float32)
    return replace(case, window=window, pages=pages, sinks=sinks.astype(np.float32))


def chain(seq: int, n_past: int, n: int) -> list[Row]:
    """Return n rows that follow one another."""
    return [Row(seq, n_past, tuple(range(i + 1))) for i in range(n)]


def tree(rng: np.random.Generator, seq: int, n_past: int, n: int) -> list[Row]:
    """Return n rows, each of which continues any earlier one or what is committed."""
    paths: list[tuple[int, ...]] = []
    for i in range(n):
        parent = int(rng.integers(-1, i))
        paths.append((*(paths[parent] if parent >= 0 else ()), i))
    return [Row(seq, n_past, path) for path in paths]


def mixture(rng: np.random.Generator, n_rows: int, n_seqs: int, longest: int) -> list[Row]:
    """Return rows of some of n_seqs sequences: single rows, chains, trees and padding."""
    rows: list[Row] = []
    for seq in rng.permutation(n_seqs):
        n_past = int(rng.integers(0, longest))
        n = int(rng.integers(1, 6))
        what = rng.integers(0, 4)
        if what == 0:
            rows += chain(int(seq), n_past, n)
        elif what == 1:
            rows += tree(rng, int(seq), n_past, n)
        else:
            rows += chain(int(seq), n_past, 1)
    rows = rows[:n_rows]
    rows += [PADDING] * (n_rows - len(rows))
    return [rows[i] for i in rng.permutation(n_rows)]


class Graph:
    """The op over operands of a case's extents, in memory of its own; runs other data too.

    strided: queries lie in twice their memory, as those that share a product with a gate do.
    """

    def __init__(self, device: Device, case: Case, strided: bool = False) -> None:
        self._device = device
        self._stack = ExitStack()
        b = Builder(self._stack.enter_context(Context(64, 64)), 64)
        self._b, self._leaves = b, {}
        n_rows, d, n_head = len(case.rows), case.d, case.n_head
        width = d * (2 if strided else 1)
        whole = self._leaf("q", F32, width, n_head, n_rows)
        q = b.view(whole, (d, n_head, n_rows), (4 * width, 4 * width * n_head))
        pools = [
            self._leaf(name, TYPES[kind].ggml_id, d * case.n_head_kv, len(case.k))
            for name, kind in zip("kv", case.kinds)
        ]
        pages = self._leaf("pages", I32, case.pages.shape[1], case.pages.shape[0])
        rows = self._leaf("rows", I32, ATTN_WORDS, n_rows)
        sinks = None if case.sinks is None else self._leaf("sinks", F32, n_head)
        out = b.paged_attn(q, *pools, pages, rows, case.page_size, case.scale, sinks, case.window)
        self.out = b.expand(out)
        memory = C.ggml_backend_alloc_ctx_tensors_from_buft(b.context.ptr, device.buft)
        self._stack.enter_context(Buffer(memory))
        self._stack.callback(C.mg_graph_forget, device.compute.ptr, b.graph)
        self.set("k", case.k)
        self.set("v", case.v)
        if case.sinks is not None:
            self.set("sinks", case.sinks)

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _leaf(self, name: str, dtype: int, *ne: int) -> Tensor:
        self._leaves[name] = self._b.leaf(dtype, ne, name)
        return self._leaves[name]

    def set(self, name: str, data: Array) -> None:
        """Write an operand: q, k, v, pages or rows."""
        tensor, data = self._leaves[name], np.ascontiguousarray(data)
        assert data.nbytes == C.ggml_nbytes(tensor)
        C.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, data.nbytes)

    def run(self, case: Case) -> Array:
        """Compute with a case's queries, pages and rows: F32 [row, head, element]."""
        q = np.full((len(case.rows), case.n_head, self._leaves["q"].ne[0]), np.nan, np.float32)
        q[:, :, : case.d] = case.q
        self.set("q", q)
        self.set("pages", case.pages)
        self.set("rows", case.words())
        size = C.ggml_nbytes(self.out)
        C.ggml_backend_tensor_memset(self.out, 0xFF, 0, size)
        device = self._device
        device.check(C.mg_launch(device.compute.ptr, self._b.graph, ffi.NULL, 0), "attention")
        device.synchronize()
        out = np.empty(case.q.shape, np.float32)
        C.ggml_backend_tensor_get(self.out, ffi.from_buffer(out), 0, size)
        return out


def run(device: Device, case: Case, strided: bool = False) -> Array:
    """Compute a case once."""
    with Graph(device, case, strided) as graph:
        return graph.run(case)


def flash_attn(device: Device, case: Case, i: int) -> Array:
    """Compute row i of a case with ggml's op, over keys and values that were gathered."""
    row = case.rows[i]
    n_keys, n = row.n_keys, -(-row.n_keys // 256) * 256
    with ExitStack() as stack:
        b = Builder(stack.enter_context(Context(64, 64)), 64)
        q = b.leaf(F32, (case.d, 1, case.n_head, 1), "q")
        mask = b.leaf(F16, (n, 1, 1, 1), "mask")
        first, at = n_keys - min(case.window or n_keys, n_keys), np.arange(n)
        data = [(q, case.q[i]), (mask, np.where((first <= at) & (at < n_keys), 0, -np.inf))]
        sinks = None
        if case.sinks is not None:
            sinks = b.leaf(F32, (case.n_head,), "sinks")
            data.append((sinks, case.sinks))
        parts = []
        for kind, pool in zip(case.kinds, (case.k, case.v)):
            dtype = TYPES[kind].ggml_id
            head = C.ggml_row_size(dtype, case.d)
            whole = b.leaf(dtype, (case.d * case.n_head_kv, n), "kv")
            strides = (head * case.n_head_kv, head)
            parts.append(b.view(whole, (case.d, n, case.n_head_kv), strides))
            gathered = np.zeros((n, pool.shape[1]), np.uint8)
            gathered[:n_keys] = pool[case.pool_rows(row)]
            data.append((whole, gathered))
        out = b.expand(b.flash_attn(q, *parts, mask, case.scale, sinks=sinks))
        memory = C.ggml_backend_alloc_ctx_tensors_from_buft(b.context.ptr, device.buft)
        stack.enter_context(Buffer(memory))
        for tensor, array in data:
            numbers = array.astype(np.float16) if tensor is mask else array
            numbers = np.ascontiguousarray(numbers)
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(numbers), 0, numbers.nbytes)
        device.check(C.mg_launch(device.compute.ptr, b.graph, ffi.NULL, 0), "flash_attn")
        device.synchronize()
        result = np.empty((case.n_head, case.d), np.float32)
        C.ggml_backend_tensor_get(out, ffi.from_buffer(result), 0, result.nbytes)
    return result


def error(got: Array, expected: Array) -> float:
    """Return the squared error relative to the expected values; 0 if those are none."""
    total = float((expected**2).sum())
    return float(((got - expected) ** 2).sum()) / total if total else float(np.abs(got).sum())


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two F32 arrays are equal to the bit, NaN included."""
    return a.tobytes() == b.tobytes()


def moved(case: Case, rng: np.random.Generator) -> Case:
    """Return one row's keys and values as a committed context, in other pages."""
    row = case.rows[0]
    at = case.pool_rows(row)
    heads = Heads(case.d, case.n_head, case.n_head_kv)
    alone = make_case(rng, chain(0, row.n_keys - 1, 1), heads, case.kinds, 16)
    there = alone.pool_rows(alone.rows[0])
    alone.k[there], alone.v[there] = case.k[at], case.v[at]
    return replace(alone, q=case.q, window=case.window, sinks=case.sinks)


def check_bits(device: Device, case: Case, rng: np.random.Generator, n_rows: int) -> None:
    """Assert that some rows have the bits of rows alone, in other pages, and in other company."""
    together, n = run(device, case), len(case.rows)
    for i in map(int, rng.permutation(n)[:n_rows]):
        if not case.rows[i].n_keys:
            assert not together[i].any()
            continue
        assert same_bits(run(device, moved(case.take([i]), rng))[0], together[i]), case.rows[i]
        others = [int(j) for j in rng.permutation(n)[: rng.integers(1, 9)]]
        assert same_bits(run(device, case.take([*others, i]))[-1], together[i]), case.rows[i]
