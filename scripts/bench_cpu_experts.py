#!/usr/bin/env python3
"""Compare moegraph's CPU kernel for experts with the ggml graph of the same FFN, in turn.

Needs no model and no GPU. Uses random experts in the shape of a 35B-A3B (or another shape), more
than any CPU cache holds, and uses each once before it uses any again. Prints the median
microseconds of both, their ratio and the kernel's memory bandwidth. 'hot' rows repeat the same
experts.

Example:
    scripts/bench_cpu_experts.py --threads 4 8 16
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from _bench import Parser, guarded, positive
from modelgen.blocks import TYPES

from moegraph.ggml.cpu_ffn import CpuFfn
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder, Tensor
from moegraph.graphs.cache import BuiltGraph, GraphCache
from moegraph.graphs.experts import build_expert_rows, build_expert_sum
from moegraph.resident.bank import Bank
from moegraph.threads import default_threads

Run = Callable[[int], None]
BLOCK, N_WARM = 12, 3
# Seconds after which idle threads of both have stopped spinning.
UNTIL_ASLEEP = 0.05


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = Parser(__doc__)
    p.add_argument("--threads", type=positive, nargs="+", default=[default_threads()])
    p.add_argument("--experts", type=positive, nargs="+", default=[1, 2, 4, 8], help="at a time")
    p.add_argument(
        "--rows",
        type=int,
        default=1,
        choices=range(1, 8),
        metavar="1..7",
        help="rows, which all use the same experts; ggml rounds differently from 8 rows on",
    )
    p.add_argument("--gib", type=float, default=2.0, help="memory for experts")
    p.add_argument("--repeat", type=positive, default=60, help="samples of each")
    p.add_argument("--pause-us", type=int, default=300, help="between samples, as in a decode")
    p.add_argument("--n-embd", type=positive, default=2048)
    p.add_argument("--n-ff", type=positive, default=512)
    p.add_argument("--gate-up-type", choices=sorted(TYPES), default="Q4_K")
    p.add_argument("--down-type", choices=sorted(TYPES), default="Q5_K")
    p.add_argument("--hot", action="store_true", help="rows with hot experts too")
    return p


class Stack:
    """Layers of 256 experts in host memory, filled with copies of a few random experts."""

    N_EXPERT = 256

    def __init__(self, args: argparse.Namespace, buft: Any, stack: ExitStack) -> None:
        rng = np.random.default_rng(0)
        shapes = {
            "gate": (args.gate_up_type, args.n_embd, args.n_ff),
            "up": (args.gate_up_type, args.n_embd, args.n_ff),
            "down": (args.down_type, args.n_ff, args.n_embd),
        }
        self.expert_bytes = sum(TYPES[kind].row_bytes(n) * m for kind, n, m in shapes.values())
        n_layer = max(1, round(args.gib * 2**30 / (self.expert_bytes * self.N_EXPERT)))
        context = stack.enter_context(Context(3 * n_layer))
        self.banks = []
        for _ in range(n_layer):
            parts = {}
            for part, (kind, n_in, n_out) in shapes.items():
                parts[part] = C.ggml_new_tensor_3d(
                    context.ptr, TYPES[kind].ggml_id, n_in, n_out, self.N_EXPERT
                )
            self.banks.append(Bank(self.N_EXPERT, parts))
        stack.enter_context(Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, buft)))
        for part, (kind, n_in, n_out) in shapes.items():
            block = TYPES[kind]
            data = block.fill(rng, n_in * n_out // block.n_elem, 0.02).tobytes()
            for bank in self.banks:
                tensor = bank.parts[part]
                for expert in range(self.N_EXPERT):
                    C.ggml_backend_tensor_set(tensor, data, expert * len(data), len(data))


class Inputs:
    """x, weights, ids and y in one block that kernel and graph share."""

    def __init__(self, args: argparse.Namespace, buft: Any, stack: ExitStack) -> None:
        context = stack.enter_context(Context(4))
        n, n_rows, n_used = args.n_embd, args.rows, max(args.experts)
        self.x = C.ggml_new_tensor_2d(context.ptr, F32, n, n_rows)
        self.weights = C.ggml_new_tensor_3d(context.ptr, F32, 1, n_used, n_rows)
        self.ids = C.ggml_new_tensor_2d(context.ptr, I32, n_used, n_rows)
        self.y = C.ggml_new_tensor_2d(context.ptr, F32, n, n_rows)
        stack.enter_context(Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, buft)))
        rng = np.random.default_rng(1)
        view(self.x)[:] = rng.standard_normal(n * n_rows)
        view(self.weights)[:] = rng.uniform(0.05, 0.2, n_used * n_rows)

    def choose(self, ids: npt.NDArray[np.int32]) -> None:
        """Set the expert ids of every row."""
        view(self.ids, np.int32).reshape(-1, ids.size)[:] = ids


def view(t: Tensor, dtype: type = np.float32) -> npt.NDArray[Any]:
    """Return a host tensor's elements as an array."""
    return np.frombuffer(ffi.buffer(t.data, C.ggml_nbytes(t)), dtype)


