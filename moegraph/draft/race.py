"""Drafts for sampled text: they use the random numbers with which the sampler will draw.

The sampler draws by a race: the largest sum of a token's logit over the temperature and of its
random number wins, and that number depends on the seed, the position and the token alone
(sampling.py). So it is known before the target has computed anything. The drafter's own
probabilities with the same numbers tell which token will probably win. That is right far more often
than the drafter's likeliest token: always, if its probabilities are the target's.

The text is what it would be without drafts all the same. Only what is drafted changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..sampling import gumbel
from .drafter import Draft, Race

# Tokens of each depth that take part. More of them seldom win.
N_RUNNERS = 40
_LEAST = -100.0  # log p


def raced(draft: Draft, race: Race, n_top: int) -> Draft:
    """Return a draft whose tokens are in the order in which they will probably win.

    n_top: tokens of each depth to keep. The log_p of the result are probabilities to win. The draft
    ends with the first depth that another token than its first one wins, because what it has for
    later depths follows the first one.
    """
    if draft.log_p is None or not draft.n_depth:
        return draft
    log_p = np.maximum(draft.log_p.astype(np.float64), _LEAST)
    scores = np.where(_kept(log_p, race), _scores(log_p, draft.tokens, race), -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")
    lost = np.flatnonzero(order[:, 0])
    n = int(lost[0]) + 1 if lost.size else draft.n_depth
    scores, order = scores[:n], order[:n]
    chances = scores - scores.max(axis=1, keepdims=True)
    chances -= np.log(np.exp(chances).sum(axis=1, keepdims=True))
    order, chances = order[:, :n_top], np.maximum(chances, _LEAST).astype(np.float32)
    return Draft(
        np.take_along_axis(draft.tokens[:n], order, axis=1),
        np.take_along_axis(chances, order, axis=1),
    )


def _scores(
    log_p: npt.NDArray[np.float64], tokens: npt.NDArray[np.int32], race: Race
) -> npt.NDArray[np.float64]:
    keys = np.array([[race.key(depth)] for depth in range(len(tokens))], dtype=np.uint64)
    less = log_p - log_p.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest tokens
        scores: npt.NDArray[np.float64] = less / race.params.temperature + gumbel(keys, tokens)
    return scores


def _kept(log_p: npt.NDArray[np.float64], race: Race) -> npt.NDArray[np.bool_]:
    """Return which tokens the sampler's settings would leave, if the drafter were right."""
    params = race.params
    order = np.argsort(-log_p, axis=1, kind="stable")
    falling = np.take_along_axis(log_p, order, axis=1)
    p = np.exp(falling)
    before = p.cumsum(axis=1) - p
    kept = before < params.top_p
    if params.top_k > 0:
        kept[:, params.top_k :] = False
    if params.min_p > 0.0:
        kept &= p >= params.min_p * p[:, :1]
    kept[:, 0] = True
    found = np.empty_like(kept)
    np.put_along_axis(found, order, kept, axis=1)
    return found
