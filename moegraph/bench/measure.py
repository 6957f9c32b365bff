"""Time prompt processing (pp) and text generation (tg) at a depth, as llama-bench does.

Tokens are random, and nothing is sampled. Every repetition starts from an empty sequence. Unless
`warm_up` is off, an uncounted repetition comes first, which builds and captures the graphs. The
time of a tg token includes the argmax on the device and its copy to the host. A pp+tg test times a
prompt and the tokens after it together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine import Engine
from ..errors import ContextOverflow
from ..experts.cachestats import ExpertStats


@dataclass(frozen=True)
class BenchSpec:
    """What to measure: at every depth, every prompt length, generation length and pair of both.

    n_prompt, n_gen, depth: tokens. repetitions: timed runs of each test. seed: of the random
    tokens. pairs: (n_prompt, n_gen) of pp+tg tests. warm_up: run each test once uncounted.
    """

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    depth: tuple[int, ...] = (0,)
    repetitions: int = 5
    seed: int = 1
    pairs: tuple[tuple[int, int], ...] = ()
    warm_up: bool = True

    @property
    def tests(self) -> list[BenchTest]:
        """All tests, in order."""
        lengths = [(n, 0) for n in self.n_prompt] + [(0, n) for n in self.n_gen]
        return [
            BenchTest(n_prompt, n_gen, depth)
            for depth in self.depth
            for n_prompt, n_gen in (*lengths, *self.pairs)
            if n_prompt + n_gen > 0
        ]


@dataclass(frozen=True)
class BenchTest:
    """One test: after depth positions, a prompt of n_prompt tokens, then n_gen single tokens."""

    n_prompt: int
    n_gen: int
    depth: int

    @property
    def name(self) -> str:
        """Name as in llama-bench: pp512, tg128, pp512+tg128, tg128 @ d4096."""
        parts = [f"{kind}{n}" for kind, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class BenchRow:
    """One row: seconds of each repetition of a test of n_prompt + n_gen tokens.

    experts: statistics of the expert cache over these repetitions, including the tokens that fill
    the depth; None without a cache.
    """

    test: str
    n_prompt: int
    n_gen: int
    depth: int
    seconds: tuple[float, ...]
    experts: ExpertStats | None = None

    @property
    def n_tokens(self) -> int:
        """Timed tokens of a repetition, without those that fill the depth."""
        return self.n_prompt + self.n_gen

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
        """Standard deviation of the repetitions, tokens per second; 0 for one."""
        return statistics.stdev(self.samples_tps) if len(self.seconds) > 1 else 0.0


def run_bench(engine: Engine, spec: BenchSpec) -> Iterator[BenchRow]:
    """Yield the rows of a spec as they are measured.

    Raises:
        ContextOverflow: a test needs more positions than the context has; raised before any test.
    """
    longest = max((test.depth + test.n_prompt + test.n_gen for test in spec.tests), default=0)
    if longest > engine.n_ctx:
        raise ContextOverflow(
            f"a test needs {longest} positions, but the context holds {engine.n_ctx}; raise -c"
        )
    rng = np.random.default_rng(spec.seed)
    for test in spec.tests:
        if spec.warm_up:
            _timed(engine, test, rng)
        before = engine.expert_stats()
        seconds = tuple(_timed(engine, test, rng) for _ in range(spec.repetitions))
        after = engine.expert_stats()
        experts = after.since(before) if after and before else None
        yield BenchRow(test.name, test.n_prompt, test.n_gen, test.depth, seconds, experts)
    engine.reset()


def _timed(engine: Engine, test: BenchTest, rng: np.random.Generator) -> float:
    depth, start = test.depth, test.depth + test.n_prompt
    tokens = rng.integers(0, engine.hparams.n_vocab, start + test.n_gen, dtype=np.int32)
    engine.reset()
    _prefill(engine, tokens[:depth])
    began = time.perf_counter()
    _prefill(engine, tokens[depth:start])
    _decode(engine, tokens[start:])
    return time.perf_counter() - began


def _prefill(engine: Engine, tokens: npt.NDArray[np.int32]) -> None:
    if len(tokens):
        engine.prefill(tokens, greedy=True)


def _decode(engine: Engine, tokens: npt.NDArray[np.int32]) -> None:
    for token in tokens:
        engine.forward(token, greedy=True)
