"""Time prompt processing (pp) and text generation (tg) at a depth, as llama-bench does.

Tokens are random, and nothing is sampled. Every repetition starts from an empty sequence. Unless
`warm_up` is off, an uncounted repetition comes first, which builds and captures the graphs. The
time of a tg token includes the argmax on the device and its copy to the host. A pp+tg test times a
prompt and the tokens after it together. A run test goes through `Engine.generate` instead: tokens
are sampled, fed back, and turned into text, as `moegraph run` does it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ..draft.plan import SpecStats
from ..engine import Engine
from ..errors import ContextOverflow
from ..experts.cachestats import ExpertStats
from ..sampling import SamplingParams
from .scripted import ScriptedAccept


@dataclass(frozen=True)
class BenchSpec:
    """What to measure: at every depth, every prompt length, generation length and pair of both.

    n_prompt, n_gen, depth: tokens. repetitions: timed runs of each test. seed: of the random
    tokens. pairs: (n_prompt, n_gen) of pp+tg tests. warm_up: run each test once uncounted. n_run:
    lengths of run tests. samplings: how these sample, each with words for the names of its tests.
    text: whether they make text, for which the model needs a vocabulary. draft_accept: rates by
    position at which their drafts are accepted by a script, as in `ScriptedAccept`; empty: by the
    target's choice.
    """

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    depth: tuple[int, ...] = (0,)
    repetitions: int = 5
    seed: int = 1
    pairs: tuple[tuple[int, int], ...] = ()
    warm_up: bool = True
    n_run: tuple[int, ...] = ()
    samplings: tuple[tuple[str, SamplingParams], ...] = (("", SamplingParams(seed=1)),)
    text: bool = True
    draft_accept: tuple[float, ...] = ()

    @property
    def tests(self) -> list[BenchTest]:
        """All tests, in order."""
        lengths = [(n, 0) for n in self.n_prompt] + [(0, n) for n in self.n_gen]
        found: list[BenchTest] = []
        for depth in self.depth:
            found += [
                BenchTest(n_prompt, n_gen, depth)
                for n_prompt, n_gen in (*lengths, *self.pairs)
                if n_prompt + n_gen > 0
            ]
            found += [
                BenchTest(0, n, depth, sampling, words)
                for n in self.n_run
                for words, sampling in self.samplings
                if n > 0
            ]
        return found


@dataclass(frozen=True)
class BenchTest:
    """One test: after depth positions, a prompt of n_prompt tokens, then n_gen single tokens.

    sampling: of a run test, which has no prompt of its own; None for the others. words: what its
    sampling has that other tests' have not.
    """

    n_prompt: int
    n_gen: int
    depth: int
    sampling: SamplingParams | None = None
    words: str = ""

    @property
    def name(self) -> str:
        """Name as in llama-bench: pp512, tg128, pp512+tg128, tg128 @ d4096; run128 is ours."""
        generated = "tg" if self.sampling is None else "run"
        parts = [f"{kind}{n}" for kind, n in (("pp", self.n_prompt), (generated, self.n_gen)) if n]
        name = "+".join(parts) + (f" {self.words}" if self.words else "")
        return name + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_positions(self) -> int:
        """Positions of the context that it needs."""
        first = 0 if self.sampling is None else max(1 - self.depth, 0)  # a run needs a prompt
        return self.depth + self.n_prompt + self.n_gen + first


@dataclass(frozen=True)
class BenchRow:
    """One row: seconds of each repetition of a test.

    experts: statistics of the expert cache over these repetitions, including the tokens that fill
    the depth; None without a cache. drafts: what a run test drafted; None for the others, and if
    nothing drafts.
    """

    test: BenchTest
    seconds: tuple[float, ...]
    experts: ExpertStats | None = None
    drafts: SpecStats | None = None


def run_bench(engine: Engine, spec: BenchSpec) -> Iterator[BenchRow]:
    """Yield the rows of a spec as they are measured."""
    longest = max((test.n_positions for test in spec.tests), default=0)
    if longest > engine.n_ctx:
        raise ContextOverflow(
            f"a test needs {longest} positions, but the context holds {engine.n_ctx}; raise -c"
        )
    if spec.draft_accept and engine.speculation:
        engine.speculation.accept = ScriptedAccept(spec.draft_accept, spec.seed)
    rng = np.random.default_rng(spec.seed)
    for test in spec.tests:
        timed = _timed if test.sampling is None else partial(_timed_run, spec.text)
        if spec.warm_up:
            timed(engine, test, rng)
        before, undrafted = engine.expert_stats(), engine.spec_stats()
        seconds = tuple(timed(engine, test, rng) for _ in range(spec.repetitions))
        after, drafted = engine.expert_stats(), engine.spec_stats()
        experts = after.since(before) if after and before else None
        drafts = drafted.since(undrafted) if drafted and undrafted and test.sampling else None
        yield BenchRow(test, seconds, experts, drafts)
    engine.reset()


def _timed(engine: Engine, test: BenchTest, rng: np.random.Generator) -> float:
    depth, start = test.depth, test.depth + test.n_prompt
    tokens = rng.integers(0, engine.hparams.n_vocab, start + test.n_gen, dtype=np.int32)
    engine.reset()
    _prefill(engine, tokens[:depth])
    began = time.perf_counter()
    _prefill(engine, tokens[depth:start])
    for token in tokens[start:]:
        engine.forward(token, greedy=True)
    return time.perf_counter() - began


def _timed_run(text: bool, engine: Engine, test: BenchTest, rng: np.random.Generator) -> float:
    """Return the seconds from the first token of a generation to the last of n_gen more."""
    prompt = rng.integers(0, engine.hparams.n_vocab, max(test.depth, 1), dtype=np.int32)
    events = engine.generate(prompt, test.sampling, test.n_gen + 1, ignore_eos=True, text=text)
    next(events)
    began = time.perf_counter()
    for _ in events:
        pass
    return time.perf_counter() - began


def _prefill(engine: Engine, tokens: npt.NDArray[np.int32]) -> None:
    if len(tokens):
        engine.prefill(tokens, greedy=True)