def graph_of(graphs: GraphCache, bank: Bank, io: Inputs, il: int) -> BuiltGraph:
    """Build ggml's graph over a layer."""

    def build(b: Builder) -> None:
        rows = build_expert_rows(b, bank, io.x, io.ids, io.weights, il)
        b.expand(C.ggml_cpy(b.ctx, build_expert_sum(b, rows, il), io.y))

    return graphs.get(il, 128, build)


def measure(ways: dict[str, Run], io: Inputs, order: npt.NDArray[np.integer], n: int,
            args: argparse.Namespace, n_layer: int) -> dict[str, float]:  # fmt: skip
    """Return the median seconds of each way; every sample uses the next experts of `order`.

    The ways take turns of several samples, because the threads of one still spin when the other
    begins.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    ids = np.full(view(io.ids, np.int32).size // args.rows, -1, np.int32)
    at = 0
    for _ in range(0, args.repeat, BLOCK):
        for name, run in ways.items():
            time.sleep(UNTIL_ASLEEP)
            for i in range(-N_WARM, BLOCK):
                ids[:n] = np.take(order, range(at, at + n), mode="wrap") % Stack.N_EXPERT
                io.choose(ids)
                at += n
                time.sleep(args.pause_us * 1e-6)
                start = time.perf_counter()
                run((at // Stack.N_EXPERT) % n_layer)
                if i >= 0:
                    samples[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in samples.items()}


def bench(args: argparse.Namespace, stack: ExitStack, experts: Stack, n_threads: int) -> None:
    """Print the rows of one number of threads."""
    n_used = max(args.experts)
    cpu = Device("cpu", n_threads)
    stack.callback(cpu.close)
    io = Inputs(args, cpu.buft, stack)
    graphs = GraphCache(cpu)
    stack.callback(graphs.close)
    ffn = CpuFfn(n_threads, args.n_embd, args.n_ff, n_used, args.rows)
    stack.callback(ffn.close)
    layers = [ffn.layer(bank.parts) for bank in experts.banks]
    built = [graph_of(graphs, bank, io, il).graph for il, bank in enumerate(experts.banks)]

    def ggml(il: int) -> None:
        cpu.check(C.mg_launch(cpu.compute.ptr, built[il], ffi.NULL, 0), "the graph")

    def own(il: int) -> None:
        ffn.compute(layers[il], io.x.data, io.ids.data, io.weights.data, args.rows, io.y.data)

    ways: dict[str, Run] = {"ggml": ggml, "own": own}
    results = []
    io.choose(np.arange(n_used, dtype=np.int32))
    for run in ways.values():
        run(0)
        results.append(view(io.y).copy())
    if not np.array_equal(results[0], results[1]):
        raise SystemExit("bench_cpu_experts: the kernel and the graph differ")
    rng = np.random.default_rng(n_threads)
    for kind in ("cold", "hot") if args.hot else ("cold",):
        for n in args.experts:
            order = rng.permutation(Stack.N_EXPERT) if kind == "cold" else np.arange(n)
            n_layer = len(experts.banks) if kind == "cold" else 1
            t = measure(ways, io, order, n, args, n_layer)
            bandwidth = n * experts.expert_bytes / t["own"] / 1e9
            print(
                f"{n_threads:7d} {kind:>5} {n:7d} {args.rows:4d} {t['ggml'] * 1e6:9.1f} "
                f"{t['own'] * 1e6:9.1f} {t['ggml'] / t['own']:6.2f} {bandwidth:7.1f}"
            )


def main() -> None:
    """Run the benchmark."""
    args = parser().parse_args()
    with ExitStack() as stack:
        cpu = Device("cpu")
        stack.callback(cpu.close)
        experts = Stack(args, cpu.buft, stack)
        print(
            f"{len(experts.banks)} layers of {Stack.N_EXPERT} experts of "
            f"{experts.expert_bytes / 1e6:.2f} MB, medians of {args.repeat}"
        )
        print("threads        experts rows   ggml us    own us  ratio    GB/s")
        for n_threads in args.threads:
            with ExitStack() as inner:
                bench(args, inner, experts, n_threads)


if __name__ == "__main__":
    sys.exit(guarded("bench_cpu_experts.py", main))
