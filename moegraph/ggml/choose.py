"""Choose a token from the candidates that the device lists for a row (native/py/choose.c)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..sampling import SamplingParams, no_token_left
from .lib import C, ffi

Words = npt.NDArray[np.int32]

# Words of a row's input and of its result, most ids that an input may name, and most rows.
DRAW_WORDS: int = C.MOEGRAPH_DRAW_WORDS
DRAW_IDS: int = C.MOEGRAPH_DRAW_IDS
DRAW_ROWS: int = C.MOEGRAPH_DRAW_ROWS
# Tokens of the largest logits that the result lists at least, if there is room.
LIKELY: int = C.MOEGRAPH_LIKELY
# Where the result has the sum over all tokens (F32, NaN if a logit is not finite).
TOTAL_WORD = 0


# The list of the likeliest tokens: where its length is, most of them, and where the ids begin,
# which the logits follow.
_N_LIKELY, _MOST, _IDS = 3, int(C.MOEGRAPH_CANDIDATES), 4


def likeliest_rows(rows: Words, n_top: int) -> tuple[Words, npt.NDArray[np.float32]]:
    """Return the n_top likeliest tokens of several rows and their log probabilities, [n, n_top].

    rows: results of the op, [n_rows, words]. Rows end before the first one of which fewer are
    listed. Log probabilities of a row are NaN if a logit is not finite; its ids are 0 then.
    """
    numbers, n_listed = rows.view(np.float32), rows[:, _N_LIKELY]
    total = numbers[:, TOTAL_WORD]
    is_bad = ~np.isfinite(total)
    ends = ((n_listed < n_top) | (n_listed > _MOST)) & ~is_bad
    n = int(ends.argmax()) if ends.any() else len(rows)
    ids = np.where(is_bad[:n, None], 0, rows[:n, _IDS : _IDS + n_top])
    logits = numbers[:n, _IDS + _MOST : _IDS + _MOST + n_top]
    with np.errstate(invalid="ignore", divide="ignore"):
        below = numbers[:n, TOTAL_WORD + 1] + np.log(np.where(is_bad, np.nan, total)[:n])
        return ids, logits - below[:, None]


# After the likeliest tokens and a floor: the tokens of the largest scores, their number first.
_N_EARLY, _MOST_EARLY = _IDS + 2 * _MOST + 1, int(C.MOEGRAPH_EARLY)
# Where the result has the token of the largest score, the winner of the race.
WINNER_WORD = _N_EARLY + 1


def winners(rows: Words) -> tuple[Words, npt.NDArray[np.float32]]:
    """Return the winners of the races of several rows and their log probabilities, [n].

    rows: results of the op, [n_rows, words]. Rows end before the first one whose list of the
    largest scores is empty.
    """
    n_early = rows[:, _N_EARLY]
    ends = (n_early < 1) | (n_early > _MOST_EARLY)
    n = int(ends.argmax()) if ends.any() else len(rows)
    numbers = rows[:n].view(np.float32)
    logits = numbers[:, WINNER_WORD + _MOST_EARLY]
    below = numbers[:, TOTAL_WORD + 1] + np.log(numbers[:, TOTAL_WORD])
    return rows[:n, WINNER_WORD], logits - below


class Chooser:
    """The settings of a sampler, as `mg_choose` takes them."""

    __slots__ = ("_changed", "_sampler")

    def __init__(self, params: SamplingParams) -> None:
        self._sampler: Any = ffi.new("struct mg_sampler *")
        self._sampler.temperature = params.temperature
        self._sampler.top_p = params.top_p
        self._sampler.typical_p = params.typical_p
        self._sampler.min_p_log = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self._sampler.top_k = params.top_k
        self._changed: tuple[npt.NDArray[Any], ...] = ()  # keeps the memory

    def change(
        self, ids: Words, places: Words, bias: npt.NDArray[np.float32],
        repeat: npt.NDArray[np.float32], subtracted: npt.NDArray[np.float64],
    ) -> None:  # fmt: skip
        """Change the logits of these tokens, sorted by id, from the next call on.

        Each logit gets bias added, is divided by repeat (or multiplied, if it is not above 0), and
        loses subtracted. places: which of the ids that the row's input named each is.
        """
        to, self._changed = self._sampler, (ids, places, bias, repeat, subtracted)
        to.n_changed = len(ids)
        to.ids, to.places = _address("int32_t *", ids), _address("int32_t *", places)
        to.bias, to.repeat = _address("float *", bias), _address("float *", repeat)
        to.subtracted = _address("double *", subtracted)

    def choose(
        self, row: Words, key: int, allowed: npt.NDArray[np.bool_] | None = None
    ) -> int | None:
        """Return a token, or None if only the logits of the whole row can tell.

        row: result of the op for this row. key: of its random numbers. allowed: as in
        `Sampler.sample`.
        """
        self._sampler.allowed = ffi.NULL if allowed is None else _address("uint8_t *", allowed)
        token: int = C.mg_choose(self._sampler, ffi.from_buffer(row), key)
        if token >= 0:
            return token
        if token == C.MG_CHOOSE_NONE:
            raise no_token_left()
        return None


def _address(kind: str, array: npt.NDArray[Any]) -> Any:
    return ffi.cast(kind, ffi.from_buffer(array))
