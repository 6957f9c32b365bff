"""Choose the next token from a row of logits, as llama.cpp's samplers do.

The chain has llama.cpp's default order: logit bias, penalties, top-k, typical, top-p, min-p,
temperature, then one draw. A vocabulary has up to 248,320 entries, so no step sorts all of them.

The draw is a race: each token has a random number, a function of the seed, the position and the
token alone, and the largest sum of that and its logit wins. So a token does not depend on what was
computed beside it, nor on how many candidates were known. `native/py/choose.c` draws the same
tokens from the few candidates that the device lists.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import RequestError
from .setting import Setting, problem_of, setting, settings_of

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# llama.cpp takes this seed as a request for a random one; -1 is the same number in 32 bits.
RANDOM_SEED = 0xFFFFFFFF

# More tokens than a context has: the penalties look back on all of them.
_ALL_TOKENS = 1 << 22

# Columns that `_top_k` folds a row into; their maxima give a lower bound of the top k.
_N_COLUMNS = 1024
# Candidates that top-p tries first; each further try has this many times more.
_TOP_P_FIRST, _TOP_P_MORE = 256, 16
# Up to this number of candidates, sums are in double precision.
_FEW = 4096

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1

_setting = partial(setting, group="Sampling")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are llama.cpp's.

    ``temperature <= 0`` means greedy. ``seed=None`` means a random seed; `seeded` returns settings
    that name it. ``logit_bias`` maps token ids to numbers that are added to their logits; ``-inf``
    bans a token.
    """

    temperature: float = _setting(
        "float", 0.8, ("--temp", "--temperature"),
        "Temperature; 0 always takes the likeliest token.", minimum=-100, maximum=100,
    )  # fmt: skip
    top_k: int = _setting(
        "int", 40, ("--top-k",), "Keep the K likeliest tokens; 0 keeps all.", minimum=-1,
        maximum=2**31 - 1,
    )  # fmt: skip
    top_p: float = _setting(
        "float", 0.95, ("--top-p",), "Keep the likeliest tokens up to this probability; 1 is off.",
        minimum=0, maximum=1,
    )  # fmt: skip
    min_p: float = _setting(
        "float", 0.05, ("--min-p",), "Drop tokens below this share of the likeliest; 0 is off.",
        minimum=0, maximum=1,
    )  # fmt: skip
    typical_p: float = _setting(
        "float", 1.0, ("--typical", "--typical-p"),
        "Locally typical sampling up to this probability; 1 is off.", minimum=0, maximum=1,
    )  # fmt: skip
    repeat_penalty: float = _setting(
        "float", 1.0, ("--repeat-penalty",), "Divide the logits of recent tokens; 1 is off.",
        minimum=0.01, maximum=100,
    )  # fmt: skip
    repeat_last_n: int = _setting(
        "int", 64, ("--repeat-last-n",),
        "Tokens the penalties look back on; 0 is off, -1 is all of them.", minimum=-1,
        maximum=_ALL_TOKENS,
    )  # fmt: skip
    presence_penalty: float = _setting(
        "float", 0.0, ("--presence-penalty",), "Subtracted once from logits of recent tokens.",
        minimum=-100, maximum=100,
    )  # fmt: skip
    frequency_penalty: float = _setting(
        "float", 0.0, ("--frequency-penalty",), "Subtracted as often as the token occurred.",
        minimum=-100, maximum=100,
    )  # fmt: skip
    seed: int | None = _setting(
        "int", None, ("-s", "--seed"), "Seed of the random numbers; -1 picks a random seed.",
        minimum=-1, maximum=RANDOM_SEED,
    )  # fmt: skip
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest candidate is always chosen."""
        return self.temperature <= 0

    @property
    def has_penalties(self) -> bool:
        """Whether recent tokens change the logits."""
        return self.n_recent > 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def n_recent(self) -> int:
        """Number of tokens that the penalties look back on."""
        return _ALL_TOKENS if self.repeat_last_n < 0 else self.repeat_last_n

    @property
    def needs_logits(self) -> bool:
        """Whether the host needs the logits; if not, the device's argmax is the next token."""
        return (
            not self.is_greedy
            or self.has_penalties
            or bool(self.logit_bias)
            or self.typical_p < 1.0
        )

    def seeded(self) -> SamplingParams:
        """Return these settings with a definite seed: a random one if none was given."""
        if self.seed not in (None, -1, RANDOM_SEED):
            return self
        return replace(self, seed=secrets.randbelow(RANDOM_SEED))

    def validate(self, n_vocab: int) -> SamplingParams:
        """Return self if every value is in range.

        Raises:
            RequestError: names the field, its value and the allowed range.
        """
        found = [problem_of(s, getattr(self, s.name)) for s in settings()]
        found += [_bias_problem(*entry, n_vocab) for entry in self.logit_bias.items()]
        found = [line for line in found if line]
        if found:
            raise RequestError("; ".join(found))
        return self


