"""Choose the next token from a row of logits, as llama.cpp's samplers do.

The chain has llama.cpp's default order: logit bias, penalties, top-k, typical, top-p, min-p,
temperature, then one draw. A vocabulary has up to 248,320 entries; only the steps up to top-k work
on all of them.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import Setting
from .errors import RequestError

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

# llama.cpp takes this seed as a request for a random one; -1 is the same number in 32 bits.
RANDOM_SEED = 0xFFFFFFFF

# Columns that `_top_k` folds a row into; their maxima give a lower bound of the top k.
_N_COLUMNS = 1024
# Candidates that top-p tries before it sorts all of them (as llama.cpp does).
_TOP_P_FIRST = 256


def _setting(kind: str, default: Any, flags: tuple[str, ...], help: str, **limits: Any) -> Any:
    """Return a dataclass field that carries a Setting (less its name) as metadata."""
    meta = {"kind": kind, "flags": flags, "help": help, "group": "Sampling", **limits}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are llama.cpp's.

    ``temperature <= 0`` means greedy. ``seed=None`` means a random seed; `seeded` returns settings
    that name it. ``logit_bias`` maps token ids to numbers that are added to their logits; ``-inf``
    bans a token.
    """

    temperature: float = _setting(
        "float",
        0.8,
        ("--temp", "--temperature"),
        "Temperature; 0 always takes the likeliest token.",
        minimum=-100,
        maximum=100,
    )
    top_k: int = _setting(
        "int",
        40,
        ("--top-k",),
        "Keep the K likeliest tokens; 0 keeps all.",
        minimum=-1,
        maximum=2**31 - 1,
    )
    top_p: float = _setting(
        "float",
        0.95,
        ("--top-p",),
        "Keep the likeliest tokens up to this probability; 1 is off.",
        minimum=0,
        maximum=1,
    )
    min_p: float = _setting(
        "float",
        0.05,
        ("--min-p",),
        "Drop tokens below this share of the likeliest; 0 is off.",
        minimum=0,
        maximum=1,
    )
    typical_p: float = _setting(
        "float",
        1.0,
        ("--typical", "--typical-p"),
        "Locally typical sampling up to this probability; 1 is off.",
        minimum=0,
        maximum=1,
    )
    repeat_penalty: float = _setting(
        "float",
        1.0,
        ("--repeat-penalty",),
        "Divide the logits of recent tokens; 1 is off.",
        minimum=0.01,
        maximum=100,
    )
    repeat_last_n: int = _setting(
        "int",
        64,
        ("--repeat-last-n",),
        "Tokens the penalties look back on; 0 is off.",
        minimum=0,
        maximum=1 << 22,
    )
    presence_penalty: float = _setting(
        "float",
        0.0,
        ("--presence-penalty",),
        "Subtracted once from logits of recent tokens.",
        minimum=-100,
        maximum=100,
    )
    frequency_penalty: float = _setting(
        "float",
        0.0,
        ("--frequency-penalty",),
        "Subtracted as often as the token occurred.",
        minimum=-100,
        maximum=100,
    )
    seed: int | None = _setting(
        "int",
        None,
        ("-s", "--seed"),
        "Seed of the random numbers; -1 picks a random seed.",
        minimum=-1,
        maximum=RANDOM_SEED,
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest candidate is always chosen."""
        return self.temperature <= 0

    @property
    def has_penalties(self) -> bool:
        """Whether recent tokens change the logits."""
        return self.repeat_last_n > 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

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
        found = [_problem(s, getattr(self, s.name)) for s in settings()]
        found += [_bias_problem(*entry, n_vocab) for entry in self.logit_bias.items()]
        found = [line for line in found if line]
        if found:
            raise RequestError("; ".join(found))
        return self


def settings() -> tuple[Setting, ...]:
    """Return the Setting of every SamplingParams field except logit_bias, in order."""
    return tuple(
        Setting(name=f.name, default=f.default, **f.metadata)
        for f in fields(SamplingParams)
        if f.metadata
    )


def _problem(setting: Setting, value: object) -> str:
    """Return what is wrong with one value, or an empty string."""
    if value is None and setting.default is None:
        return ""
    where = f"{setting.name} is {value!r} ({'/'.join(setting.flags)})"
    numbers = (int, np.integer) if setting.kind == "int" else (int, float, np.number)
    if isinstance(value, bool) or not isinstance(value, numbers):
        return f"{where}; expected {'an integer' if setting.kind == 'int' else 'a number'}"
    low, high = setting.minimum or 0, setting.maximum or 0
    return "" if low <= value <= high else f"{where}; allowed: {setting.allowed}"


def _bias_problem(token: int, bias: float, n_vocab: int) -> str:
    if not 0 <= token < n_vocab:
        return f"logit_bias names token {token}; the vocabulary has ids 0 to {n_vocab - 1}"
    if math.isnan(bias) or bias == math.inf:
        return f"logit_bias of token {token} is {bias}; expected a finite number or -inf"
    return ""


class Sampler:
    """Draw tokens one after another; equal seeds and logits give equal tokens.

    The caller passes every token of the prompt and every token drawn to `accept` or `accept_all`;
    the penalties use them.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self.params = params = params.validate(n_vocab).seeded()
        self.n_vocab = n_vocab
        self._rng = np.random.Generator(np.random.PCG64(params.seed))
        self._recent: deque[int] = deque(maxlen=params.repeat_last_n)
        bias = params.logit_bias
        self._bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self._bias = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))

    def accept(self, token: int) -> None:
        """Record one token of the text for the penalties."""
        self._recent.append(token)

    def accept_all(self, tokens: Iterable[int]) -> None:
        """Record the tokens of a prompt, oldest first."""
        self._recent.extend(int(token) for token in tokens)

    def sample(self, logits: FloatArray) -> int:
        """Return the id of the next token.

        Shapes: logits ``[n_vocab]`` F32, finite or -inf; left unchanged.

        Raises:
            RequestError: the logit bias excludes every token.
        """
        if self.params.is_greedy and self.params.typical_p >= 1.0:
            adjusted = self._adjust(logits)
            token = int(adjusted.argmax())
            _require_candidate(adjusted[token])
            return token
        ids, probs = self.distribution(logits)
        if self.params.is_greedy:
            return int(ids[probs.argmax()])
        cumulative = probs.cumsum()
        total = cumulative[-1]
        drawn = np.searchsorted(cumulative, self._rng.random() * total, side="right")
        # Rounding can move a draw just below 1 past the end: take the last token with probability.
        return int(ids[min(drawn, np.searchsorted(cumulative, total))])

    def distribution(self, logits: FloatArray) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """Return the remaining token ids and their probabilities after the whole chain.

        A temperature of 0 or less is not applied: these are then the probabilities before it.

        Shapes: logits ``[n_vocab]`` F32; ids and probabilities ``[n_candidates]``.
        """
        params = self.params
        ids, kept = _top_k(self._adjust(logits), params.top_k)
        _require_candidate(kept.max())
        if params.typical_p < 1.0:
            ids, kept = _typical(ids, kept, params.typical_p)
        if params.top_p < 1.0:
            ids, kept = _top_p(ids, kept, params.top_p)
        if params.min_p > 0.0:
            near = kept >= kept.max() + np.float32(math.log(params.min_p))
            ids, kept = ids[near], kept[near]
        if not params.is_greedy:
            # Subtract the maximum first, so that a tiny temperature cannot overflow.
            kept = (kept - kept.max()) / np.float64(params.temperature)
        return ids, _softmax(kept)

    def _adjust(self, logits: FloatArray) -> FloatArray:
        """Return the logits with bias and penalties; a copy only if one of them applies."""
        recent = self._recent if self.params.has_penalties else ()
        if not recent and not self._bias_ids.size:
            return logits
        adjusted = logits.astype(np.float32, copy=True)
        adjusted[self._bias_ids] += self._bias
        if recent:
            self._penalize(adjusted)
        return adjusted

    def _penalize(self, logits: FloatArray) -> None:
        params = self.params
        ids, counts = np.unique(np.fromiter(self._recent, dtype=np.int64), return_counts=True)
        seen = logits[ids]
        # A negative logit is multiplied: dividing it would make the token likelier.
        seen = np.where(seen <= 0, seen * params.repeat_penalty, seen / params.repeat_penalty)
        logits[ids] = seen - (counts * params.frequency_penalty + params.presence_penalty)


