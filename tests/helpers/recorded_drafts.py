"""A card whose steps take what an H200 took, and texts whose drafts are right by chance.

Milliseconds and missing experts are medians of steps that were recorded there with random weights
of a 35B-A3B. The drafter's confidence says nothing, so nothing is gained by judging each draft.
What a way of drafting costs is what its steps take without noise, beside the tokens that they are
expected to give: so neither luck nor the noise of the machine counts, only what was chosen.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from helpers.scripted_drafts import ScriptedDrafter
from moegraph.config import EngineConfig
from moegraph.draft.controller import Controller, open_controller
from moegraph.draft.drafter import Draft
from moegraph.draft.lookup import LookUp
from moegraph.draft.plan import PLAIN, Plan, Step
from moegraph.experts.cost import Experts

# How often the first, second, ... token is accepted; fitted to what others measured.
ACCEPTED = {
    "code": {"mtp": (0.85, 0.72, 0.58), "dflash": (0.80, 0.62, 0.48, 0.38, 0.30, 0.24, 0.19)},
    "structured": {
        "mtp": (0.95, 0.88, 0.80), "dflash": (0.93, 0.84, 0.75, 0.66, 0.57, 0.49, 0.42),
    },
    "story": {"mtp": (0.62, 0.34, 0.19), "dflash": (0.50, 0.20, 0.08, 0.04, 0.02, 0.01)},
    "hopeless": {"mtp": (0.25, 0.05, 0.01), "dflash": (0.20, 0.04, 0.01)},
}  # fmt: skip
# Milliseconds of passes and their commits by rows; with a part of the experts, those of all but the
# missing ones, 40 us each; missing experts by the share of those on the device.
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
_WHOLE = (2.33, 2.95, 3.46, 3.66, 4.5, 4.87, 5.75, 6.6)
_PART = (2.4, 3.35, 3.75, 3.95, 4.8, 5.25, 6.3, 7.2)
_LACKED = {0.25: (36, 69, 102, 134, 198, 245, 330, 420), 0.6: (4.6, 9, 12, 16, 24, 30, 42, 54)}
_MISS_MS = 0.04
# Milliseconds that a pass of one row takes longer if something was drafted before it, in this step
# or the last.
_LONE = 0.15
# Milliseconds that the first two launches of a graph take longer: of a pass without graphs and of
# one whose graphs were built, and of a commit.
_UNBUILT, _BUILT, _COMMIT = (25.0, 6.0), (4.5, 6.0), (3.5, 1.3)
# Rows of passes whose graphs are built before the first text: if no experts are missing, and else.
_READY, _READY_PART = (2, 4, 8, 12), (4, 8)


def _by_rows(points: Sequence[float]) -> list[float]:
    return np.interp(range(_ROWS[-1] + 1), _ROWS, points).tolist()


_MS = {share: _by_rows(_WHOLE if share == 1.0 else _PART) for share in (1.0, 0.6, 0.25)}
_MISSING = {share: _by_rows(points) for share, points in _LACKED.items()}


def _ready(share: float) -> tuple[int, ...]:
    return _READY if share == 1.0 else _READY_PART


@dataclass(frozen=True)
class Trouble:
    """What makes times differ. sigma: of a time's logarithm. pauses: how many of all steps.

    slows: for half a second out of two, other programs make all three times as slow at most.
    varies: how many experts are missing changes with the text.
    """

    sigma: float = 0.03
    pauses: float = 0.003
    slows: bool = False
    varies: bool = False


@dataclass
class Card:
    """What steps take. share: of the experts, those on the device. builds: graphs are new.

    is_warm: loading launched the graphs of usual passes.
    """

    share: float
    seed: int
    trouble: Trouble = field(default_factory=Trouble)
    builds: bool = True
    is_warm: bool = True

    def __post_init__(self) -> None:
        self._rng, self._topics = random.Random(self.seed), random.Random(self.seed)
        self._launched = Counter[Any]()
        self._told = dict.fromkeys(ACCEPTED["code"], 0)
        self._n_tokens = 0
        self._since_draft = 2  # passes
        self._s = self._until_s = self._topic = 0.0
        self._factor = 1.0

    def _noise(self) -> float:
        found, rng = math.exp(self._rng.gauss(0.0, self.trouble.sigma)), self._rng
        while self.trouble.slows and self._s >= self._until_s:
            self._factor = 1.0 if self._factor > 1.0 else rng.uniform(1.0, 3.0)
            self._until_s += rng.expovariate(1.0 / (1.5 if self._factor == 1.0 else 0.5))
        return found * self._factor

    def read(self, n_tokens: int) -> None:
        """Note that the text went on."""
        self._n_tokens += n_tokens
        for _ in range(n_tokens if self.trouble.varies else 0):
            self._topic = 0.985 * self._topic + self._topics.gauss(0.0, 0.06)

    def step(self, n_rows: int, n_taken: int) -> tuple[float, float, int]:
        """Return the milliseconds of a pass and its commit, those with noise, missing experts."""
        ms, n_missing = _MS[self.share][n_rows], 0
        if self.share < 1.0:
            mean = _MISSING[self.share][n_rows] * math.exp(self._topic)
            n_missing = max(0, round(self._rng.gauss(mean, 1.5 * math.sqrt(mean))))
            ms += _MISS_MS * n_missing
        ms += _LONE * (n_rows == 1 and self._since_draft < 2)
        self._since_draft += 1
        new_ms = 0.0
        if n_rows > 1:
            self._since_draft = 1
            ready = _ready(self.share)
            built = _BUILT if n_rows in ready else _UNBUILT
            if not (self.is_warm and n_rows in ready):
                new_ms += self._launch(("rows", n_rows), built)
            if not (self.is_warm and n_taken <= ready[-1]):
                new_ms += self._launch(("commit", n_taken), _COMMIT)
        noisy_ms = ms * self._noise() + new_ms
        if self._rng.random() < self.trouble.pauses:
            noisy_ms += _WHOLE[0] * self._rng.uniform(1.5, 15.0)
        self._s += noisy_ms / 1e3
        return ms + new_ms, noisy_ms, n_missing

    def _launch(self, graph: Any, first: tuple[float, float]) -> float:
        """Return what a launch takes longer because its graph is new."""
        n, self._launched[graph] = self._launched[graph], self._launched[graph] + 1
        return first[n] if self.builds and n < len(first) else 0.0

    def draft(self, source: str, n: int) -> tuple[float, float]:
        """Return the milliseconds of a draft, and those with noise."""
        n_told, self._told[source] = self._n_tokens - self._told[source], self._n_tokens
        ms = 0.97 + 0.03 * n
        if source == "mtp":
            ms = 0.35 + (0.27 if self.share == 1.0 else 0.37) * n
        ms += 0.02 * min(n_told, 10)
        self._since_draft = 0
        return ms, ms * self._noise()


class Answer:
    """A text: of one kind, or of several in turn, each for about `span` tokens."""

    def __init__(self, kinds: Sequence[str], n_tokens: int, seed: int, span: int = 0) -> None:
        self._rng, self._kinds, self._span = random.Random(seed), kinds, span
        self.n_tokens, self._left = n_tokens, 0
        self._kind = self._rng.choice(kinds)
        self._turn()

    def _turn(self) -> None:
        others = [kind for kind in self._kinds if kind != self._kind]
        self._kind = self._rng.choice(others or self._kinds)
        self._left = self._rng.randint(self._span // 2, 3 * self._span // 2) or self.n_tokens

    def read(self, n_tokens: int) -> None:
        """Note that the text went on."""
        self._left -= n_tokens
        if self._left <= 0:
            self._turn()

    def rates(self, source: str, n: int) -> list[float]:
        """Return how often each token of a draft is right, if those before it are."""
        accepted = ACCEPTED[self._kind][source]
        found = [p / before for p, before in zip(accepted, (1.0, *accepted))]
        return [found[min(depth, len(found) - 1)] for depth in range(n)]

    def n_right(self, source: str, n: int) -> int:
        """Return how many tokens of a draft are right."""
        misses = (at for at, p in enumerate(self.rates(source, n)) if self._rng.random() >= p)
        return next(misses, n)

    def expected(self, source: str, n: int) -> float:
        """Return the tokens that verifying a draft gives on average."""
        reach = total = 1.0
        for p in self.rates(source, n):
            reach *= p
            total += reach
        return total


@dataclass
class Cost:
    """Milliseconds, and the tokens that are expected for them."""

    ms: float = 0.0
    tokens: float = 0.0

    @property
    def of_token(self) -> float:
        return self.ms / self.tokens


def write(
    card: Card, answer: Answer, by: Controller | Plan, absent: Sequence[str] = (),
    cost: Cost | None = None,
) -> None:  # fmt: skip
    """Write an answer as a controller or a plan says, and add what that costs.

    absent: drafters that never have a draft.
    """
    cost, left = cost or Cost(), answer.n_tokens
    controller = by if isinstance(by, Controller) else None
    while left > 0:
        plan = by.choose(left, absent) if isinstance(by, Controller) else by
        step, n_spine, ms = _step(card, answer, controller, plan if left > 1 else PLAIN)
        step = replace(step, n_tokens=min(step.n_tokens, left))
        cost.ms += ms
        cost.tokens += answer.expected(step.source, min(n_spine, left - 1)) if n_spine else 1.0
        left -= step.n_tokens
        answer.read(step.n_tokens)
        card.read(step.n_tokens)
        if controller:
            controller.observe(step)


def _step(
    card: Card, answer: Answer, controller: Controller | None, plan: Plan
) -> tuple[Step, int, float]:
    """Return the step, the tokens verified, and milliseconds."""
    if not plan.source:
        ms, noisy_ms, n_missing = card.step(1, 1)
        return Step("", noisy_ms / 1e3, n_missing=n_missing), 0, ms
    source, n, rng = plan.source, plan.n_draft, card._rng
    draft_ms, noisy_draft_ms = card.draft(source, n)
    n_right, n_spine, log_p = answer.n_right(source, n), n, tuple[float, ...]()
    if controller:
        log_p = tuple(math.log(0.3 * rng.random() + 1e-4) for _ in range(n))
        draft = Draft(np.zeros((n, 3), np.int32), np.repeat(np.array([log_p], np.float32).T, 3, 1))
        n_spine = controller.n_spine(plan, draft)
    n_accepted = min(n_right, n_spine)
    ms, noisy_ms, n_missing = card.step(n_spine + 1, n_accepted + 1)
    step = Step(
        source, (noisy_ms + noisy_draft_ms) / 1e3, n_accepted + 1, n_spine + 1, n, n_spine,
        n_accepted, (0,) * n_accepted + (-1,) * (n_accepted < n_spine),
        log_p[:n_spine], noisy_draft_ms / 1e3, noisy_ms / 1e3, 0.0, n_missing, plan.is_trial,
    )  # fmt: skip
    return step, n_spine, ms + draft_ms


def engine(share: float, *names: str, is_timed: bool = True, spec: str = "auto") -> Controller:
    """Return a controller as an engine opens it on that card.

    is_timed: passes were timed before the first text, as they are if no experts are missing.
    """
    ready = (2, 4, 8, 16) if spec == "lookup" else _READY
    drafters = [
        LookUp() if name == "lookup" else ScriptedDrafter([], 9, name=name, max_draft=15)
        for name in names or ("mtp", "dflash")
    ]
    experts = Experts(40, 256, 8, 43e-6) if share < 1.0 else None
    controller = open_controller(drafters, EngineConfig(spec=spec), 16, experts)
    if experts:
        controller.have(_READY_PART)
    elif is_timed:
        times = {n: _MS[1.0][n] / 1e3 for n in ready}
        controller.calibrate(_MS[1.0][1] / 1e3, times)
    return controller
