"""auto against fixed drafts, with times that an H200 took and acceptance by a script.

Milliseconds and missing experts are medians of steps that were recorded there with random weights
of a 35B-A3B. So the drafter's confidence says nothing, and nothing is gained by judging each draft:
what is seen here is what it costs not to know the best choice.
"""

from __future__ import annotations

import math
import random
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moegraph.config import EngineConfig
from moegraph.draft.controller import Controller
from moegraph.draft.drafter import Draft
from moegraph.draft.missing import Experts
from moegraph.draft.opening import open_controller
from moegraph.draft.plan import PLAIN, Plan, Shape, Step
from moegraph.draft.scripted import ScriptedAccept
from moegraph.draft.watch import Watched

N_TOKENS = 256
RATES = {
    "code": {"mtp": (0.85, 0.72, 0.58), "dflash": (0.80, 0.62, 0.48, 0.38, 0.30, 0.24, 0.19)},
    "structured": {
        "mtp": (0.95, 0.88, 0.80), "dflash": (0.93, 0.84, 0.75, 0.66, 0.57, 0.49, 0.42),
    },
    "hopeless": {"mtp": (0.25, 0.05, 0.01), "dflash": (0.20, 0.04, 0.01, 0.0)},
}  # fmt: skip
# Milliseconds of passes and their commits by rows; with a part of the experts, those of all but the
# missing ones, 40 us each; missing experts by the share of those on the device.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
WHOLE = (2.33, 3.06, 3.4, 3.73, 4.5, 4.87, 5.68, 6.6)
PART = (2.45, 3.2, 3.6, 3.95, 4.7, 5.1, 5.9, 6.8)
LACKED = {0.25: (36, 69, 102, 134, 198, 245, 330, 420), 0.6: (3, 7, 9, 12, 17, 21, 30, 40)}
# The first pass of a width: milliseconds more, without graphs and with graphs that were built.
UNBUILT, BUILT = 20.0, 5.0
READY = (2, 4, 8, 12)
LENGTHS = {"mtp": (1, 2, 3, 4, 5, 7), "dflash": (1, 2, 3, 5, 7, 11, 15)}


class Card:
    """What steps cost, and which drafts are right. share: of the experts, those on the device."""

    def __init__(self, kind: str, share: float, seed: int) -> None:
        self.share, self.rng = share, random.Random(seed)
        self.scripts = {name: ScriptedAccept(rates, seed) for name, rates in RATES[kind].items()}
        self.seen: set[int] = set()

    def jitter(self) -> float:
        return math.exp(self.rng.gauss(0.0, 0.03))

    def pass_s(self, n_rows: int, builds: bool) -> tuple[float, int]:
        if self.share == 1.0:
            ms, n_missing = float(np.interp(n_rows, ROWS, WHOLE)), 0
        else:
            mean = float(np.interp(n_rows, ROWS, LACKED[self.share]))
            n_missing = max(0, round(self.rng.gauss(mean, 1.5 * math.sqrt(mean))))
            ms = float(np.interp(n_rows, ROWS, PART)) + 0.04 * n_missing
        ms *= self.jitter()
        if builds and n_rows > 1 and n_rows not in self.seen:
            self.seen.add(n_rows)
            ready = 0.0 if self.share == 1.0 else BUILT
            ms += ready if n_rows in READY else UNBUILT
        return ms / 1e3, n_missing

    def draft_s(self, source: str, n: int) -> float:
        of_mtp = 0.07 + 0.4 * n + (0.25 if self.share < 1.0 else 0.0)
        return (of_mtp if source == "mtp" else 1.08 + 0.035 * n) / 1e3 * self.jitter()


def text(card: Card, controller: Controller | None, fixed: Plan = PLAIN) -> float:
    """Return the seconds of a text, by a controller or by one plan."""
    seconds, left = 0.0, N_TOKENS
    if controller:
        controller.begin()
    while left > 0:
        plan = controller.choose(left, ("lookup",)) if controller else fixed
        step = _step(card, controller, plan if left > 1 else PLAIN, left)
        seconds += step.seconds
        left -= step.n_tokens
        if controller:
            controller.observe(step)
    return seconds


