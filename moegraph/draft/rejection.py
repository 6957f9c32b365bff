"""Speculative sampling by rejection: drafted tokens are drawn at random, accepted by p / q.

The drafter's distribution q, with the sampler's settings applied, gives a token. The target accepts
it with probability min(1, p / q), and otherwise draws from what p has more than q. So each token
has the target's distribution p (Leviathan et al., 2023, arXiv:2211.17192). It is not the token that
the sampler would draw without drafts: only the distribution is the same.

Whether a token is offered may depend on the tokens before it, but on nothing that came of it or
comes after it: otherwise the offered tokens would not have the distribution q. So how long a draft
is is decided before it is made, and every offered token is judged, verified or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..sampling import gumbel
from .drafter import Draft, Ids, Race
from .race import kept

# Streams of random numbers of a position, besides the sampler's own.
_OFFERED, _JUDGED, _INSTEAD = 0x9E6C63D0876A9A47, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Odds:
    """A token that was drawn from the distribution q: p of each of ids, numpy [n] each."""

    token: int
    ids: Ids
    p: Numbers

    @cached_property
    def of_token(self) -> float:
        """The probability of the token."""
        return float(self.p[self.ids == self.token][0])


def offered_race(race: Race) -> Race:
    """Return the race by which a drafter should choose what later tokens follow."""
    return Race(race.params, lambda n: race.key(n) ^ _OFFERED)


def offer(draft: Draft, race: Race, p_min: float = 0.0) -> tuple[Draft, tuple[Odds, ...]]:
    """Return a draft of one token at each depth, drawn at random, and what each was drawn from.

    draft: made with `offered_race`. p_min: the draft ends where no token is as likely. It also ends
    after a token that is not the one that later depths follow. Without probabilities it is empty.
    """
    if draft.log_p is None:
        return draft.cut(0), ()
    tokens, log_q, odds = list[int](), list[float](), list[Odds]()
    key = offered_race(race).key
    for depth in range(draft.n_depth):
        ids, log_p = _likeliest(draft.tokens[depth], draft.log_p[depth])
        if not ids.size or log_p[0] < (math.log(p_min) if p_min > 0.0 else -math.inf):
            break
        left = kept(log_p[None], race)[0]
        ids, scaled = ids[left], (log_p[left] - log_p[0]) / race.params.temperature
        p = np.exp(scaled)
        token = int(ids[np.argmax(scaled + gumbel(key(depth), ids))])
        odds.append(Odds(token, ids, p / p.sum()))
        tokens.append(token)
        log_q.append(math.log(max(odds[-1].of_token, 1e-30)))
        if token != draft.tokens[depth, 0]:
            break
    n = len(tokens)
    drawn = np.array(tokens, dtype=np.int32).reshape(n, 1)
    return Draft(drawn, np.array(log_q, dtype=np.float32).reshape(n, 1)), tuple(odds)


def _likeliest(tokens: Ids, log_p: npt.NDArray[np.float32]) -> tuple[Ids, Numbers]:
    """Return all but the least likely token of a list, the likeliest first.

    A race may have put its winner into the list in place of the last token. What a token is drawn
    from must not depend on the random number that draws it.
    """
    order = np.lexsort((tokens, -log_p))[: len(tokens) - 1]
    return tokens[order], log_p[order].astype(np.float64)


def judge(odds: Odds, ids: npt.NDArray[np.int64], p: Numbers, key: int) -> int:
    """Return the next token of the text: the offered one, or another.

    ids, p: the target's distribution after the sampler's settings, numpy [n] each. key: of the
    sampler's random numbers at the position.
    """
    at = np.flatnonzero(ids == odds.token)
    accepted = float(p[at[0]]) if at.size else 0.0
    uniform = math.exp(-math.exp(-float(gumbel(key ^ _JUDGED, np.zeros(1, np.int64))[0])))
    if uniform * odds.of_token < accepted:
        return odds.token
    q = dict(zip(odds.ids.tolist(), odds.p.tolist()))
    more = np.maximum(p - np.array([q.get(token, 0.0) for token in ids.tolist()]), 0.0)
    with np.errstate(divide="ignore"):
        scores = np.log(more) + gumbel(key ^ _INSTEAD, ids)
    return int(ids[np.argmax(scores)])