def _require_candidate(largest: np.floating[Any]) -> None:
    if largest == -np.inf:
        raise RequestError("logit_bias excludes every token; leave at least one")


def _softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    weights = np.exp(logits - logits.max()).astype(np.float64)
    probs: npt.NDArray[np.float64] = weights / weights.sum()
    return probs


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
    probs = _softmax(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = float(np.sum(probs * np.where(probs > 0, surprise, 0.0)))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    cumulative = probs[order].cumsum()
    n_keep = int(np.searchsorted(cumulative, p, side="right")) + 1
    kept = order[:n_keep]
    return ids[kept], logits[kept]


def _top_p(ids: IntArray, logits: FloatArray, p: float) -> tuple[IntArray, FloatArray]:
    """Keep the likeliest tokens up to and including the one whose cumulative sum reaches p."""
    weights = np.exp(logits - logits.max())
    total = weights.sum(dtype=np.float64)
    if ids.size > 4 * _TOP_P_FIRST:
        likely, largest = _top_k(logits, _TOP_P_FIRST)
        if np.exp(largest - largest[0]).sum(dtype=np.float64) / total >= p:
            ids, logits = ids[likely], largest
    ids, logits = _descending(ids, logits)
    cumulative = np.exp(logits - logits[0]).cumsum(dtype=np.float64) / total
    n_keep = int(np.searchsorted(cumulative, p, side="left")) + 1
    return ids[:n_keep], logits[:n_keep]
