"""Passes of several sequences that are cancelled or fail at any point: who keeps what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moegraph.engine import Engine
from moegraph.errors import Cancelled
from moegraph.events import CancelToken
from moegraph.runner import layer_graphs

Open = Callable[..., Engine]
N_VOCAB, N_SEQ, PRESET = 1000, 4, "legacy32"
SLOTS = {"pin_layers": 0, "cache_slots": 48, "policy": "lru"}
MODES: list[dict[str, Any]] = [
    {"mode": "whole"},
    {**SLOTS, "miss": "stream"},
    {**SLOTS, "miss": "cpu"},
]
NAMES = ["whole", "stream", "cpu"]
RUN = [2, 0, 3]  # the sequences of a pass, in its order


class Trigger(CancelToken):
    """A token that looks at the k-th question, and sets others then."""

    def __init__(self, at: int, *others: CancelToken) -> None:
        super().__init__()
        self.n_looks, self._at, self._others = 0, at, others

    def is_set(self) -> bool:
        self.n_looks += 1
        if self.n_looks == self._at:
            for token in self._others:
                token.set()
        return super().is_set()


class Case:
    """An engine with four sequences of other lengths, and what each must give by itself."""

    def __init__(self, open_engine: Open, settings: dict[str, Any]) -> None:
        chosen = {"cpu_reference": True, "deterministic": True}
        self.engine = open_engine(PRESET, n_seq=N_SEQ, **chosen, **settings)
        self._alone = open_engine(PRESET, **chosen)
        self._rng = np.random.default_rng(1)
        self.held: list[list[int]] = [[] for _ in range(N_SEQ)]
        for slot in range(N_SEQ):
            self.grow(slot)

    def grow(self, slot: int) -> None:
        """Give an empty sequence its first tokens."""
        self.held[slot] = self._rng.integers(0, N_VOCAB, 3 + 4 * slot).tolist()
        self.engine.forward(self.held[slot], slot)

    def rows(self, n: int = 1) -> np.ndarray:
        """Return the rows of the next pass."""
        return self._rng.integers(0, N_VOCAB, (len(RUN), n))

    def took(self, rows: np.ndarray, *slots: int) -> None:
        """Note that sequences hold the rows of a pass."""
        for slot in slots:
            self.held[slot] += rows[RUN.index(slot)].tolist()

    def logits(self, slot: int) -> np.ndarray:
        """Return the logits after what a sequence holds."""
        self._alone.reset()
        return self._alone.forward(self.held[slot]).require_logits()[-1]

    def check(self) -> None:
        """Check that each sequence holds what it should, and goes on from there."""
        assert [self.engine.held(slot) for slot in range(N_SEQ)] == self.held
        self.engine.state.pool.check()
        tokens = self._rng.integers(0, N_VOCAB, (N_SEQ, 1))
        got = self.engine.forward(tokens, list(range(N_SEQ))).require_logits()
        for slot in range(N_SEQ):
            self.held[slot] += tokens[slot].tolist()
            np.testing.assert_array_equal(got[slot], self.logits(slot), err_msg=f"{slot}")


@pytest.fixture(params=MODES, ids=NAMES)
def case(request: Any, open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Return sequences whose passes launch every layer by itself."""
    for name in ("MERGED", "MERGED_LATER"):
        monkeypatch.setattr(layer_graphs, name, 1)
    return Case(open_engine, request.param)


def n_looks(case: Case) -> int:
    """Return how often a pass asks whether it is cancelled."""
    trigger, rows = Trigger(0), case.rows()
    case.engine.forward(rows, RUN, cancel=[trigger] * len(RUN))
    case.took(rows, *RUN)
    return trigger.n_looks


def test_one_sequence_that_is_cancelled_touches_no_other(case: Case) -> None:
    for at in range(1, n_looks(case) + 1):
        ended, going = CancelToken(), Trigger(at)
        going._others = (ended,)
        rows, slot = case.rows(), RUN[1]
        case.engine.submit(rows, RUN, False, False, [going, ended, CancelToken()])
        assert ended.is_set()
        case.took(rows, *RUN)
        if at % 2:
            case.engine.reset(slot)
            case.held[slot] = []
        got = case.engine.collect().require_logits()
        for seq in (0, 2) if at % 2 else (0, 1, 2):
            np.testing.assert_array_equal(got[seq], case.logits(RUN[seq]))
        if at % 2:
            case.grow(slot)
    case.check()


def test_a_pass_whose_sequences_are_all_cancelled(case: Case) -> None:
    for at in range(1, n_looks(case) + 1):
        tokens = [CancelToken() for _ in RUN]
        last = Trigger(at)
        last._others = (*tokens[:2], last)
        for token in tokens[:2]:
            token.set()
        with pytest.raises(Cancelled):
            case.engine.forward(case.rows(3), RUN, cancel=[*tokens[:2], last])
        if at > 1:  # some layers have advanced
            for slot in RUN:
                case.held[slot] = []
        assert [case.engine.held(slot) for slot in range(N_SEQ)] == case.held, f"look {at}"
        for slot in RUN if at > 1 else ():
            case.grow(slot)
        case.check()


def test_verify_passes_change_nothing_wherever_they_are_cancelled(case: Case) -> None:
    trigger, rows = Trigger(0), case.rows(3)
    passes, engine = case.engine.passes, case.engine
    passes.verify(rows, RUN, greedy=False, cancel=[trigger] * len(RUN))
    engine.collect()
    for at in range(1, trigger.n_looks + 1):
        last = Trigger(at)
        last._others = (last,)
        with pytest.raises(Cancelled):
            passes.verify(case.rows(3), RUN, lengths=[3, 1, 2], cancel=last)
        assert [engine.held(slot) for slot in range(N_SEQ)] == case.held
    case.check()
