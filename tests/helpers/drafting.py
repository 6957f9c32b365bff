"""A model of drafting, for tests of the controller: texts, drafters and costs, all made up.

No time passes: a step takes the seconds that the model says.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moegraph.draft.controller import Controller
from moegraph.draft.drafter import Draft
from moegraph.draft.estimates import Experts
from moegraph.draft.plan import PLAIN, DraftSettings, Plan, Shape, Source, Step

LENGTHS = (1, 2, 3, 5, 7, 11, 15)


@dataclass(frozen=True)
class Rates:
    """How a text suits a drafter: acceptance by depth if all before was accepted.

    spread: of the logit from step to step. has: how often there is a draft at all. told: how well
    the drafter knows its own rate in a step, 0 to 1. beside: rate of ranks 1 and 2 after a miss.
    """

    by_depth: tuple[float, ...]
    spread: float = 0.8
    has: float = 1.0
    told: float = 0.8
    beside: tuple[float, float] = (0.37, 0.10)

    def at(self, depth: int) -> float:
        return self.by_depth[min(depth, len(self.by_depth) - 1)]


@dataclass(frozen=True)
class Text:
    """A stretch of text: its length in tokens, and how it suits each drafter, by name."""

    n_tokens: int
    rates: dict[str, Rates]


@dataclass(frozen=True)
class Tool:
    """A drafter: seconds of a draft, and what the controller believes of it."""

    source: Source
    fixed_s: float
    token_s: float
    tells: bool = True  # it gives probabilities


@dataclass
class World:
    """What steps cost. law: factor of a verify pass of w rows, with all experts resident."""

    texts: Sequence[Text]
    tools: Sequence[Tool]
    law: Callable[[int], float]
    base_s: float = 2.4e-3
    experts: Experts | None = None
    share: float = 0.0  # of the distinct experts, those that are missing
    true_miss_s: float = 0.0
    noise: float = 0.03
    growth: float = 0.0  # of every step's time, over the whole text
    graph_s: float = 0.0  # the first pass of a width takes this much longer
    young: tuple[int, float] = (
        0,
        1.0,
    )  # so many first passes of a width take so many times as long
    seed: int = 1
    built: dict[int, int] = field(default_factory=dict)  # passes of each width

    def pass_s(self, n_rows: int, rng: random.Random, at: float) -> tuple[float, int]:
        n_missing, lack = 0, 0.0
        if self.experts and self.share:
            mean = self.share * self.experts.distinct(n_rows)
            n_missing = max(0, round(rng.gauss(mean, math.sqrt(mean))))
            lack = n_missing * self.true_miss_s
        seconds = (self.base_s * self.law(n_rows) + lack) * (1.0 + self.growth * at)
        seconds *= math.exp(rng.gauss(0.0, self.noise))
        if rng.random() < 0.003:
            seconds += 3 * self.base_s  # the process was paused
        if n_rows > 1:
            n = self.built[n_rows] = self.built.get(n_rows, 0) + 1
            seconds += self.graph_s if n == 1 else 0.0
            seconds *= self.young[1] if n <= self.young[0] else 1.0
        return seconds, n_missing


def simulate(
    world: World, controller: Controller | None, fixed: Plan | None = None, keeps: bool = False
) -> float:
    """Return the seconds of the texts: planned by a controller, or by one plan for all steps.

    keeps: graphs exist that the controller has not used yet.
    """
    rng = random.Random(world.seed)
    if not keeps and (not controller or not controller.stats.steps):  # else the engine is the same
        world.built.clear()
    tools = {tool.source.name: tool for tool in world.tools}
    total = sum(text.n_tokens for text in world.texts)
    seconds, done = 0.0, 0
    if controller:
        controller.begin()
    for text in world.texts:
        end = done + text.n_tokens
        while done < end:
            step = _step(world, text, tools, controller, fixed, rng, total - done, done / total)
            seconds += step.seconds
            done += step.n_tokens  # a few more than there are at the end do not matter
            if controller:
                controller.observe(step)
    return seconds


def _step(
    world: World, text: Text, tools: dict[str, Tool], controller: Controller | None,
    fixed: Plan | None, rng: random.Random, n_left: int, at: float,
) -> Step:  # fmt: skip
    without: tuple[str, ...] = ()
    drafter_s = 0.0
    while True:
        plan = controller.choose(n_left, without) if controller else fixed or PLAIN
        if not plan.source or plan.n_draft < 1:
            return _plain(world, rng, at, "", drafter_s)
        tool, rates = tools[plan.source], text.rates[plan.source]
        n_draft = plan.n_draft
        if n_left <= 1:
            return _plain(world, rng, at, "", drafter_s)
        if rng.random() < rates.has:
            break
        if not controller:
            return _plain(world, rng, at, plan.source, drafter_s)
        without = (*without, plan.source)
    drafter_s = (tool.fixed_s + n_draft * tool.token_s) * (1.0 + world.growth * at)
    z = rng.gauss(0.0, rates.spread)
    true = [_sigmoid(_logit(rates.at(d)) + z + rng.gauss(0, 0.3)) for d in range(n_draft)]
    log_p = None
    if tool.tells:
        blur = rates.spread * math.sqrt(1 - rates.told**2) + 0.2
        said = [_sigmoid(_logit(p) * 1.2 + 0.3 + rng.gauss(0, blur)) for p in true]
        log_p = np.log(np.array(said, dtype=np.float32))[:, None]
    draft = Draft(np.zeros((n_draft, 1), np.int32), log_p)
    shape = controller.shape(plan, draft) if controller else Shape(n_draft)
    if shape.n_spine == 0:
        return _plain(world, rng, at, plan.source, drafter_s, n_draft, plan.is_trial)
    return _verify(world, rates, rng, at, plan, shape, true, draft, drafter_s)


def _plain(
    world: World, rng: random.Random, at: float, source: str, drafter_s: float, n_draft: int = 0,
    is_trial: bool = False,
) -> Step:  # fmt: skip
    seconds, n_missing = world.pass_s(1, rng, at)
    return Step(source, seconds + drafter_s, n_draft=n_draft, drafter_s=drafter_s,
                n_missing=n_missing, is_trial=is_trial)  # fmt: skip


def _verify(
    world: World, rates: Rates, rng: random.Random, at: float, plan: Plan, shape: Shape,
    true: list[float], draft: Draft, drafter_s: float,
) -> Step:  # fmt: skip
    seconds, n_missing = world.pass_s(shape.n_rows, rng, at)
    ranks, accepted = _accept(rates, rng, shape, true, plan)
    log_p = () if draft.log_p is None else tuple(draft.log_p[: shape.n_spine, 0].tolist())
    return Step(
        plan.source, seconds + drafter_s, accepted + 1, shape.n_rows, plan.n_draft, shape.n_spine,
        accepted, ranks, log_p, drafter_s, seconds, 0.0, n_missing, plan.is_trial,
    )  # fmt: skip


def _accept(
    rates: Rates, rng: random.Random, shape: Shape, true: list[float], plan: Plan
) -> tuple[tuple[int, ...], int]:
    """Return the ranks of what the target draws, and how many rows it accepts."""
    ranks: list[int] = []
    accepted = 0
    for depth in range(shape.n_spine):
        if rng.random() < true[depth]:
            ranks.append(0)
            accepted += 1
            continue
        drawn = rng.random()
        first, second = rates.beside
        rank = 1 if drawn < first else 2 if drawn < first + second else -1
        if plan.n_top == 1:
            rank = -1
        ranks.append(rank)
        n_leaves = shape.leaves[depth] if depth < len(shape.leaves) else 0
        accepted += 1 <= rank <= n_leaves
        break
    return tuple(ranks), accepted


def best_fixed(world: World) -> Plan:
    """Return the best single plan for all steps, plain decoding included."""
    plans = [Plan()]
    for tool in world.tools:
        plans += [Plan(tool.source.name, n) for n in LENGTHS if n <= tool.source.max_draft]
    return min(plans, key=lambda plan: simulate(world, None, plan))


def auto(world: World, settings: DraftSettings | None = None) -> Controller:
    """Return a controller of the world's drafters."""
    sources = [tool.source for tool in world.tools]
    return Controller(sources, settings or DraftSettings(), world.experts)


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