@cache
def settings() -> tuple[Setting, ...]:
    """Return the Setting of every SamplingParams field except logit_bias, in order."""
    return settings_of(SamplingParams)


def _bias_problem(token: int, bias: float, n_vocab: int) -> str:
    if not 0 <= token < n_vocab:
        return f"logit_bias names token {token}; the vocabulary has ids 0 to {n_vocab - 1}"
    if math.isnan(bias) or bias == math.inf:
        return f"logit_bias of token {token} is {bias}; expected a finite number or -inf"
    return ""


class Sampler:
    """Draw tokens one after another; equal seeds and logits give equal tokens.

    The caller passes every token of the prompt and every token drawn to `accept` or `accept_all`;
    the penalties use them, and their number is the position of the next draw.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self.params = params = params.validate(n_vocab).seeded()
        self.n_vocab = n_vocab
        self.position = 0
        self.recent: deque[int] = deque(maxlen=params.n_recent)
        self._seed = _mixed(params.seed or 0)
        bias = params.logit_bias
        self.bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self.bias = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))

    def accept(self, token: int) -> None:
        """Record one token of the text."""
        self.position += 1
        self.recent.append(token)

    def accept_all(self, tokens: Sequence[int]) -> None:
        """Record the tokens of a prompt, oldest first."""
        self.position += len(tokens)
        self.recent.extend(tokens[-self.params.n_recent :] if self.recent.maxlen else ())

    @property
    def key(self) -> int:
        """Key of the random numbers of the next draw."""
        return self.key_at(self.position)

    def key_at(self, position: int) -> int:
        """Return the key of the random numbers at a position, 64 bits: of it and of the seed."""
        return _mixed(self._seed + position * _GOLDEN)

    def sample(self, logits: FloatArray, allowed: BoolArray | None = None) -> int:
        """Return the id of the next token.

        Shapes: logits ``[n_vocab]`` F32, finite or -inf; left unchanged. allowed ``[n_vocab]``:
        tokens that may be chosen; None: all.
        """
        logits = self._adjust(logits)
        if allowed is not None:
            logits = np.where(allowed, logits, np.float32(-np.inf))
        if self.params.is_greedy and self.params.typical_p >= 1.0:
            token = int(logits.argmax())
            _require_candidate(logits[token])
            return token
        ids, kept = self._candidates(logits)
        if self.params.is_greedy:
            return int(ids[kept.argmax()])
        scores = self._tempered(kept) + gumbel(self.key, ids)
        return int(ids[scores.argmax()])

    def distribution(self, logits: FloatArray) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """Return the remaining token ids and their probabilities after the whole chain.

        A temperature of 0 or less is not applied: these are then the probabilities before it.

        Shapes: logits ``[n_vocab]`` F32; ids and probabilities ``[n_candidates]``.
        """
        ids, kept = self._candidates(self._adjust(logits))
        weights = np.exp(self._tempered(kept))
        return ids, weights / weights.sum()

    def _candidates(self, logits: FloatArray) -> tuple[IntArray, FloatArray]:
        """Return the ids and logits of the tokens that the chain leaves, in any order."""
        params = self.params
        ids, kept = _top_k(logits, params.top_k)
        largest = kept.max()
        _require_candidate(largest)
        if params.typical_p < 1.0:
            ids, kept = _typical(ids, kept, params.typical_p)
        least = -np.inf
        if params.min_p > 0.0:
            least = kept.max() + np.float32(math.log(params.min_p))
        if params.top_p < 1.0:
            ids, kept = _top_p(ids, kept, params.top_p, least)
        if params.min_p > 0.0:
            near = kept >= least
            ids, kept = ids[near], kept[near]
        return ids, kept

    def _tempered(self, logits: FloatArray) -> npt.NDArray[np.float64]:
        """Return the logits less the largest, so that a tiny temperature cannot overflow."""
        less = logits.astype(np.float64) - float(logits.max())
        return less if self.params.is_greedy else less / self.params.temperature

    def _adjust(self, logits: FloatArray) -> FloatArray:
        """Return the logits with bias and penalties; a copy only if one of them applies."""
        recent = self.recent if self.params.has_penalties else ()
        if not recent and not self.bias_ids.size:
            return logits
        adjusted = logits.astype(np.float32, copy=True)
        adjusted[self.bias_ids] += self.bias
        if recent:
            self._penalize(adjusted)
        return adjusted

    def _penalize(self, logits: FloatArray) -> None:
        params = self.params
        ids, counts = np.unique(np.fromiter(self.recent, dtype=np.int64), return_counts=True)
        seen, repeat = logits[ids], np.float32(params.repeat_penalty)
        # A negative logit is multiplied: dividing it would make the token likelier.
        seen = np.where(seen <= 0, seen * repeat, seen / repeat)
        logits[ids] = seen - (counts * params.frequency_penalty + params.presence_penalty)


def no_token_left() -> RequestError:
    """Return the error for a row whose tokens are all excluded."""
    return RequestError("logit_bias excludes every token; leave at least one")


def _require_candidate(largest: np.floating[Any]) -> None:
    if largest == -np.inf:
        raise no_token_left()


def _mixed(word: int) -> int:
    """Return the 64 bits of a number, mixed by the finalizer of splitmix64."""
    x = word & _WORD
    x = ((x ^ (x >> 30)) * _MIX_1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) & _WORD
    return x ^ (x >> 31)


def gumbel(
    key: int | npt.NDArray[np.uint64], ids: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.float64]:
    """Return a number of the standard Gumbel distribution for each token: of its id and the key.

    The largest of ``log(p) + gumbel`` belongs to a token that is a draw from p. key: one, or an
    array that broadcasts with the ids.
    """
    with np.errstate(over="ignore"):
        x = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        x = x + (key if isinstance(key, np.ndarray) else np.uint64(key))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
        x ^= x >> np.uint64(31)
    uniform = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    scores: npt.NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return scores


def _weights(logits: FloatArray) -> FloatArray:
    """Return exp(logit - largest); in double precision if they are few."""
    if logits.size <= _FEW:
        logits = logits.astype(np.float64)
    weights: FloatArray = np.exp(logits - logits.max())
    return weights


def _descending(ids: IntArray, logits: FloatArray) -> tuple[IntArray, FloatArray]:
    order = np.argsort(-logits, kind="stable")
    return ids[order], logits[order]


def _top_k(logits: FloatArray, k: int) -> tuple[IntArray, FloatArray]:
    """Return the k largest logits with their ids, largest first, equal ones by id.

    The row is folded into columns. At least k logits are no smaller than the k-th largest column
    maximum, so smaller logits are not in the top k. This takes three passes over the row; a
    partition takes 3 ms.
    """
    n_vocab = logits.size
    if k <= 0 or k >= n_vocab:
        return np.arange(n_vocab), logits
    if k <= _N_COLUMNS < n_vocab:
        whole = n_vocab - n_vocab % _N_COLUMNS
        columns = logits[:whole].reshape(-1, _N_COLUMNS).max(axis=0)
        floor = np.partition(columns, _N_COLUMNS - k)[_N_COLUMNS - k]
    else:
        floor = np.partition(logits, n_vocab - k)[n_vocab - k]
    ids = np.flatnonzero(logits >= floor)
    ids, kept = _descending(ids, logits[ids])
    return ids[:k], kept[:k]


def _typical(ids: IntArray, logits: FloatArray, p: float) -> tuple[IntArray, FloatArray]:
    """Keep the tokens whose surprise is closest to the entropy, up to total probability p."""
    weights = _weights(logits).astype(np.float64)
    probs = weights / weights.cumsum()[-1]  # in the order of native/py/choose.c
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = float((probs * np.where(probs > 0, surprise, 0.0)).cumsum()[-1])
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    cumulative = probs[order].cumsum()
    n_keep = int(np.searchsorted(cumulative, p, side="right")) + 1
    kept = order[:n_keep]
    return ids[kept], logits[kept]


def _top_p(
    ids: IntArray, logits: FloatArray, p: float, floor: float
) -> tuple[IntArray, FloatArray]:
    """Keep the likeliest tokens up to and including the one whose cumulative sum reaches p.

    floor: logits below it are cut anyway; of a large set, only the others are sorted. Tries the
    likeliest few first, then more of them; it never sorts more than it keeps by much.
    """
    if ids.size <= _FEW:
        ids, logits = _descending(ids, logits)
        cumulative = _weights(logits).cumsum(dtype=np.float64)
        n_keep = 1 + int(np.searchsorted(cumulative[:-1], p * cumulative[-1], side="left"))
        return ids[:n_keep], logits[:n_keep]
    wanted, n = p * float(_weights(logits).sum(dtype=np.float64)), _TOP_P_FIRST
    near = np.flatnonzero(logits >= floor)
    ids, logits = ids[near], logits[near]
    while True:
        is_last = 4 * n >= ids.size
        at, largest = _descending(np.arange(ids.size), logits) if is_last else _top_k(logits, n)
        reached = _weights(largest).cumsum(dtype=np.float64)
        if is_last or reached[-1] >= wanted:
            n_keep = 1 + int(np.searchsorted(reached[:-1], wanted, side="left"))
            return ids[at[:n_keep]], largest[:n_keep]
        n *= _TOP_P_MORE
