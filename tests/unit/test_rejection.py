"""Speculative sampling by rejection: the text has the target's distribution."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from moegraph.draft.drafter import Draft, Race
from moegraph.draft.race import Odds, judge, offer, offered_race
from moegraph.sampling import Sampler, SamplingParams, gumbel

N_VOCAB, DEPTH = 6, 3
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": OFF,
    "warm": {**OFF, "temperature": 1.7},
    "top-k": {**OFF, "top_k": 4},
    "top-p": {**OFF, "top_p": 0.8},
    "penalties": {**OFF, "presence_penalty": 1.5, "repeat_last_n": 8},
}


class Toy:
    """A target and a drafter whose next token depends on the last one only.

    closeness: of the drafter's logits to the target's, 0 to 1.
    """

    def __init__(self, closeness: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.target = (1.5 * rng.standard_normal((N_VOCAB, N_VOCAB))).astype(np.float32)
        noise = 1.5 * rng.standard_normal((N_VOCAB, N_VOCAB))
        mixed = closeness * self.target + (1 - closeness) * noise
        self.log_q = mixed - np.log(np.exp(mixed).sum(axis=1, keepdims=True))

    def draft(self, anchor: int, race: Race) -> Draft:
        """Return a draft that follows the winners of a race, as a drafter makes it."""
        tokens, log_p = [], []
        for depth in range(DEPTH):
            log_q = self.log_q[anchor]
            won = drawn_of(log_q / race.params.temperature, race.key(depth))
            order = [won, *(t for t in np.argsort(-log_q).tolist() if t != won)]
            tokens.append(order)
            log_p.append(log_q[order])
            anchor = won
        return Draft(np.array(tokens, np.int32), np.array(log_p, np.float32))

    def text(self, params: SamplingParams, drafts: bool, p_min: float) -> tuple[int, ...]:
        """Return the first DEPTH tokens after token 0."""
        sampler, text, offered = Sampler(params, N_VOCAB), [0], list[Odds]()
        sampler.accept(0)
        while len(text) <= DEPTH:
            if drafts and not offered:
                position = sampler.position
                race = Race(params, lambda n, at=position: sampler.key_at(at + n))
                offered = list(offer(self.draft(text[-1], offered_race(race)), race, p_min)[1])
            logits = self.target[text[-1]]
            if not offered:
                token = sampler.sample(logits)
            else:
                odds = offered.pop(0)
                token = judge(odds, *sampler.distribution(logits), sampler.key)
                offered = offered if token == odds.token else []
            sampler.accept(token)
            text.append(token)
        return tuple(text[1:])

    def expected(self, params: SamplingParams) -> dict[tuple[int, ...], float]:
        """Return the probability of every text."""
        found: dict[tuple[int, ...], float] = {}
        for text in itertools.product(range(N_VOCAB), repeat=DEPTH):
            sampler, p = Sampler(params, N_VOCAB), 1.0
            sampler.accept(0)
            for last, token in zip((0, *text), text):
                ids, given = sampler.distribution(self.target[last])
                p *= float(given[ids == token].sum())
                sampler.accept(token)
            found[text] = p
        return found


def drawn_of(logits: np.ndarray, key: int) -> int:
    return int(np.argmax(logits + gumbel(key, np.arange(len(logits)))))


def chi_square(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """Return how many standard deviations the statistic lies above its mean."""
    n, seen, wanted = sum(counts.values()), [0.0], [0.0]
    for text, p in sorted(expected.items(), key=lambda item: item[1]):
        if wanted[-1] >= 8:  # rare texts are counted together
            seen.append(0.0)
            wanted.append(0.0)
        seen[-1] += counts.get(text, 0)
        wanted[-1] += n * p
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, wanted) if b)
    freedom = len(wanted) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize(
    ("closeness", "p_min", "n_texts"), [(0.0, 0.0, 400), (0.6, 0.0, 1600), (0.6, 0.5, 800),
                                        (1.0, 0.0, 400)],
)  # fmt: skip
@pytest.mark.parametrize("name", SAMPLERS)
def test_texts_have_the_targets_distribution(
    name: str, closeness: float, p_min: float, n_texts: int
) -> None:
    toy = Toy(closeness)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(n_texts):
        text = toy.text(SamplingParams(**SAMPLERS[name], seed=seed), True, p_min)
        counts[text] = counts.get(text, 0) + 1
    expected = toy.expected(SamplingParams(**SAMPLERS[name]))
    assert sum(expected.values()) == pytest.approx(1.0)
    assert all(expected[text] > 0 for text in counts)
    assert abs(chi_square(counts, expected)) < 4.5


def test_the_statistic_notices_texts_of_the_drafter() -> None:
    """Accepting everything gives the drafter's distribution, which is another one."""
    toy = Toy(0.6)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(1500):
        params = SamplingParams(**OFF, seed=seed)
        sampler, text = Sampler(params, N_VOCAB), [0]
        for position in range(DEPTH):
            text.append(drawn_of(toy.log_q[text[-1]], sampler.key_at(position)))
        counts[tuple(text[1:])] = counts.get(tuple(text[1:]), 0) + 1
    assert chi_square(counts, toy.expected(SamplingParams(**OFF))) > 30


def test_a_drafter_without_probabilities_offers_nothing() -> None:
    draft, odds = offer(Draft(np.array([[3], [4]], np.int32)), Race(SamplingParams(), int))
    assert draft.n_depth == 0 and odds == ()


def race_of(params: SamplingParams, seed: int) -> Race:
    sampler = Sampler(SamplingParams(**{**OFF, "seed": seed}), N_VOCAB)
    return Race(params, sampler.key_at)


def test_the_least_likely_token_of_a_list_is_never_offered_and_changes_nothing() -> None:
    """It may be there only because it wins the race, and then q would depend on the race."""
    params, offered = SamplingParams(**OFF), set()
    log_p = np.log(np.array([[0.5, 0.3, 0.15]], dtype=np.float32))
    for seed in range(200):
        race = race_of(params, seed)
        found = [offer(Draft(np.array([[0, 1, last]], np.int32), log_p), race) for last in (2, 3)]
        (one, odds), (other, others) = found
        assert one.tokens.tolist() == other.tokens.tolist()
        assert odds[0].ids.tolist() == others[0].ids.tolist() == [0, 1]
        assert odds[0].p.tolist() == others[0].p.tolist() == pytest.approx([0.625, 0.375])
        offered.add(odds[0].token)
    assert offered == {0, 1}