def _step(card: Card, controller: Controller | None, plan: Plan, n_left: int) -> Step:
    if not plan.source:
        seconds, n_missing = card.pass_s(1, True)
        return Step("", seconds, n_missing=n_missing)
    n, draft_s = plan.n_draft, card.draft_s(plan.source, plan.n_draft)
    n_right, shape, log_p = card.scripts[plan.source](n), Shape(n), tuple[float, ...]()
    if controller:
        log_p = tuple(math.log(0.3 * card.rng.random() + 1e-4) for _ in range(n))
        draft = Draft(np.zeros((n, 3), np.int32), np.repeat(np.array([log_p], np.float32).T, 3, 1))
        if plan.is_watched:
            ranks = (0,) * n_right + (-1,) * (n_right < n)
            controller.observe_watched(Watched(plan.source, ranks, log_p[: len(ranks)]))
        shape = Shape() if plan.is_watched else controller.shape(plan, draft)
    seconds, n_missing = card.pass_s(shape.n_rows, controller is not None)
    n_accepted = min(n_right, shape.n_spine)
    ranks = (0,) * n_accepted + (-1,) * (n_accepted < shape.n_spine)
    return Step(
        plan.source, seconds + draft_s, min(n_accepted + 1, n_left), shape.n_rows, n,
        shape.n_spine, n_accepted, ranks, log_p[: shape.n_spine], draft_s, seconds, 0.0, n_missing,
        plan.is_trial,
    )  # fmt: skip


def engine(share: float) -> Controller:
    """Return a controller as an engine opens it on that card."""
    most = {"mtp": 15, "dflash": 15, "lookup": 16}
    drafters: list[Any] = [SimpleNamespace(name=name, max_draft=n) for name, n in most.items()]
    experts = Experts(40, 256, 8, 43e-6) if share < 1.0 else None
    controller = open_controller(drafters, EngineConfig(spec="auto"), 16, experts)
    if experts:
        controller.widths.have(READY)
    else:
        controller.calibrate(2.34e-3, {2: 3.14e-3, 4: 3.96e-3, 8: 5.2e-3, 12: 6.0e-3})
    return controller


def best_fixed(kind: str, share: float) -> float:
    """Return the seconds of a text with the best fixed draft, or without if that is faster."""
    plans = [Plan(name, n) for name, lengths in LENGTHS.items() for n in lengths]
    costs = []
    for plan in (PLAIN, *plans):
        card = Card(kind, share, 9)
        costs.append(statistics.mean(text(card, None, plan) for _ in range(16)))
    return min(costs)


@pytest.mark.parametrize(
    ("share", "kind", "first", "later"),
    [
        (1.0, "code", 0.93, 0.975),
        (1.0, "structured", 0.95, 0.98),
        (1.0, "hopeless", 0.955, 0.985),
        (0.6, "code", 0.87, 0.97),
        (0.6, "structured", 0.89, 0.98),
        (0.6, "hopeless", 0.94, 0.985),
        (0.25, "code", 0.91, 0.975),
        (0.25, "structured", 0.92, 0.97),
        (0.25, "hopeless", 0.965, 0.99),
    ],
)
def test_auto_is_as_fast_as_the_best_fixed_drafts(
    share: float, kind: str, first: float, later: float
) -> None:
    """The first text is for learning; then three of the same kind."""
    firsts, laters = [], []
    for seed in range(10):
        card, controller = Card(kind, share, seed), engine(share)
        firsts.append(text(card, controller))
        laters += [text(card, controller) for _ in range(3)]
    best = best_fixed(kind, share)
    assert best / statistics.mean(firsts) > first
    assert best / statistics.mean(laters) > later
