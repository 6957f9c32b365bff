"""What `Speculation` works out while the device computes: the decisions are those without it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from helpers.dictated import Written, opened, quiet, words, write
from helpers.scripted_drafts import AnyController

from moegraph.draft.drafter import Draft, Taken
from moegraph.draft.lookup import LookUp
from moegraph.draft.plan import PLAIN, Plan
from moegraph.passes.speculation import Ask, Speculation


class FirstOf(AnyController):
    """Drafts with the first drafter that may have something; counts how often it is asked."""

    n_asked = 0

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        self.n_asked += 1
        names = [name for name in self.names if name not in without]
        return Plan(names[0], 3) if names else PLAIN


def scripted() -> tuple[Speculation, FirstOf]:
    controller = FirstOf(["lookup"], ["chain"])
    speculation = Speculation([LookUp(n_seq=2)], controller, 50, 8)
    speculation.begin(0, [1, 2, 3])
    return speculation, controller


@pytest.mark.parametrize("n_kinds", [2, 5, 40])
def test_drafts_are_those_of_a_loop_that_foresees_nothing(n_kinds: int) -> None:
    rng, n_drafted = np.random.default_rng(n_kinds), 0
    (ahead, _), (plain, _) = scripted(), scripted()
    anchor = 4
    for n_left in range(300, 0, -1):
        found = [each.propose(Ask(0, anchor, n_left, 99)) for each in (ahead, plain)]
        drafts = [one and one.draft.tokens.tolist() for one in found]
        assert drafts[0] == drafts[1]
        n_drafted += drafts[0] is not None
        if not found[0]:
            assert ahead.foresee(0, n_left - 1, anchor) == (n_left <= 2)
        for each in (ahead, plain):
            each.committed(0, [anchor])
        anchor = int(rng.integers(n_kinds))
    assert n_drafted > (5 if n_kinds < 40 else 0)


def test_a_step_without_repetition_asks_no_controller() -> None:
    """The controller was asked while the device computed."""
    speculation, controller = scripted()
    speculation.foresee(0, 9, 4)
    speculation.committed(0, [4])
    controller.n_asked = 0
    assert speculation.propose(Ask(0, 7, 9, 99)) is None
    assert controller.n_asked == 0
    # what was foreseen holds for one step, of this sequence, with so many tokens left
    assert speculation.propose(Ask(0, 7, 9, 99)) is None and controller.n_asked == 2
    for slot, n_left in ((0, 8), (1, 9)):
        speculation.begin(1, [1, 2, 3])
        speculation.foresee(0, 9, 4)
        controller.n_asked = 0
        assert speculation.propose(Ask(slot, 7, n_left, 99)) is None and controller.n_asked == 2


@pytest.mark.parametrize("spec", ["lookup", "auto"])
@pytest.mark.parametrize(("kind", "most"), [("hopeless", 0.06), ("mixed", 0.7)])
def test_few_drafts_are_made_that_are_not_worth_a_pass(
    kind: str, most: float, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes are those of a loop that foresees nothing."""
    n_made, draft = 0, LookUp.draft

    def counted(self: LookUp, *args: Any) -> Draft:
        nonlocal n_made
        n_made += 1
        return draft(self, *args)

    def written() -> tuple[dict[int, int], int]:
        nonlocal n_made
        n_made, found = 0, Written()
        write(quiet(1.0), speculation := opened(1.0, spec), *words(kind, 512, 1), found)
        assert speculation.controller.stats.steps < n_made
        return found.rows, n_made - speculation.controller.stats.steps

    monkeypatch.setattr(LookUp, "draft", counted)
    rows, n_vain = written()
    monkeypatch.setattr(Speculation, "foresee", lambda *_: False)
    assert rows == (plain := written())[0]
    assert n_vain <= most * plain[1]


def test_the_device_does_not_wait_until_look_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for whether it finds something."""
    speculation, _ = scripted()
    lookup, told = speculation.drafters["lookup"], list[tuple[int, int]]()
    committed, is_idle = lookup.committed, False

    def noted(taken: Sequence[Taken]) -> None:
        assert not is_idle
        for _, first, tokens in taken:
            told.extend(enumerate(tokens, first))
        committed(taken)

    monkeypatch.setattr(lookup, "committed", noted)
    for anchor in range(10, 20):
        assert not speculation.foresee(0, 29 - anchor, anchor)
        is_idle = True
        speculation.committed(0, [anchor])
        assert speculation.propose(Ask(0, anchor + 1, 29 - anchor, 99)) is None
        is_idle = False
    assert told == [*enumerate(range(10, 20), 3)]
    speculation.foresee(0, 9, 20)
    speculation.begin(0, [1, 2, 3, *range(10, 20)])  # the pass in flight was lost
    speculation.committed(0, [5])
    speculation.settle(0)
    assert told[-2:] == [(13, 20), (13, 5)]
