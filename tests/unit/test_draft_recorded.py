"""auto against fixed drafts, with times that an H200 took and drafts that are right by chance.

The best fixed choice is that of all lengths of both drafters for the texts of a case, or none. It
knows the texts, so requests of several kinds are where auto can be faster.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import pytest
from helpers.recorded_drafts import FIXED, Answer, Card, Cost, Trouble, engine, write

from moegraph.draft.plan import PLAIN, Plan

KINDS = ("code", "structured", "story", "hopeless")
NOISE, SLOW, VARIED = Trouble(), Trouble(slows=True), Trouble(varies=True)
ALL = Trouble(0.06, 0.01, slows=True, varies=True)
N_SEEDS = 6


@dataclass(frozen=True)
class Case:
    """Texts of one process. n: how many; skipped: the first of them, which are for learning.

    kinds: one by chance for each text, or in turn, each for about `span` tokens. lengths: of
    texts, at least and at most.
    """

    kinds: tuple[str, ...]
    n: int = 4
    skipped: int = 1
    lengths: tuple[int, int] = (256, 256)
    span: int = 0
    trouble: Trouble = NOISE

    def texts(self, seed: int) -> list[Answer]:
        rng, found = random.Random(1000 + seed), []
        for at in range(self.n):
            n_tokens = rng.randint(*self.lengths)
            kinds = self.kinds if self.span else (rng.choice(self.kinds),)
            found.append(Answer(kinds, n_tokens, 100 * seed + at, self.span))
        return found


@cache
def fixed(case: Case, share: float, plan: Plan, n_seeds: int) -> float:
    """Return the milliseconds of a token. In first texts, graphs are new for fixed drafts too."""
    cost, varies = Cost(), case.trouble.varies
    for seed in range(n_seeds):
        card = Card(share, seed, Trouble(0.0, 0.0, varies=varies), builds=case.skipped == 0)
        for at, text in enumerate(case.texts(seed)):
            if at >= case.skipped:
                write(card, text, plan, (), cost)
            else:
                card.read(text.n_tokens)
    return cost.of_token


def speeds(case: Case, share: float, *names: str, is_timed: bool = True) -> tuple[float, float]:
    """Return the speed of auto over that of the best fixed choice, and over that without drafts.

    names: the drafters; look-up never has a draft.
    """
    cost = Cost()
    for seed in range(N_SEEDS):
        card, controller = Card(share, seed, case.trouble), engine(share, *names, is_timed=is_timed)
        for at, text in enumerate(case.texts(seed)):
            write(card, text, controller, ("lookup",), cost if at >= case.skipped else None)
    plain = fixed(case, share, PLAIN, N_SEEDS)
    likely = sorted(FIXED, key=lambda plan: fixed(case, share, plan, 2))[:2]
    best = min(plain, *(fixed(case, share, plan, N_SEEDS) for plan in likely))
    return best / cost.of_token, plain / cost.of_token


# of the experts, those on the device: speed over the best fixed choice, and over no drafts
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("code", {1.0: (0.93, 1.41), 0.6: (0.945, 1.26), 0.25: (0.89, 0.99)}),
        ("structured", {1.0: (0.9, 1.97), 0.6: (0.91, 1.7), 0.25: (0.95, 1.24)}),
        ("story", {1.0: (0.925, 0.97), 0.6: (0.93, 0.93), 0.25: (0.935, 0.935)}),
        ("hopeless", {1.0: (0.94, 0.94), 0.6: (0.95, 0.95), 0.25: (0.955, 0.955)}),
    ],
)
def test_the_first_text_of_a_process(kind: str, expected: dict[float, tuple[float, float]]) -> None:
    for share, least in expected.items():
        found = speeds(Case((kind,), 1, 0), share)
        assert found[0] > least[0] and found[1] > least[1], (share, found)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(("code",)), {1.0: (0.97, 1.46), 0.6: (0.975, 1.3), 0.25: (0.91, 1.01)}),
        (Case(("structured",)), {1.0: (0.96, 2.08), 0.6: (0.975, 1.82), 0.25: (0.975, 1.28)}),
        (Case(("story",)), {1.0: (0.955, 1.0), 0.6: (0.97, 0.97), 0.25: (0.975, 0.975)}),
        (Case(("hopeless",)), {1.0: (0.98, 0.98), 0.6: (0.98, 0.98), 0.25: (0.98, 0.98)}),
        (Case(("code",), 16, 4, (30, 200)), {1.0: (0.975, 1.46), 0.25: (0.955, 1.06)}),
        (Case(("hopeless",), 16, 4, (30, 200)), {1.0: (0.97, 0.97), 0.25: (0.975, 0.975)}),
    ],
)
def test_later_texts_of_a_kind(case: Case, expected: dict[float, tuple[float, float]]) -> None:
    for share, least in expected.items():
        found = speeds(case, share)
        assert found[0] > least[0] and found[1] > least[1], (share, found)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            Case(("code",), trouble=SLOW),
            {1.0: (0.96, 1.45), 0.6: (0.965, 1.29), 0.25: (0.95, 1.06)},
        ),
        (Case(("structured",), trouble=SLOW), {1.0: (0.955, 2.08), 0.6: (0.975, 1.82)}),
        (Case(("hopeless",), trouble=SLOW), {1.0: (0.98, 0.98), 0.6: (0.98, 0.98)}),
        (Case(("code",), trouble=VARIED), {0.6: (0.97, 1.29), 0.25: (0.92, 1.02)}),
    ],
)
def test_other_programs_and_the_routing_change_what_steps_cost(
    case: Case, expected: dict[float, tuple[float, float]]
) -> None:
    for share, least in expected.items():
        found = speeds(case, share)
        assert found[0] > least[0] and found[1] > least[1], (share, found)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("code", "story"), {1.0: (0.93, 1.13), 0.6: (0.93, 1.01), 0.25: (0.965, 0.965)}),
        (("code", "structured"), {1.0: (0.945, 1.67), 0.6: (0.93, 1.46), 0.25: (0.955, 1.13)}),
        (("structured", "hopeless"), {1.0: (0.98, 0.98), 0.6: (0.97, 0.97)}),
    ],
)
def test_a_text_of_two_kinds_in_turn(
    kinds: tuple[str, ...], expected: dict[float, tuple[float, float]]
) -> None:
    for share, least in expected.items():
        found = speeds(Case(kinds, lengths=(500, 500), span=60), share)
        assert found[0] > least[0] and found[1] > least[1], (share, found)


@pytest.mark.parametrize("trouble", [NOISE, ALL])
def test_requests_of_all_kinds_need_no_fixed_choice(trouble: Trouble) -> None:
    for share, least in {1.0: 1.1, 0.6: 1.11, 0.25: 1.0}.items():
        found = speeds(Case(KINDS, 16, 2, (30, 400), trouble=trouble), share)
        assert min(found) > least, (share, found)


def test_a_start_without_any_measurement() -> None:
    assert speeds(Case(("code",), 1, 0), 1.0, is_timed=False)[1] > 1.36
    assert speeds(Case(("hopeless",), 1, 0), 1.0, is_timed=False)[1] > 0.955


def test_look_up_that_never_has_a_draft_changes_nothing() -> None:
    """It is believed to be good until it has been seen."""
    for kind in ("code", "hopeless"):
        case, names = Case((kind,)), ("mtp", "dflash")
        assert speeds(case, 0.6, *names, "lookup") == speeds(case, 0.6, *names)
