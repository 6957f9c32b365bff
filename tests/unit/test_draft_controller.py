"""The controller against a model of drafting: what it chooses, and what that costs and gains."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.drafting import Rates, Text, Tool, World, auto, best_fixed, simulate

from moegraph.config import EngineConfig
from moegraph.draft.controller import Controller
from moegraph.draft.drafter import Draft
from moegraph.draft.estimates import Experts
from moegraph.draft.opening import open_controller
from moegraph.draft.plan import PLAIN, DraftSettings, Plan, Shape, Source, Step
from moegraph.draft.tree import DDTree

STEP = 2.4e-3
MTP = Tool(Source("mtp", 8, 0.02, 0.17, 0.75, 3), 0.02 * STEP, 0.16 * STEP)
DFLASH = Tool(Source("dflash", 15, 0.18, 0.0, 0.7, 3), 0.22 * STEP, 0.0)
LOOKUP = Tool(Source("lookup", 16, 0.0, 0.0, 0.6, 1), 1e-5, 0.0, tells=False)
CODE = {
    "mtp": Rates((0.88, 0.85, 0.83, 0.80)),
    "dflash": Rates((0.85, 0.87, 0.87, 0.88, 0.90)),
    "lookup": Rates((0.6, 0.7, 0.8, 0.85), has=0.25),
}
STRUCTURED = {
    "mtp": Rates((0.95, 0.93, 0.92)),
    "dflash": Rates((0.93, 0.95, 0.96)),
    "lookup": Rates((0.8, 0.9, 0.93), has=0.7),
}
PROSE = {
    "mtp": Rates((0.55, 0.50, 0.45)),
    "dflash": Rates((0.5, 0.5, 0.5)),
    "lookup": Rates((0.25, 0.4, 0.5), has=0.08),
}
HOPELESS = {
    "mtp": Rates((0.25, 0.2)),
    "dflash": Rates((0.2, 0.2)),
    "lookup": Rates((0.1, 0.2), has=0.05),
}
KINDS = {"code": CODE, "structured": STRUCTURED, "prose": PROSE, "hopeless": HOPELESS}
TOOLS = {"mtp": [MTP], "dflash": [DFLASH], "all": [MTP, DFLASH, LOOKUP]}
# share of the chosen experts that are missing, seconds of one, seconds that the engine believes
RESIDENT, SOME, MANY, SLOW = (
    (0, 0, 0),
    (0.1, 40e-6, 43e-6),
    (0.35, 40e-6, 43e-6),
    (0.35, 110e-6, 43e-6),
)


def law(n_rows: int) -> float:
    """Not quite the law that the controller begins with; the ninth row costs more."""
    return math.pow(n_rows, 0.36) + (0.2 if n_rows > 8 else 0.0)


def world(texts: list[Text], tools: str, residency: tuple[float, float, float]) -> World:
    share, miss_s, believed_s = residency
    experts = Experts(40, 256, 8, believed_s) if share else None
    return World(texts, TOOLS[tools], law, STEP, experts, share, miss_s, growth=0.1, graph_s=1e-3)


def warm(world: World, seed: int = 7) -> Controller:
    """Return a controller that has planned one text of this world."""
    controller = auto(world)
    world.seed = seed
    simulate(world, controller)
    return controller


def speeds(it: World) -> tuple[float, float]:
    """Return the speed of auto over that of the best fixed choice, and over plain decoding.

    The best choice is that of another text of the same kind: on one text, the best of fifty choices
    is lucky too.
    """
    controllers = [warm(it, seed) for seed in (7, 27)]
    ours = best = plain = 0.0
    best_plan = best_fixed(replace(it, seed=9))
    for at, it.seed in enumerate((1, 2, 3, 4)):
        ours += simulate(it, controllers[at % 2])
        best += simulate(it, None, best_plan)
        plain += simulate(it, None, PLAIN)
    return best / ours, plain / ours


STEADY = [(k, t, r) for k in KINDS for t in ("mtp", "all") for r in (RESIDENT, MANY)]
CHANGING = [("code", "prose"), ("prose", "structured"), ("hopeless", "code", "hopeless")]


def test_auto_is_as_fast_as_the_best_fixed_choice() -> None:
    """In one test, so that the mean is that of all worlds, whoever runs which tests."""
    found = []
    for kind, tools, residency in STEADY:
        over_best, over_plain = speeds(world([Text(900, KINDS[kind])], tools, residency))
        assert over_best > 0.9 and over_plain > 0.965, (kind, tools, residency)
        found.append(over_best)
    assert np.mean(found) > 0.97


@pytest.mark.parametrize("residency", [SOME, SLOW])
@pytest.mark.parametrize("kinds", CHANGING)
def test_auto_follows_a_text_that_changes(
    kinds: tuple[str, ...], residency: tuple[float, float, float]
) -> None:
    texts = [Text(600, KINDS[kind]) for kind in kinds]
    over_best, over_plain = speeds(world(texts, "all", residency))
    assert over_best > 0.9 and over_plain > 0.965


@pytest.mark.parametrize("residency", [RESIDENT, MANY, SLOW])
def test_a_first_text_of_which_nothing_is_known_loses_little(
    residency: tuple[float, float, float],
) -> None:
    for kind, n_tokens, at_least in (("hopeless", 1500, 0.955), ("code", 600, 1.05)):
        it = world([Text(n_tokens, KINDS[kind])], "all", residency)
        ours = plain = 0.0
        for it.seed in range(4):
            ours += simulate(it, auto(it))
            plain += simulate(it, None, PLAIN)
        assert plain / ours > at_least


# Of an H200 with every expert of a 35B-A3B resident: milliseconds of verify passes and commits by
# rows, and how often the first, second, ... token of an MTP draft was accepted.
H200 = ((1, 2.45), (2, 3.58), (3, 4.05), (4, 4.33), (5, 4.82), (7, 5.33), (16, 7.5), (32, 10.2))
H200_MTP = Tool(MTP.source, 0.44e-3, 0.25e-3)
ACCEPTED = {
    "code": (0.84, 0.68, 0.56, 0.47, 0.31, 0.27),
    "structured": (0.94, 0.91, 0.85, 0.75, 0.65, 0.56),
    "hopeless": (0.3, 0.1, 0.03),
}


def h200(kind: str, n_tokens: int) -> World:
    """Return a world in which the first passes of each width, which build graphs, are dear."""
    accepted = ACCEPTED[kind]
    rates = tuple(p / before for before, p in zip((1.0, *accepted), accepted))
    rows, ms = zip(*H200)
    return World(
        [Text(n_tokens, {"mtp": Rates(rates)})], [H200_MTP],
        lambda n: float(np.interp(n, rows, ms)) / ms[0], ms[0] / 1e3, young=(3, 5.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [("code", 1.12, 0.9), ("structured", 1.25, 0.91), ("hopeless", 0.86, 0.96)],
)
def test_graphs_that_have_to_be_built_do_not_keep_drafts_away(
    kind: str, first: float, later: float
) -> None:
    """The first text pays for them. A later one is nearly as fast as the best fixed drafts."""
    cold, ours, best, plain = 0.0, 0.0, 0.0, 0.0
    for seed in range(8):
        it = h200(kind, 400)
        it.seed, controller = seed, auto(it)
        cold += simulate(it, controller)
        plan = best_fixed(replace(h200(kind, 400), young=(0, 1.0), seed=99))
        for it.seed in (seed + 20, seed + 40):
            ours += simulate(it, controller)
            of = replace(h200(kind, 400), young=(0, 1.0), seed=it.seed)
            best += simulate(of, None, plan)
            plain += simulate(of, None, PLAIN)
    assert plain / 2 / cold > first
    assert best / ours > later and plain / ours > 0.96
    assert (plain / ours > 1.2) == (kind != "hopeless")


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [("code", 1.2, 0.925), ("structured", 1.6, 0.96), ("hopeless", 0.965, 0.985)],
)
def test_where_passes_are_timed_ahead_a_first_text_is_nearly_as_fast_as_later_ones(
    kind: str, first: float, later: float
) -> None:
    """The graphs of three widths exist before it, and what they cost is known."""
    cold = ours = best = plain = 0.0
    plan = best_fixed(replace(h200(kind, 2000), young=(0, 1.0), seed=99))
    for seed in range(8):
        it = h200(kind, 256)
        it.seed, controller = seed, auto(it)
        timed = {n: it.base_s * it.law(n) for n in (2, 4, 8)}
        controller.calibrate(it.base_s, timed)
        it.built = dict.fromkeys(timed, 3)
        cold += simulate(it, controller, None, keeps=True)
        for it.seed in (seed + 20, seed + 40):
            ours += simulate(it, controller)
            of = replace(h200(kind, 256), young=(0, 1.0), seed=it.seed)
            best += simulate(of, None, plan)
            plain += simulate(of, None, PLAIN)
    assert plain / 2 / cold > first and best / ours > later


def random_world(seed: int) -> tuple[World, list[dict[str, Rates]]]:
    """Return costs and two kinds of text by chance; the controller knows none of them."""
    rng = random.Random(seed)
    base_s = math.exp(rng.uniform(math.log(1e-3), math.log(60e-3)))
    names = rng.choice([["mtp"], ["mtp", "lookup"], ["dflash", "lookup"], ["mtp", "dflash"]])
    tools = []
    for source in (tool.source for tool in (MTP, DFLASH, LOOKUP) if tool.source.name in names):
        times = base_s * math.exp(rng.gauss(0.0, 0.45))
        fixed_s = times * max(source.fixed, 0.05) if source.name != "lookup" else 2e-5
        tools.append(Tool(source, fixed_s, times * source.per_token, source.name != "lookup"))
    power, step = rng.choice([0.3, 0.5, 0.8]), rng.uniform(0.0, 0.3)
    share = rng.choice([0.0, 0.0, 0.05, 0.2, 0.5])
    miss_s = base_s / 320 * math.exp(rng.uniform(-1.2, 1.8))
    experts = Experts(40, 256, 8, miss_s * math.exp(rng.gauss(0.0, 0.4))) if share else None
    kinds = []
    for _ in range(2):
        p = rng.choice([0.2, 0.5, 0.75, 0.92])
        by_depth = tuple(max(0.02, p - 0.02 * depth) for depth in range(6))
        rates = Rates(by_depth, rng.uniform(0.3, 1.2), told=rng.uniform(0.0, 0.95))
        seldom = replace(rates, has=max(0.05, p - 0.2))
        kinds.append({name: seldom if name == "lookup" else rates for name in names})
    found = World([], tools, lambda n: n**power + (step if n > 1 else 0.0), base_s, experts,
                  share, miss_s, noise=rng.uniform(0.01, 0.08))  # fmt: skip
    return found, kinds


def test_auto_is_nearly_as_fast_as_the_best_choice_in_worlds_by_chance() -> None:
    """Later texts of 256 tokens, the second half of another kind than the first."""
    over_best, over_plain = [], []
    for seed in range(16):
        it, kinds = random_world(seed)
        controller = auto(it, DraftSettings(graph_price=2.0))
        if not it.experts:
            controller.calibrate(it.base_s, {4: it.base_s * it.law(4)})
        ours = best = plain = 0.0
        for at in range(5):
            it.texts, it.seed = [Text(256, kinds[at // 3])], at
            seconds = simulate(it, controller)
            if at:  # the first text is for learning
                ours += seconds
                best += simulate(it, None, best_fixed(replace(it, seed=99)))
                plain += simulate(it, None, PLAIN)
        over_best.append(best / ours)
        over_plain.append(plain / ours)
    assert np.mean(over_best) > 0.965 and min(over_best) > 0.87
    assert min(over_plain) > 0.955


def test_a_pause_of_the_process_does_not_end_drafting() -> None:
    it = h200("structured", 400)
    controller = auto(it)
    simulate(it, controller)
    for _ in range(3):
        controller.observe(Step("mtp", 0.5, 1, 4, 3, 3, 0, (-1,), (), 1e-3, 0.4))
    n_plain = 0
    while not controller.choose(100).source:
        controller.observe(Step("", STEP))
        n_plain += 1
    assert n_plain < 600


def test_a_draft_that_took_longer_than_its_step_says_nothing_of_passes() -> None:
    it = h200("structured", 400)
    controller = auto(it)
    simulate(it, controller)
    usual_s = controller.passes.at(4)
    for more in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5):  # one of them at least is as long as expected
        seconds = more * usual_s
        controller.observe(Step("mtp", seconds, 1, 4, 3, 3, 0, (-1,), (), 2 * seconds, 0.4))
    assert controller.passes.at(4) == usual_s


def test_passes_that_cost_far_more_than_the_law_are_given_up_soon() -> None:
    it = world([Text(1000, STRUCTURED)], "all", RESIDENT)
    it.law = lambda n_rows: 1.0 if n_rows == 1 else 12.0 + n_rows
    ours = simulate(it, auto(it))  # the first passes may be dear because graphs are built
    assert simulate(it, None, PLAIN) / ours > 0.91


def test_a_drafter_that_lies_about_its_confidence_cannot_make_text_slow() -> None:
    liar = {"mtp": Rates((0.1, 0.1), told=0.0)}
    it = world([Text(3000, liar)], "mtp", RESIDENT)
    it.noise = 0.1
    ours, plain = simulate(it, auto(it)), simulate(it, None, PLAIN)
    assert plain / ours > 0.97


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
    controller = Controller([MTP.source, DFLASH.source, LOOKUP.source], settings)
    for _ in range(20):
        assert controller.choose(1000) == expected
        controller.observe(Step(expected.source, STEP, n_rows=expected.n_draft + 1,
                                n_draft=expected.n_draft))  # fmt: skip


def test_a_draft_is_no_longer_than_the_text_may_become() -> None:
    controller = Controller([MTP.source], DraftSettings("mtp", budget=6, graph_price=2.0))
    assert controller.choose(4).n_draft == 3
    assert controller.choose(2).n_draft == 1
    assert controller.choose(1) == PLAIN
    assert controller.choose(9, without=("mtp",)) == PLAIN


def test_where_times_do_not_count_two_runs_choose_the_same() -> None:
    def chosen(noise: float) -> list[Plan]:
        controller = Controller([MTP.source, DFLASH.source], DraftSettings(is_timed=False))
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
    named = SimpleNamespace(name="dspark", max_draft=15, is_free=False)
    drafters: list[Any] = [named, SimpleNamespace(name="lookup", max_draft=16, is_free=True)]
    config = EngineConfig(spec="dflash", ddtree=True, ddtree_budget=22, ddtree_temp=0.5)
    settings = open_controller(drafters, config, 32).settings
    assert settings.spec == "dspark" and settings.is_timed
    assert settings.ddtree == DDTree(22, 0.5, True) and settings.most_rows == 23
    assert open_controller(drafters, EngineConfig(budget=1), 32).choose(9) == PLAIN
    config = EngineConfig(spec="auto", deterministic=True, draft_p_min=0.5, draft_max=4)
    settings = open_controller(drafters, config, 8).settings
    assert settings == DraftSettings("auto", 4, 0.5, max_rows=8, is_timed=False)


def shared(accept: tuple[float, ...]) -> Controller:
    """Return a controller that has learned from a text of so many accepted drafts."""
    world = World([Text(600, {"mtp": Rates(accept)})], [MTP], law)
    controller = auto(world)
    simulate(world, controller)
    return controller


def test_several_sequences_draft_as_long_as_that_pays_for_so_many() -> None:
    good, bad = shared((0.9, 0.88)), shared((0.1, 0.1))
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
    assert good.shape(plan, draft) == Shape(plan.n_draft)
