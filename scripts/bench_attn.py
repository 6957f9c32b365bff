#!/usr/bin/env python3
"""Time our attention over pages beside ggml's flash_attn_ext, shape by shape.

A graph is a chain of the same operation over several pools of keys and values, which together are
larger than the device's cache. ggml's operation reads them as contiguous sequences under a mask,
ours through pages in random order. Prints the microseconds of one operation, as the median of
--repeat runs of each graph in turn, their range, and the bytes of keys and values per second. With
more than one sequence, rows are divided evenly among them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _bench as bench

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import ATTN_PATH, ATTN_WORDS, F16, F32, I32, Builder, Tensor, type_id
from moegraph.graphs.cache import BuiltGraph, GraphCache
from moegraph.units import round_up

PAGE = 256


class Shape(NamedTuple):
    """Rows of n_seqs sequences with `depth` positions each, and what the heads are."""

    kinds: tuple[str, str]
    n_seqs: int
    depth: int
    n_rows: int
    d: int
    n_head: int
    n_head_kv: int

    @property
    def n_stored(self) -> int:
        """Positions that a sequence has room for: what a mask of ggml's op covers."""
        return round_up(self.depth + self.n_rows // self.n_seqs, PAGE)

    def part_bytes(self, kind: str) -> int:
        """Bytes of the keys, or of the values, of one pool."""
        row = int(C.ggml_row_size(type_id(kind), self.d * self.n_head_kv))
        return row * self.n_stored * self.n_seqs

    @property
    def n_bytes(self) -> int:
        """Bytes of one pool."""
        return sum(self.part_bytes(kind) for kind in self.kinds)


class Bench:
    """Pools of one shape, and the graph of each operation over all of them."""

    def __init__(self, device: Device, shape: Shape, cache_bytes: int) -> None:
        self._device, self._shape = device, shape
        self._stack = ExitStack()
        n_pools = min(200, max(1, math.ceil(2 * cache_bytes / shape.n_bytes)))
        self._n_links = max(10, n_pools)
        rng = np.random.default_rng(1)
        self._pools = [tuple(self._pool(rng, kind) for kind in shape.kinds) for _ in range(n_pools)]
        n_seq_rows = shape.n_rows // shape.n_seqs
        n_pages = shape.n_stored // PAGE
        pages = rng.permutation(n_pages * shape.n_seqs).astype(np.int32)
        rows = np.zeros((shape.n_rows, ATTN_WORDS), np.int32)
        rows[:, 0] = np.arange(shape.n_rows) // n_seq_rows
        rows[:, 1] = shape.depth
        rows[:, 2] = shape.depth + 1 + np.arange(shape.n_rows) % n_seq_rows
        rows[:, 4:] = np.arange(ATTN_PATH)
        seen = np.arange(shape.n_stored) < rows[:n_seq_rows, 2:3]
        mask = np.where(seen, 0, -np.inf).astype(np.float16)
        q = rng.standard_normal((shape.n_rows, shape.n_head, shape.d)).astype(np.float32)
        self._data = {
            "q": self._memory(q),
            "pages": self._memory(pages),
            "rows": self._memory(rows),
            "mask": self._memory(np.broadcast_to(mask, (shape.n_seqs, *mask.shape))),
        }
        self._graphs = GraphCache(device)
        self._stack.callback(self._graphs.close)
        self.ours = self._build("ours", self._our_links)
        self.ggmls = self._build("ggml's", self._ggml_links)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _memory(self, data: npt.NDArray[Any]) -> Buffer:
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        buffer = self._pool_memory(data.nbytes)
        self._write(buffer, data)
        return buffer

    def _pool_memory(self, n_bytes: int) -> Buffer:
        """Allocate memory, and what CUDA wants behind a quantized tensor."""
        buffer = self._device.buffer(n_bytes + 1024, "the operands", "a smaller --depth")
        return self._stack.enter_context(buffer)

    def _write(self, buffer: Buffer, data: npt.NDArray[np.uint8], offset: int = 0) -> None:
        with Context(2, 2) as context:
            tensor = Builder(context, 2).leaf(F16, (data.nbytes // 2,), "bytes")
            place(buffer, tensor, offset)
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, data.nbytes)

    def _pool(self, rng: np.random.Generator, kind: str) -> Buffer:
        """Fill memory with blocks of small numbers, 1 MiB of them again and again."""
        n_bytes = self._shape.part_bytes(kind)
        buffer = self._pool_memory(n_bytes)
        data = blocks(rng, kind)
        for offset in range(0, n_bytes, data.nbytes):
            self._write(buffer, data[: n_bytes - offset], offset)
        return buffer

    def _leaf(self, b: Builder, name: str, dtype: int, *ne: int) -> Tensor:
        tensor = b.leaf(dtype, ne, name)
        place(self._data[name], tensor, 0)
        return tensor

    def _kv(self, b: Builder, link: int, *ne: int) -> list[Tensor]:
        tensors = []
        for kind, buffer in zip(self._shape.kinds, self._pools[link % len(self._pools)]):
            tensors.append(b.leaf(type_id(kind), ne, "kv"))
            place(buffer, tensors[-1], 0)
        return tensors

    def _build(self, name: str, links: Callable[[Builder], None]) -> BuiltGraph:
        return self._graphs.get(name, 16 * self._n_links + 16, links)

    def _our_links(self, b: Builder) -> None:
        s = self._shape
        q = self._leaf(b, "q", F32, s.d, s.n_head, s.n_rows)
        pages = self._leaf(b, "pages", I32, s.n_stored // PAGE, s.n_seqs)
        rows = self._leaf(b, "rows", I32, ATTN_WORDS, s.n_rows)
        for link in range(self._n_links):
            k, v = self._kv(b, link, s.d * s.n_head_kv, s.n_stored * s.n_seqs)
            b.expand(b.paged_attn(q, k, v, pages, rows, PAGE, s.d**-0.5))

    def _ggml_links(self, b: Builder) -> None:
        s, n = self._shape, self._shape.n_rows // self._shape.n_seqs
        q = self._leaf(b, "q", F32, s.d, s.n_head, n, s.n_seqs)
        mask = self._leaf(b, "mask", F16, s.n_stored, n, 1, s.n_seqs)
        for link in range(self._n_links):
            k, v = (
                b.permute(t, 0, 2, 1, 3)
                for t in self._kv(b, link, s.d, s.n_head_kv, s.n_stored, s.n_seqs)
            )
            b.expand(b.flash_attn(b.permute(q, 0, 2, 1, 3), k, v, mask, s.d**-0.5))

    def time(self, graph: BuiltGraph) -> float:
        """Return the microseconds of one operation in one run of a graph."""
        device = self._device
        device.synchronize()
        begin = time.perf_counter()
        device.check(C.mg_launch(device.compute.ptr, graph.graph, ffi.NULL, 0), "attention")
        device.synchronize()
        return (time.perf_counter() - begin) / self._n_links * 1e6


def blocks(rng: np.random.Generator, kind: str) -> npt.NDArray[np.uint8]:
    """Return about 1 MiB of a type's blocks, of a size that every row divides or continues."""
    if kind == "f16":
        return rng.standard_normal(2**19).astype(np.float16).view(np.uint8)
    quants = rng.integers(0, 256, (2**15, 34 if kind == "q8_0" else 18), np.uint8)
    quants[:, :2] = np.array([0.01 if kind == "q8_0" else 0.15], np.float16).view(np.uint8)
    return quants.reshape(-1)


def measure(device: Device, shape: Shape, args: argparse.Namespace) -> str:
    """Time both operations in turn; return a line of the table."""
    with Bench(device, shape, args.cache << 20) as one:
        for graph in (one.ggmls, one.ours):
            for _ in range(3):  # the third run captures
                one.time(graph)
        pairs = [(one.time(one.ggmls), one.time(one.ours)) for _ in range(args.repeat)]
    theirs, ours = (statistics.median(column) for column in zip(*pairs))
    ratios = [a / b for a, b in pairs]
    rate = shape.n_bytes / ours / 1e3
    return (
        f"{'/'.join(shape.kinds):11} {shape.n_seqs:4} {shape.depth:7} {shape.n_rows:4} "
        f"{theirs:9.1f} {ours:9.1f} {theirs / ours:6.2f} "
        f"({min(ratios):.2f} .. {max(ratios):.2f}) {rate:7.0f}"
    )


def parse() -> argparse.Namespace:
    parser = bench.Parser(__doc__)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--repeat", type=bench.positive, default=9, metavar="N", help="default: 9")
    parser.add_argument(
        "--cache", type=bench.positive, default=128, metavar="MIB", help="cache; default: 128"
    )
    parser.add_argument(
        "--types", nargs="+", default=["f16", "q8_0", "q4_0"], metavar="TYPE",
        help="of keys and values: f16, q8_0, q4_0, or two as in q8_0/q4_0",
    )  # fmt: skip
    parser.add_argument("--seqs", type=bench.positive, nargs="+", default=[1, 16])
    parser.add_argument(
        "--depth", type=bench.positive, nargs="+", default=[512, 4096, 32768, 131072]
    )
    parser.add_argument("--rows", type=bench.positive, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--heads", type=bench.positive, nargs=3, default=[256, 16, 2], metavar=("D", "Q", "KV"),
        help="elements of a head, heads of queries, heads of keys; default: 256 16 2",
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    args = parse()
    device = Device(args.device)
    print(f"{device.description}, median of {args.repeat} runs, us")
    print("types       seqs   depth rows    ggml's      ours  times (min .. max)     GB/s")
    for types in args.types:
        kinds = (types.partition("/")[0], types.rpartition("/")[2])
        for n_seqs in args.seqs:
            for depth in args.depth:
                for n_rows in args.rows:
                    if n_rows % n_seqs == 0:
                        shape = Shape(kinds, n_seqs, depth, n_rows, *args.heads)
                        print(measure(device, shape, args), flush=True)
    device.close()
    return 0


if __name__ == "__main__":
    sys.exit(bench.guarded("bench_attn.py", main))
