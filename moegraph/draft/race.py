"""Drafts for sampled text: they use the random numbers with which the sampler will draw.

The sampler draws by a race: the largest sum of a token's logit over the temperature and of its
random number wins, and that number depends on the seed, the position and the token alone
(sampling.py). So it is known before the target has computed anything. The drafter's own
probabilities with the same numbers tell which token will probably win. That is right far more often
than the drafter's likeliest token: always, if its probabilities are the target's.

The text is what it would be without drafts all the same. Only what is drafted changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..sampling import SamplingParams, gumbel
from .drafter import Draft

# Tokens of each depth that take part. More of them seldom win.
N_RUNNERS = 40
_LEAST = -100.0  # log p


@dataclass(frozen=True)
class Race:
    """What is known of the next draws of a sampler.

    params: its settings. key: returns the key of the random numbers of the n-th draw from now on.
    """

    params: SamplingParams
    key: Callable[[int], int]

    def run(self, draft: Draft, n_top: int) -> Draft:
        """Return a draft whose tokens are in the order in which they will probably win.

        n_top: tokens of each depth to keep. The log_p of the result are probabilities to win. The
        draft ends with the first depth that another token than its first one wins, because what it
        has for later depths follows the first one.
        """
        if draft.log_p is None or not draft.n_depth:
            return draft
        log_p = np.maximum(draft.log_p.astype(np.float64), _LEAST)
        scores = np.where(self._kept(log_p), self._scores(log_p, draft.tokens), -np.inf)
        order = np.argsort(-scores, axis=1, kind="stable")
        lost = np.flatnonzero(order[:, 0])
        n = int(lost[0]) + 1 if lost.size else draft.n_depth
        scores, order = scores[:n], order[:n]
        chances = scores - scores.max(axis=1, keepdims=True)
        chances -= np.log(np.exp(chances).sum(axis=1, keepdims=True))
        order = order[:, :n_top]
        return Draft(
            np.take_along_axis(draft.tokens[:n], order, axis=1),
            np.take_along_axis(chances, order, axis=1).astype(np.float32),
        )

    def _scores(
        self, log_p: npt.NDArray[np.float64], tokens: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float64]:
        keys = np.array([[self.key(depth)] for depth in range(len(tokens))], dtype=np.uint64)
        scores: npt.NDArray[np.float64] = log_p / self.params.temperature + gumbel(keys, tokens)
        return scores

    def _kept(self, log_p: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Return which tokens the sampler's settings would leave, if the drafter were right."""
        params = self.params
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
