#!/usr/bin/env python3
"""Say what the host does while the device could compute: between two tokens, and in a prompt.

  scripts/profile_host.py 35b.gguf --device cuda:0 --vram 14GiB
  scripts/profile_host.py tiny --prompt 512 --share 60

Between two tokens: us from the end of the wait for a pass to moments of the next one, medians.
Marks cost some us themselves; "without marks" has the last two moments alone.

With --prompt, launches and copies return at once, and routers seem to choose experts of a skewed
distribution. So the time of a prompt is the host's own, with warm caches. --share: percentage of
the experts that have slots; without it all are resident.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml import lib
from moegraph.gguf.resolve import resolve_target
from moegraph.loop.decoding import Decoding
from moegraph.runner.base import Runner
from moegraph.sampling import SamplingParams

# What is marked of a step, in order: class, method, whether its end counts, and the name.
MARKS: list[tuple[type, str, bool, str]] = [
    (Runner, "collect", True, "results taken"),
    (Decoding, "_draw", True, "drawn"),
    (Runner, "submit", False, "pass begun"),
    (Runner, "fill", True, "inputs sent"),
]
COPIES = ("mg_copy_bytes", "mg_copy_experts", "mg_upload_experts", "ggml_backend_tensor_set_async")
Moment = tuple[str, int]


class Native:
    """The native module with some functions in place of its own."""

    def __init__(self, **own: Callable[..., object]) -> None:
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        found = getattr(lib.C, name)
        self.__dict__[name] = found
        return found


@contextmanager
def instead(native: Native) -> Iterator[None]:
    """Have all modules call `native`."""
    modules = [one for name, one in sys.modules.items() if name.startswith("moegraph.")]
    using = [one for one in modules if one is not lib and getattr(one, "C", None) is lib.C]
    for one in using:
        vars(one)["C"] = native
    try:
        yield
    finally:
        for one in using:
            vars(one)["C"] = lib.C


def noting(moments: list[Moment]) -> Native:
    """Return a native module that notes the ends of waits, and launches."""

    def wait(*args: Any) -> None:
        lib.C.ggml_backend_synchronize(*args)
        moments.append(("wait", time.perf_counter_ns()))

    def launch(*args: Any) -> int:
        moments.append(("launch called", time.perf_counter_ns()))
        status: int = lib.C.mg_launch(*args)
        moments.append(("launched", time.perf_counter_ns()))
        return status

    return Native(ggml_backend_synchronize=wait, mg_launch=launch)


def mark(moments: list[Moment]) -> None:
    """Have the methods of MARKS note when they begin or end, for good."""

    def marked(work: Callable[..., Any], is_end: bool, name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if not is_end:
                moments.append((name, time.perf_counter_ns()))
            found = work(*args)
            if is_end:
                moments.append((name, time.perf_counter_ns()))
            return found

        return run

    for owner, method, is_end, name in MARKS:
        setattr(owner, method, marked(getattr(owner, method), is_end, name))


def steps(moments: list[Moment]) -> dict[str, float]:
    """Return the median us from the end of a wait to each moment before the next first launch."""
    found: dict[str, list[float]] = {}
    since = 0
    for name, at in moments:
        if name == "wait":
            since = at
        elif since:
            found.setdefault(name, []).append((at - since) / 1e3)
            since = 0 if name == "launched" else since
    medians = {name: statistics.median(us) for name, us in found.items()}
    return dict(sorted(medians.items(), key=lambda one: one[1]))


def tokens(engine: Engine, n: int, temperature: float, moments: list[Moment]) -> None:
    """Print what happens between two tokens of a text."""
    ids = engine.tokenizer.encode("def f(x):")
    sampling, times = SamplingParams(temperature=temperature, seed=1), list[float]()
    for _ in range(2):  # the first one builds and captures graphs
        moments.clear()
        text = engine.generate(ids, sampling, max_tokens=n, ignore_eos=True)
        times = [time.perf_counter() for _ in text]
    us = 1e6 * (times[-1] - times[n // 8]) / (len(times) - 1 - n // 8)
    parts = ", ".join(f"{name} {at:.1f}" for name, at in steps(moments).items())
    print(f"temperature {temperature:g}: {us:.1f} us a token; after the wait: {parts}", flush=True)


def trace(engine: Engine, n_rows: int) -> list[Any]:
    """Return a choice of n_rows rows for each layer, I32 numpy."""
    rng, hp = np.random.default_rng(1), engine.hparams
    odds = np.exp(-np.arange(hp.n_expert) * 8 / hp.n_expert)
    found = []
    for _ in range(hp.n_layer):
        p = rng.permutation(odds / odds.sum())
        rows = [rng.choice(hp.n_expert, hp.n_expert_used, False, p) for _ in range(n_rows)]
        found.append(np.concatenate(rows).astype(np.int32))
    return found


def prompts(engine: Engine, n_rows: int, repeat: int) -> None:
    """Print what the host takes for a prompt, of which nothing is computed."""
    ids = np.random.default_rng(0).integers(0, engine.hparams.n_vocab, n_rows).astype(np.int32)
    chosen, turn, n_calls, found = trace(engine, n_rows), 0, 0, list[float]()

    def launch(_backend: object, _graph: object, reads: Any, n_reads: int) -> int:
        nonlocal turn, n_calls
        n_calls += 1
        if n_reads == 1:  # ids; two are results
            one = chosen[turn % len(chosen)]
            lib.ffi.buffer(reads[0].dst, reads[0].size)[:] = one.tobytes()
            turn += 1
        return 0

    def copy(*_: object) -> None:
        nonlocal n_calls
        n_calls += 1

    for _ in range(2):  # builds graphs
        engine.reset()
        engine.prefill(ids, greedy=True)
    with instead(Native(mg_launch=launch, **dict.fromkeys(COPIES, copy))):
        for _ in range(repeat + 4):
            engine.reset()
            turn = n_calls = 0
            begin = time.perf_counter()
            engine.prefill(ids, greedy=True)
            found.append(1e3 * (time.perf_counter() - begin))
    found = found[4:]
    print(
        f"a prompt of {n_rows}: {statistics.median(found):.2f} ms of the host "
        f"({min(found):.2f} .. {max(found):.2f}), {n_calls} launches and copies"
    )


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(description=__doc__)
    p.add_argument("model")
    p.add_argument("--device", default="cpu")
    p.add_argument("--vram", default="auto", help="as of moegraph")
    p.add_argument("--tokens", type=bench.positive, default=400, metavar="N")
    p.add_argument("--prompt", type=bench.positive, metavar="N", help="a prompt of N instead")
    p.add_argument("--share", type=float, metavar="PERCENT", help="of the experts, with --prompt")
    p.add_argument("--repeat", type=bench.positive, default=10, metavar="N", help="prompts")
    return p


def profile(args: argparse.Namespace) -> None:
    """Profile tokens or prompts."""
    if args.share and not args.prompt:
        raise bench.BenchError("--share is for --prompt")
    config: dict[str, Any] = {"device": args.device, "vram": args.vram, "n_ctx": 4096}
    if args.share:
        with open_model(resolve_target(args.model)) as file:
            n_all = len(file.hparams.routed_layers) * file.hparams.n_expert
        slots = round(n_all * args.share / 100)
        config |= {"cache_slots": slots, "pin_layers": 0, "miss": "stream", "host_pin": "all"}
    with Engine.load(args.model, EngineConfig(**config)) as engine:
        if args.prompt:
            prompts(engine, args.prompt, args.repeat)
            return
        moments = list[Moment]()
        with instead(noting(moments)):
            for is_marked in (False, True):
                print("with marks" if is_marked else "without marks")
                if is_marked:
                    mark(moments)
                for temperature in (0.0, 0.8):
                    tokens(engine, args.tokens, temperature, moments)


if __name__ == "__main__":
    sys.exit(bench.main(parser(), profile))
