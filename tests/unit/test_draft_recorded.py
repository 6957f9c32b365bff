"""auto on a card with times that an H200 took, and with drafts that are right by chance.

What a token takes is compared with what it took with an earlier controller of four times the size,
whose numbers are recorded here, and with decoding without drafts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.recorded_drafts import Answer, Card, Cost, Trouble, engine, write

from moegraph.draft.plan import PLAIN

KINDS = ("code", "structured", "story", "hopeless")
NOISE, SLOW, VARIED = Trouble(), Trouble(slows=True), Trouble(varies=True)
ALL = Trouble(0.06, 0.01, slows=True, varies=True)


@dataclass(frozen=True)
class Case:
    """Texts of one process. n: how many; skipped: the first of them, which are for learning.

    kinds: one by chance for each text, or in turn, each for about `span` tokens. lengths: of
    texts, at least and at most. is_timed: passes were timed before the first text.
    """

    kinds: tuple[str, ...]
    n: int = 4
    skipped: int = 1
    lengths: tuple[int, int] = (256, 256)
    span: int = 0
    trouble: Trouble = NOISE
    is_timed: bool = True

    def texts(self, seed: int) -> list[Answer]:
        rng, found = random.Random(1000 + seed), []
        for at in range(self.n):
            n_tokens = rng.randint(*self.lengths)
            kinds = self.kinds if self.span else (rng.choice(self.kinds),)
            found.append(Answer(kinds, n_tokens, 100 * seed + at, self.span))
        return found


# milliseconds of a token by the share of the experts that are on the device, 24 seeds
RECORDED = [
    (Case(("code",), 1, 0), {1.0: 1.5853, 0.6: 1.994, 0.25: 3.6849}),
    (Case(("structured",), 1, 0), {1.0: 1.1185, 0.6: 1.4782, 0.25: 2.9646}),
    (Case(("story",), 1, 0), {1.0: 2.3458, 0.6: 2.7078, 0.25: 3.993}),
    (Case(("hopeless",), 1, 0), {1.0: 2.4535, 0.6: 2.6883, 0.25: 3.9699}),
    (Case(("code",)), {1.0: 1.5634, 0.6: 1.9586, 0.25: 3.5444}),
    (Case(("structured",)), {1.0: 1.0853, 0.6: 1.3994, 0.25: 2.9565}),
    (Case(("story",)), {1.0: 2.2827, 0.6: 2.6281, 0.25: 3.8726}),
    (Case(("hopeless",)), {1.0: 2.3548, 0.6: 2.6052, 0.25: 3.8636}),
    (Case(("code",), 16, 4, (30, 200)), {1.0: 1.5661, 0.25: 3.5442}),
    (Case(("hopeless",), 16, 4, (30, 200)), {1.0: 2.3688, 0.25: 3.8624}),
    (Case(("code",), trouble=SLOW), {1.0: 1.5724, 0.6: 1.9564, 0.25: 3.5557}),
    (Case(("structured",), trouble=SLOW), {1.0: 1.1007, 0.6: 1.4011}),
    (Case(("hopeless",), trouble=SLOW), {1.0: 2.3504, 0.6: 2.6097}),
    (Case(("code",), trouble=VARIED), {0.6: 1.9734, 0.25: 3.7161}),
    (
        Case(("code", "story"), lengths=(500, 500), span=60),
        {1.0: 1.9529, 0.6: 2.5021, 0.25: 3.8876},
    ),
    (
        Case(("code", "structured"), lengths=(500, 500), span=60),
        {1.0: 1.344, 0.6: 1.6726, 0.25: 3.2916},
    ),
    (Case(("structured", "hopeless"), lengths=(500, 500), span=60), {1.0: 2.2965, 0.6: 2.5855}),
    (Case(KINDS, 16, 2, (30, 400)), {1.0: 1.9676, 0.6: 2.2977, 0.25: 3.7654}),
    (Case(KINDS, 16, 2, (30, 400), trouble=ALL), {1.0: 1.9848, 0.6: 2.3343, 0.25: 3.8704}),
    (Case(("code",), 1, 0, is_timed=False), {1.0: 1.6095}),
    (Case(("hopeless",), 1, 0, is_timed=False), {1.0: 2.4225}),
]


def of_token(case: Case, share: float, n_seeds: int, *names: str, drafts: bool = True) -> float:
    """Return the milliseconds of a token. names: the drafters; look-up never has a draft."""
    cost = Cost()
    for seed in range(n_seeds):
        card = Card(share, seed, case.trouble)
        by = engine(share, *names, is_timed=case.is_timed) if drafts else PLAIN
        for at, text in enumerate(case.texts(seed)):
            write(card, text, by, ("lookup",), cost if at >= case.skipped else None)
    return cost.of_token


@pytest.mark.nightly
def test_no_case_is_slower_than_with_the_controller_before() -> None:
    found = {
        (str(case), share): ms / of_token(case, share, 24)
        for case, by_share in RECORDED
        for share, ms in by_share.items()
    }
    assert np.mean([*found.values()]) > 0.99
    assert min(found.values()) > 0.97, min(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize(
    ("case", "share", "least"),
    [
        (Case(("code",), 1, 0), 1.0, 1.41),
        (Case(("code",), 1, 0, is_timed=False), 1.0, 1.36),
        (Case(("structured",)), 0.6, 1.78),
        (Case(("code",), trouble=SLOW), 1.0, 1.4),
        (Case(("code",)), 0.25, 1.0),
        (Case(("hopeless",), 1, 0), 1.0, 0.94),
        (Case(("hopeless",)), 0.25, 0.98),
    ],
)
def test_speed_beside_decoding_without_drafts(case: Case, share: float, least: float) -> None:
    assert of_token(case, share, 4, drafts=False) / of_token(case, share, 4) > least


def test_look_up_that_never_has_a_draft_changes_nothing() -> None:
    """It is believed to be good until it has been seen."""
    for kind in ("code", "hopeless"):
        case, names = Case((kind,)), ("mtp", "dflash")
        assert of_token(case, 0.6, 2, *names, "lookup") == of_token(case, 0.6, 2, *names)
