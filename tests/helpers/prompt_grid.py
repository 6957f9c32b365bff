"""Check prompts that are computed layer by layer against passes over the same chunks, bit by bit.

A case is a prompt length, a chunk size, a residency, the rows of a sweep (longer prompts need
several), and what happens on the way: nothing; other sequences compute between steps; or the prompt
is cancelled after some step, must leave the sequence as it was, and is computed again. Compared are
the last row's logits, the keys and values of every position, the recurrent states, and the logits
of rows after it. Works on the CPU, whose results for a chunk do not depend on the runner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moegraph import Engine
from moegraph.errors import Cancelled
from moegraph.events import CancelToken
from moegraph.placement import footprint
from moegraph.runner.inspect import read_tensor
from moegraph.runner.sweep_batch import SweepBatch

RESIDENCIES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "layered": {"mode": "layered"},
    "none": {"cache_slots": 0, "pin_layers": 0, "miss": "stream"},
    "some, from the file": {"cache_slots": 60, "pin_layers": 0, "miss": "stream"},
    "some, pinned": {"cache_slots": 60, "pin_layers": 0, "miss": "stream", "host_pin": "all"},
    "full layers": {"cache_slots": 30, "pin_layers": 2, "miss": "stream"},
    "on the CPU": {"cache_slots": 40, "pin_layers": 0, "miss": "cpu"},
}
CHUNKS = (64, 100, 512)
# Rows of a sweep, as a share of the prompt.
SPLITS = (1.0, 0.4)
# What happens after some share of the steps.
EVENTS = (("nothing", 0.0), ("pause", 0.0), ("pause", 0.5), ("cancel", 0.1), ("cancel", 0.7))
N_HELD, N_AFTER, OTHER = 20, 3, 1
Values = list[npt.NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One check. event: what happens, after this share of the steps."""

    n: int
    n_chunk: int
    residency: str
    split: float
    event: tuple[str, float]

    @property
    def sweep_rows(self) -> int:
        """Rows of a sweep: whole chunks."""
        return max(1, round(self.split * self.n) // self.n_chunk) * self.n_chunk

    def config(self, residency: str) -> dict[str, Any]:
        """Return the settings of an engine."""
        n_ctx = self.n + N_HELD + N_AFTER
        return {"n_ctx": n_ctx, "n_ubatch": self.n_chunk, "n_seq": 2, **RESIDENCIES[residency]}


def cases(tokens: Sequence[int]) -> list[Case]:
    """Return all cases for prompts of these lengths."""
    return [Case(*one) for one in itertools.product(tokens, CHUNKS, RESIDENCIES, SPLITS, EVENTS)]


@contextmanager
def rows_of_a_sweep(n: int) -> Iterator[None]:
    """Have engines that are loaded meanwhile compute n rows of a prompt in a sweep."""
    before, footprint.SWEEP_ROWS = footprint.SWEEP_ROWS, n
    try:
        yield
    finally:
        footprint.SWEEP_ROWS = before


def contents(engine: Engine, seq: int = 0) -> Values:
    """Return all that a sequence consists of: its ids, recurrent states, keys and values."""
    state = engine.state
    rows = state.pool.rows(np.array(seq), np.arange(state.n_past[seq]))
    found = [np.array(engine.held(seq))]
    for stage in engine.stages:
        one = stage.state
        found += [read_tensor(t)[seq].copy() for each in one.layer_states.values() for t in each]
        found += [read_tensor(t)[rows].copy() for t in (*one.k.values(), *one.v.values())]
    return found


def same(found: Values, expected: Values) -> bool:
    """Return whether all bits are equal."""
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def after(engine: Engine, ids: npt.NDArray[np.int32]) -> Values:
    """Return the logits of rows that follow the prompt."""
    return [engine.forward(ids[at : at + 1]).require_logits() for at in range(N_AFTER)]


def reference(engine: Engine, case: Case, ids: npt.NDArray[np.int32]) -> tuple[Values, Values]:
    """Compute the prompt in passes; return what the sequence consists of, and logits."""
    engine.reset()
    engine.prefill(ids[:N_HELD])
    prompt, rest = ids[N_HELD : N_HELD + case.n], ids[N_HELD + case.n :]
    for at in range(0, case.n, case.n_chunk):
        last = engine.forward(prompt[at : at + case.n_chunk])
    held = contents(engine)
    return held, [last.require_logits()[-1:], *after(engine, rest)]


def check(engine: Engine, case: Case, ids: npt.NDArray[np.int32], wanted: Any) -> str:
    """Compute the prompt layer by layer; return what is wrong, or ''. wanted: of `reference`."""
    engine.reset()
    engine.reset(OTHER)
    engine.prefill(ids[:N_HELD])
    prompt, rest = ids[N_HELD : N_HELD + case.n], ids[N_HELD + case.n :]
    before, (kind, share) = contents(engine), case.event
    batch = SweepBatch(prompt)
    sweep = engine.passes.begin_prompts([batch])
    due, n_steps, others = round(share * sweep.n_steps), 0, []
    while engine.passes.step_prompt(sweep, None):
        n_steps += 1
        if kind == "pause" and n_steps >= due and n_steps % 7 == 0:
            others.append(int(ids[n_steps % N_HELD]))
            engine.forward(others[-1:], OTHER)
        if kind == "cancel" and n_steps == max(1, due):
            cancel = CancelToken()
            cancel.set()
            with suppress(Cancelled):
                engine.passes.step_prompt(sweep, cancel)
            if not same(contents(engine), before):
                return f"cancelled after {n_steps} steps, the sequence is another one"
            sweep = engine.passes.begin_prompts([batch])
    assert sweep.prompts[0].output is not None
    if not same(contents(engine), wanted[0]):
        return "states, keys or values differ"
    if not same([sweep.prompts[0].output.require_logits()[-1:], *after(engine, rest)], wanted[1]):
        return "logits differ"
    if engine.held(OTHER) != others:
        return "the other sequence lost rows"
    return ""


def run(
    load: Callable[[dict[str, Any]], Engine], chosen: Sequence[Case]
) -> Iterator[tuple[Case, str]]:
    """Check cases; yield each with what is wrong. load: opens an engine with settings."""
    by_passes = sorted(chosen, key=lambda c: (c.n, c.n_chunk))
    for (n, n_chunk), group in itertools.groupby(by_passes, key=lambda c: (c.n, c.n_chunk)):
        some = sorted(group, key=lambda c: (c.residency, c.split))
        with load(some[0].config("whole")) as plain:
            rng = np.random.default_rng(n + n_chunk)
            n_ids = n + N_HELD + N_AFTER
            ids = rng.integers(0, plain.hparams.n_vocab, n_ids).astype(np.int32)
            wanted = reference(plain, some[0], ids)
        for _, alike in itertools.groupby(some, key=lambda c: (c.residency, c.split)):
            first, *more = alike
            with rows_of_a_sweep(first.sweep_rows), load(first.config(first.residency)) as engine:
                for case in (first, *more):
                    yield case, check(engine, case, ids, wanted)
