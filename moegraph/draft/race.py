"""Drafts for sampled text: they use the random numbers with which the sampler will draw.

The sampler draws by a race: the largest sum of a token's logit over the temperature and of its
random number wins, and that number depends on the seed, the position and the token alone
(sampling.py). So it is known before the target has computed anything. The drafter's own
probabilities with the same numbers tell which token will probably win. That is right far more often
than the drafter's likeliest token: always, if its probabilities are the target's.

The text is what it would be without drafts all the same. Only what is drafted changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..sampling import gumbel
from .drafter import LEAST_LOG_P, Draft, Ids, Race

# Tokens of each depth that take part. More of them seldom win.
N_RUNNERS = 40
# How far differences of scores tell who wins, in trees. Of 0.35 to 1.5 this gave most tokens a step
# (DSpark of the shipped model, 7 and 15 rows, 8 texts, 3 samplers).
_TRUST = 0.7


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
