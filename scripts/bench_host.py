#!/usr/bin/env python3
"""Measure where the host's time of a decoded token goes: native functions by name, and Python.

Each way of decoding runs --samples times as it is; the median is the time of a token. Then as many
runs time every call of a native function, which costs about 0.3 us a call. The fastest of these is
the table: microseconds and calls a token of each native function; `Python` is what is left of a
token's time. On a GPU a launch only enqueues; the host waits for the device in the functions marked
`waits`, and `host` is the time of a token without these. `idle` is the time from the end of a wait
to the next launch, in which the device has nothing to do. On the CPU device a launch computes.

--profile also lists the Python functions that take longest. The profiler makes short functions look
slower than they are.

    scripts/bench_host.py tiny --device cpu
    scripts/bench_host.py 35b.gguf --vram 8 --way sampled --profile 25
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np

from moegraph import Engine, EngineConfig, SamplingParams
from moegraph.ggml.lib import C

# Yields once for each token.
Way = Callable[[Engine, int], Iterator[object]]
# Number of calls and seconds in them, by the name of the function.
Calls = Mapping[str, Sequence[float]]
# Tokens before those that count: graphs are built, and captured at the second and third token.
_WARM = 16
_PROMPT = [1] * 32
# Parts of the names of functions in which the host waits for a device.
_WAITS = ("synchronize", "mg_wait_ids")


class TimedLibrary:
    """The native library; it counts the calls of each function, and the seconds in them.

    calls: by name, [number, seconds]. idle_s: seconds from the end of waits to the next launch.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = {}
        self.idle_s = 0.0
        self._waited: float | None = None  # end of the last wait, until the next launch

    def __getattr__(self, name: str) -> Any:
        real = getattr(C, name)
        if not callable(real):
            return real
        count, clock = self.calls.setdefault(name, [0, 0.0]), time.perf_counter
        is_launch, waits = name == "mg_launch", is_wait(name)

        def call(*args: Any) -> Any:
            start = clock()
            if is_launch and self._waited is not None:
                self.idle_s += start - self._waited
                self._waited = None
            try:
                return real(*args)
            finally:
                end = clock()
                count[1] += end - start
                count[0] += 1
                if waits:
                    self._waited = end

        setattr(self, name, call)  # from now on the attribute is found without this method
        return call

    def clear(self) -> None:
        """Begin to count anew."""
        self.idle_s, self._waited = 0.0, None
        for count in self.calls.values():
            count[:] = [0, 0.0]


@contextmanager
def timed_library() -> Iterator[TimedLibrary]:
    """Have all modules of the package call a timed library."""
    library = TimedLibrary()
    modules = [m for n, m in sys.modules.items() if n.startswith("moegraph.") and hasattr(m, "C")]
    for module in modules:
        vars(module)["C"] = library
    try:
        yield library
    finally:
        for module in modules:
            vars(module)["C"] = C


def passes(engine: Engine, n: int) -> Iterator[object]:
    """Decode as `moegraph bench` does: passes alone."""
    engine.reset()
    token = np.ones(1, dtype=np.int32)
    for _ in range(n):
        yield engine.forward(token, greedy=True)


def generation(**settings: Any) -> Way:
    """Return what generates with text, with these settings of sampling."""
    params = SamplingParams(seed=1, **settings)
    return lambda engine, n: engine.generate(_PROMPT, params, max_tokens=n, ignore_eos=True)


WAYS: dict[str, Way] = {
    "passes": passes,
    "greedy": generation(temperature=0.0),
    "sampled": generation(),
}


def timed(engine: Engine, way: Way, n: int, begin: Callable[[], object] = lambda: None) -> float:
    """Return the seconds of n tokens; those before them do not count.

    begin: called just before the first of the n.
    """
    tokens = iter(way(engine, _WARM + n))
    for _ in islice(tokens, _WARM):
        pass
    begin()
    start = time.perf_counter()
    for _ in islice(tokens, n):
        pass
    return time.perf_counter() - start


def rows(calls: Calls, seconds: float, idle_s: float, n: int) -> Iterator[tuple[str, float, str]]:
    """Yield name, microseconds and calls a token: native functions, Python, both, and `idle`.

    seconds: of n tokens, in which the calls were made.
    """
    native = sorted(((s, c, name) for name, (c, s) in calls.items() if c), reverse=True)
    waits = sum(s for s, _, name in native if is_wait(name))
    for s, count, name in native:
        yield name + " (waits)" * is_wait(name), 1e6 * s / n, f"{count / n:.2f}"
    yield "Python", 1e6 * (seconds - sum(s for s, _, _ in native)) / n, ""
    yield "host", 1e6 * (seconds - waits) / n, ""
    yield "idle", 1e6 * idle_s / n, ""


def is_wait(name: str) -> bool:
    """Return whether the host waits for a device in a native function."""
    return any(part in name for part in _WAITS)


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    bench.add_common(p, samples=5)
    p.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    p.add_argument("--tokens", type=bench.positive, default=128, help="of each run")
    p.add_argument("--vram", default="auto", help="device memory in GiB, as of moegraph")
    p.add_argument("--spec", default="off", help="what drafts, as of moegraph; default: off")
    p.add_argument(
        "--profile", type=bench.positive, metavar="N", help="list N Python functions of each way"
    )
    return p


def measure(engine: Engine, name: str, samples: int, n: int, raw: bench.Raw) -> None:
    """Print the table of one way, and append its raw line."""
    way = WAYS[name]
    timed(engine, way, n)
    plain = [timed(engine, way, n) for _ in range(samples)]
    split: list[tuple[float, float, Calls]] = []
    with timed_library() as library:
        for _ in range(samples):
            seconds = timed(engine, way, n, library.clear)
            calls = {key: (*count,) for key, count in library.calls.items()}
            split.append((seconds, library.idle_s, calls))
    seconds, idle_s, counted = min(split, key=lambda run: run[0])
    token_us = 1e6 * statistics.median(plain) / n
    raw.add("host", way=name, n_tokens=n, seconds=plain, timed_s=seconds, idle_s=idle_s,
            calls=counted)  # fmt: skip
    print(f"| {name}, {token_us:.1f} us a token | us | calls |\n|---|---|---|")
    for row, us, count in rows(counted, seconds, idle_s, n):
        print(f"| {row} | {us:.1f} | {count} |", flush=True)
    print()


def measure_all(args: argparse.Namespace) -> None:
    """Measure each way, and profile it if that is wanted."""
    clock, raw = bench.Clock(args.time_limit), bench.Raw("bench_host", args)
    n_ctx = max(512, len(_PROMPT) + _WARM + args.tokens)
    given = {"device": args.device, "vram": args.vram, "n_ctx": n_ctx, "spec": args.spec}
    if args.threads:
        given["n_threads"] = args.threads
    with Engine.load(args.model, EngineConfig(**given)) as engine:
        for name in args.way:
            clock.left()
            measure(engine, name, args.samples, args.tokens, raw)
            if args.profile:
                profile = cProfile.Profile()
                timed(engine, WAYS[name], args.tokens, profile.enable)
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_host.py", lambda: measure_all(args))


if __name__ == "__main__":
    sys.exit(main())
