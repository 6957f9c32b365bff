"""The controller of drafts: what the user fixes, what it must not forget, several sequences.

How fast texts become with it: test_draft_recorded.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.recorded_drafts import Answer, Card, engine, write
from helpers.scripted_drafts import ScriptedDrafter

from moegraph.config import EngineConfig
from moegraph.draft.controller import Controller, open_controller
from moegraph.draft.drafter import Draft
from moegraph.draft.lookup import LookUp
from moegraph.draft.plan import PLAIN, DraftSettings, Plan, Source, Step
from moegraph.draft.tree import DDTree

STEP = 2.4e-3
MTP = Source("mtp", 8, 0.02, 0.17, 0.75)
DFLASH = Source("dflash", 15, 0.18, 0.0, 0.7)
LOOKUP = Source("lookup", 16, 0.0, 0.0, 0.6)


def law(n_rows: int) -> float:
    """Return about how many times as long as one row a pass of so many takes."""
    return math.pow(n_rows, 0.36) + (0.2 if n_rows > 8 else 0.0)


def taught(kind: str) -> Controller:
    """Return a controller that has drafted a text of a kind."""
    controller = engine(1.0, "mtp")
    write(Card(1.0, 1), Answer((kind,), 600, 1), controller)
    return controller


def test_a_pause_of_the_process_does_not_end_drafting() -> None:
    controller = taught("structured")
    for _ in range(3):
        controller.observe(Step("mtp", 0.5, 1, 4, 3, 3, 0, (-1,), (), 1e-3, 0.4))
    n_plain = 0
    while not controller.choose(100).source:
        controller.observe(Step("", STEP))
        n_plain += 1
    assert n_plain < 600


def test_a_draft_that_took_longer_than_its_step_says_nothing_of_passes() -> None:
    controller = taught("structured")
    usual_s = controller.passes.at(4)
    for more in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5):  # one of them at least is as long as expected
        seconds = more * usual_s
        controller.observe(Step("mtp", seconds, 1, 4, 3, 3, 0, (-1,), (), 2 * seconds, 0.4))
    assert controller.passes.at(4) == usual_s


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DraftSettings("mtp", budget=6), Plan("mtp", 5)),
        (DraftSettings("mtp", draft_max=3), Plan("mtp", 3)),
        (DraftSettings("mtp", draft_max=3, budget=2), Plan("mtp", 1)),
        (DraftSettings("mtp", draft_max=60), Plan("mtp", 8)),
        (DraftSettings("dflash", ddtree=DDTree(22)), Plan("dflash", 15, 8, DDTree(22))),
        (DraftSettings("off"), PLAIN),
        (DraftSettings("auto", budget=1), PLAIN),
    ],
)
def test_what_the_user_fixes_is_done_in_every_step(settings: DraftSettings, expected: Plan) -> None:
    controller = Controller([MTP, DFLASH, LOOKUP], settings)
    for _ in range(20):
        assert controller.choose(1000) == expected
        controller.observe(Step(expected.source, STEP, n_rows=expected.n_draft + 1,
                                n_draft=expected.n_draft))  # fmt: skip


def test_a_draft_is_no_longer_than_the_text_may_become() -> None:
    controller = Controller([MTP], DraftSettings("mtp", budget=6, captures=False))
    assert controller.choose(4).n_draft == 3
    assert controller.choose(2).n_draft == 1
    assert controller.choose(1) == PLAIN
    assert controller.choose(9, without=("mtp",)) == PLAIN


def test_where_times_do_not_count_two_runs_choose_the_same() -> None:
    def chosen(noise: float) -> list[Plan]:
        controller = Controller([MTP, DFLASH], DraftSettings(is_timed=False))
        plans = []
        for at in range(300):
            plan = controller.choose(1000)
            plans.append(plan)
            n, right = plan.n_draft, at % 3
            n_right = min(right, n)
            ranks = (0,) * n_right + ((-1,) if n_right < n else ())
            seconds = STEP * (1 + noise * (at % 7))
            drafter_s = noise * seconds / 9
            controller.observe(Step(
                plan.source, seconds, n_right + 1, n + 1, n, n, n_right, ranks, (), drafter_s,
                is_trial=plan.is_trial,
            ))  # fmt: skip
        assert controller.stats.speedup is None
        return plans

    assert chosen(0.0) == chosen(0.9)


def test_the_settings_of_an_engine_become_those_of_its_controller() -> None:
    drafters = [ScriptedDrafter([], 9, name="dspark", max_draft=15), LookUp()]
    config = EngineConfig(spec="dflash", ddtree=True, ddtree_budget=22, ddtree_temp=0.5)
    settings = open_controller(drafters, config, 32).settings
    assert settings.spec == "dspark" and settings.is_timed
    assert settings.ddtree == DDTree(22, 0.5, True) and settings.most_rows == 23
    assert open_controller(drafters, EngineConfig(budget=1), 32).choose(9) == PLAIN
    config = EngineConfig(spec="auto", deterministic=True, draft_p_min=0.5, draft_max=4)
    settings = open_controller(drafters, config, 8).settings
    assert settings == DraftSettings("auto", 4, 0.5, max_rows=8, is_timed=False)


def test_several_sequences_draft_as_long_as_that_pays_for_so_many() -> None:
    good, bad = taught("structured"), taught("hopeless")
    assert good.choose_for(2, 100) == PLAIN  # what passes without drafts take is not known yet
    for controller in (good, bad):
        for n in (2, 4, 8, 16, 32):
            for _ in range(4):
                controller.observe_shared(n, n, STEP * law(n), n)
    lengths = [good.choose_for(n, 100).n_draft for n in (2, 4, 8, 16, 32)]
    assert lengths[0] >= 2 and lengths == sorted(lengths, reverse=True) and lengths[-1] == 0
    assert all(n * (length + 1) <= 32 for n, length in zip((2, 4, 8, 16, 32), lengths))
    assert bad.choose_for(4, 100) == PLAIN
    assert good.choose_for(2, 2).n_draft == 1 and good.choose_for(2, 1) == PLAIN
    assert good.choose_for(2, 100, ["mtp"]) == PLAIN
    plan = good.choose_for(2, 100)
    assert good.choose_for(2, 100) is plan  # worked out once for all sequences
    draft = Draft(np.arange(8, dtype=np.int32)[:, None])
    assert good.n_spine(plan, draft) == plan.n_draft
