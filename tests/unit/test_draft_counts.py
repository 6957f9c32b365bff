"""What a profile remembers of drafts: kept, bounded, and used by the next start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.recorded_drafts import Answer, Card, engine, write

from moegraph.draft.controller import Controller
from moegraph.draft.plan import Step
from moegraph.errors import RequestError
from moegraph.placement.draftcounts import added, from_fields, less
from moegraph.placement.identity import RouterShape
from moegraph.placement.profile import Profile, read_profile
from moegraph.placement.profilefile import ProfileFile

SHAPE = RouterShape(2, 4, 2, "abc")
COUNTS = np.array([[8, 0, 1, 1], [0, 5, 5, 0]])
GOOD = {"mtp": ((40, 36, 30), (36, 30, 20)), "dflash": ((5,), (1,))}


def test_counts_are_added_and_older_ones_fade() -> None:
    twice = added(GOOD, {"mtp": ((10, 9, 8, 7), (9, 8, 7, 6)), "lookup": ((3,), (2,))})
    assert twice["mtp"] == ((50, 45, 38, 7), (45, 38, 27, 6))
    assert twice["dflash"] == GOOD["dflash"] and twice["lookup"] == ((3,), (2,))
    assert less(twice, GOOD) == {
        "mtp": ((10, 9, 8, 7), (9, 8, 7, 6)), "lookup": ((3,), (2,)),
    }  # fmt: skip
    assert less(GOOD, GOOD) == {} and added({}, {"mtp": ((), ())}) == {}
    many = {"mtp": ((4000, 3000), (3000, 2000))}
    for _ in range(50):
        many = added(many, {"mtp": ((900, 100), (90, 10))})
    (first, second), (right, _) = many["mtp"]
    assert first <= 4096 + 900 and second < first and right / first < 0.15


def test_a_profile_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    opened = ProfileFile(path, "", True, SHAPE)
    assert opened.profile.drafts == {}
    kept = opened.update(COUNTS, GOOD)
    assert kept and not kept.why
    more = added(GOOD, {"mtp": ((2,), (1,))})
    assert opened.update(2 * COUNTS, more) and read_profile(path, SHAPE).drafts == more
    # a run in which no expert can be missing has no choices to add
    again = ProfileFile(path, "", True, SHAPE)
    assert not again.update(None, GOOD).why
    found = read_profile(path, SHAPE)
    assert found.drafts == added(more, GOOD) and found.classes["default"].n_tokens == 10
    assert "drafts" in path.read_text()
    # a profile of choices alone has none
    opened = ProfileFile(tmp_path / "q.json", "", True, SHAPE)
    opened.update(COUNTS)
    assert "drafts" not in (tmp_path / "q.json").read_text()


@pytest.mark.parametrize("drafts", [
    [], {"mtp": []}, {"mtp": {"seen": [1]}}, {"mtp": {"seen": [1], "right": [2]}},
    {"mtp": {"seen": [1, 2], "right": [1]}}, {"mtp": {"seen": [-1], "right": [-1]}},
    {"mtp": {"seen": [1.5], "right": [1]}}, {"a b": {"seen": [1], "right": [1]}},
    {"mtp": {"seen": [1] * 33, "right": [1] * 33}}, {"mtp": {"seen": [], "right": []}},
    {"mtp": {"seen": [1 << 31], "right": [1]}},
    {f"d{i}": {"seen": [1], "right": [1]} for i in range(9)},
])  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path: Path, drafts: Any) -> None:
    assert from_fields(drafts) is None
    path = tmp_path / "p.json"
    Profile(SHAPE).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "drafts": drafts}))
    with pytest.raises(RequestError, match="its drafts are no counts"):
        read_profile(path, SHAPE)


STEP = 2.4e-3


def begun(kind: str, known: bool) -> Controller:
    """Return a controller before its second start, which may know what the first one learned."""
    before, after = engine(1.0, "mtp"), engine(1.0, "mtp")
    write(Card(1.0, 1), Answer((kind,), 600, 1), before)
    if known:
        after.remember(before.stats.drafts)
    return after


def test_the_next_start_begins_with_what_was_learned() -> None:
    good = begun("structured", known=True)
    plan = good.choose(500)
    assert plan.source == "mtp" and not plan.is_trial and plan.n_draft >= 2

    def n_tried(controller: Controller) -> int:
        n = 0
        for _ in range(100):
            plan = controller.choose(500)
            n += bool(plan.source)
            draft_s, m = 0.2 * plan.n_draft * STEP, plan.n_draft
            pass_s = (1.0 + 0.17 * m) * STEP
            ranks = (-1,) * min(m, 1)
            controller.observe(Step(plan.source, pass_s + draft_s, 1, 1 + m, plan.n_draft, m, 0,
                                    ranks, (), draft_s, is_trial=plan.is_trial))  # fmt: skip
        return n

    assert n_tried(begun("hopeless", known=True)) < n_tried(begun("hopeless", known=False))
