"""Drafts for sampled text: they use the random numbers with which the sampler will draw.

The sampler draws by a race: the largest sum of a token's logit over the temperature and of its
random number wins, and that number depends on the seed, the position and the token alone
(sampling.py). So it is known before the target has computed anything. The drafter's own
probabilities with the same numbers tell which token will probably win. That is right far more often
than the drafter's likeliest token: always, if its probabilities are the target's.

The text is what it would be without drafts all the same. Only what is drafted changes.

Drafts may also be drawn at random, by speculative sampling. The drafter's distribution q, with the
sampler's settings applied, gives a token. The target accepts it with probability min(1, p / q), and
otherwise draws from what p has more than q. So each token has the target's distribution p
(Leviathan et al., 2023, arXiv:2211.17192). It is not the token that the sampler would draw without
drafts: only the distribution is the same.

Whether a token is offered may depend on the tokens before it, but on nothing that came of it or
comes after it: otherwise the offered tokens would not have the distribution q. So how long a draft
is is decided before it is made, and every offered token is judged, verified or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..sampling import gumbel
from .drafter import LEAST_LOG_P, Draft, Ids, Race

# Tokens of each depth that take part. More of them seldom win.
N_RUNNERS = 40
# How far differences of scores tell who wins, in trees. Of 0.35 to 1.5 this gave most tokens a step
# (DSpark of the shipped model, 7 and 15 rows, 8 texts, 3 samplers).
_TRUST = 0.7
# Streams of random numbers of a position, besides the sampler's own.
_OFFERED, _JUDGED, _INSTEAD = 0x9E6C63D0876A9A47, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
Numbers = npt.NDArray[np.float64]


def raced(draft: Draft, race: Race, n_top: int) -> Draft:
    """Return a draft whose tokens are in the order in which they will probably win.

    n_top: tokens of each depth to keep. The log_p of the result are probabilities to win. The draft
    ends with the first depth that another token than its first one wins, because what it has for
    later depths follows the first one.
    """
    if draft.log_p is None or not draft.n_depth:
        return draft
    keys = [race.key(depth) for depth in range(draft.n_depth)]
    tokens, log_p = _ordered(draft.tokens, draft.log_p, race, keys, n_top)
    lost = np.flatnonzero(tokens[:, 0] != draft.tokens[:, 0])
    return Draft(tokens, log_p).cut(int(lost[0]) + 1 if lost.size else draft.n_depth)


def raced_list(
    tokens: Ids, log_p: npt.NDArray[np.float32], race: Race, depth: int, n_top: int
) -> tuple[Ids, npt.NDArray[np.float32]]:
    """Return what may follow several tokens of a depth, in the order in which it will probably win.

    tokens, log_p: numpy shape [m, n], likeliest first. Returns them with shape [m, n_top]; the
    log_p are chances to win. All rows are of one depth, so the same random numbers decide.
    """
    # the chances are of the order only as far as the drafter's probabilities are the target's
    return _ordered(tokens, log_p, race, [race.key(depth)] * len(tokens), n_top, _TRUST)


def _ordered(
    tokens: Ids, log_p: npt.NDArray[np.float32], race: Race, keys: Sequence[int], n_top: int,
    trust: float = 1.0,
) -> tuple[Ids, npt.NDArray[np.float32]]:  # fmt: skip
    """Return tokens and their log chances to win, [m, n_top], the likeliest winners first.

    keys: of the random numbers of each row. trust: how far differences of scores tell who wins.
    """
    lp = np.maximum(log_p.astype(np.float64), LEAST_LOG_P)
    less = lp - lp.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest tokens
        numbers = gumbel(np.array(keys, dtype=np.uint64)[:, None], tokens)
        scores = less / race.params.temperature + numbers
    scores = np.where(kept(lp, race), scores, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :n_top]
    chances = trust * (scores - scores.max(axis=1, keepdims=True))
    chances -= np.log(np.exp(chances).sum(axis=1, keepdims=True))
    chances = np.maximum(np.take_along_axis(chances, order, axis=1), LEAST_LOG_P)
    return np.take_along_axis(tokens, order, axis=1), chances.astype(np.float32)


def kept(log_p: npt.NDArray[np.float64], race: Race) -> npt.NDArray[np.bool_]:
    """Return which tokens the sampler's settings would leave, if the drafter were right.

    log_p: numpy [n_depth, n_top].
    """
    params = race.params
    order = np.argsort(-log_p, axis=1, kind="stable")
    falling = np.take_along_axis(log_p, order, axis=1)
    p = np.exp(falling)
    before = p.cumsum(axis=1) - p
    stays = (before < params.top_p) | (params.top_p >= 1.0)
    if params.top_k > 0:
        stays[:, params.top_k :] = False
    if params.min_p > 0.0:
        stays &= p >= params.min_p * p[:, :1]
    stays[:, 0] = True
    found = np.empty_like(stays)
    np.put_along_axis(found, order, stays, axis=1)
    return found


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
