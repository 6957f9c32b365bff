"""Time prompt passes (pp) and single-token passes (tg) at a depth, as llama-bench does.

Tokens are random, nothing is sampled, every repetition starts from an empty sequence, and one
repetition before the first is not counted (it builds and captures the graphs). A tg pass includes
the argmax on the device and its read-back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine import Engine
from ..errors import ContextOverflow
from ..experts.cachestats import ExpertStats


@dataclass(frozen=True)
class BenchSpec:
    """What to measure: every depth with every prompt length, then with every generation length.

    n_prompt, n_gen, depth: tokens; repetitions: timed runs a row; seed: of the random tokens.
    """

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    depth: tuple[int, ...] = (0,)
    repetitions: int = 5
    seed: int = 1


@dataclass(frozen=True)
class BenchRow:
    """One row: seconds of each repetition of a test of n_tokens tokens.

    experts: what the expert cache did in these repetitions, fillings of a depth included; None
    without one.
    """

    test: str
    n_tokens: int
    depth: int
    seconds: tuple[float, ...]
    experts: ExpertStats | None = None

    @property
    def samples_tps(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.n_tokens / s for s in self.seconds]

    @property
    def mean_tps(self) -> float:
        """Mean of the repetitions, tokens per second."""
        return statistics.fmean(self.samples_tps)

    @property
    def sd_tps(self) -> float:
        """Standard deviation of the repetitions; 0 for one."""
        return statistics.stdev(self.samples_tps) if len(self.seconds) > 1 else 0.0


def run_bench(engine: Engine, spec: BenchSpec) -> Iterator[BenchRow]:
    """Yield the rows of a spec as they are measured.

    Raises:
        ContextOverflow: a test needs more positions than the context has; found before measuring.
    """
    tests = [
        (kind, n, depth)
        for depth in spec.depth
        for kind, lengths in (("pp", spec.n_prompt), ("tg", spec.n_gen))
        for n in lengths
        if n > 0
    ]
    longest = max((depth + n for _, n, depth in tests), default=0)
    if longest > engine.n_ctx:
        raise ContextOverflow(
            f"a test needs {longest} positions, the context holds {engine.n_ctx}; raise -c"
        )
    rng = np.random.default_rng(spec.seed)
    for kind, n, depth in tests:
        run = _prefill if kind == "pp" else _decode
        _timed(engine, run, n, depth, rng)
        before = engine.expert_stats()
        seconds = tuple(_timed(engine, run, n, depth, rng) for _ in range(spec.repetitions))
        after = engine.expert_stats()
        experts = after.since(before) if after and before else None
        name = f"{kind}{n}" + (f" @ d{depth}" if depth else "")
        yield BenchRow(name, n, depth, seconds, experts)
    engine.reset()


def _timed(
    engine: Engine,
    run: Callable[[Engine, npt.NDArray[np.int32]], None],
    n: int,
    depth: int,
    rng: np.random.Generator,
) -> float:
    tokens = rng.integers(0, engine.hparams.n_vocab, depth + n, dtype=np.int32)
    engine.reset()
    _prefill(engine, tokens[:depth])
    start = time.perf_counter()
    run(engine, tokens[depth:])
    return time.perf_counter() - start


def _prefill(engine: Engine, tokens: npt.NDArray[np.int32]) -> None:
    for start in range(0, len(tokens), engine.runner.n_ubatch):
        engine.forward(tokens[start : start + engine.runner.n_ubatch], greedy=True)


def _decode(engine: Engine, tokens: npt.NDArray[np.int32]) -> None:
    for token in tokens:
        engine.forward(token, greedy=True)
