"""Policies: which experts of a layer should be resident.

A policy is a frozen dataclass of parameters; `layer()` makes the state of one layer from it. Every
policy keeps a score for each expert, resident or not; the victim is the resident expert of lowest
score. Policies differ in how a choice of the router changes the score, and in when an absent expert
may evict the victim (`accepts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

Counts = npt.NDArray[np.int32] | npt.NDArray[np.int64]

# Scores are scaled back above this, long before a float overflows at 1.8e308.
_RESCALE = 1e100


class LayerPolicy(Protocol):
    """The state of a policy in one layer.

    score [n_expert]: scores in this list only rise; scaling them back replaces the list.
    """

    score: list[float]

    def touch(self, ids: Sequence[int]) -> None:
        """Note that one row chose ids; must be fast, as every layer of every token calls it."""

    def touch_batch(self, chosen: Counts, ids: npt.NDArray[np.int32], n_tokens: int) -> None:
        """Note the choices of n_tokens rows.

        chosen [n_expert]: how many rows chose each expert. ids: I32 [n_tokens * n_expert_used].
        """

    def accepts(self, expert: int, victim: int) -> bool:
        """Return whether expert, which is absent, should get the slot of victim."""

    def start(self, experts: Sequence[int], shares: Sequence[float] | None) -> None:
        """Score the experts that fill the slots at the start, best first.

        shares [n_expert]: the expected choices of each expert per token, from a profile.
        """


class Recency:
    """Score: when an expert was last chosen, in rows."""

    def __init__(self, n_expert: int) -> None:
        self.score = [0.0] * n_expert
        self._now = 0

    def touch(self, ids: Sequence[int]) -> None:
        """Set the scores of ids to the number of this row."""
        self._now = now = self._now + 1
        score = self.score
        for expert in ids:
            score[expert] = now

    def touch_batch(self, chosen: Counts, ids: npt.NDArray[np.int32], n_tokens: int) -> None:
        """Set the scores as if the rows had come one by one."""
        last = np.zeros(len(chosen), dtype=np.int64)
        # numpy keeps the last of several writes to one element
        last[ids] = 1 + np.arange(len(ids)) * n_tokens // len(ids)
        for expert in np.flatnonzero(chosen).tolist():
            self.score[expert] = self._now + int(last[expert])
        self._now += n_tokens

    def accepts(self, expert: int, victim: int) -> bool:
        """Return True: a missing expert was chosen later than any victim."""
        return True

    def start(self, experts: Sequence[int], shares: Sequence[float] | None) -> None:
        """Score experts in falling order, below every score that a choice gives."""
        for rank, expert in enumerate(experts, 1):
            self.score[expert] = -float(rank)


class Frequency:
    """Score: number of choices, each halved every half_life rows.

    Scores do not decay; later choices weigh more instead, which gives the same order.
    """

    def __init__(
        self, n_expert: int, half_life: float, hysteresis: float, prior_steps: float
    ) -> None:
        self.score = [0.0] * n_expert
        self._half_life = half_life
        self._growth = 2.0 ** (1.0 / half_life)
        self._hysteresis = hysteresis
        self._prior_steps = prior_steps
        self._weight = 1.0

    def touch(self, ids: Sequence[int]) -> None:
        """Add the weight of this row to the scores of ids."""
        self._weight = weight = self._weight * self._growth
        score = self.score
        for expert in ids:
            score[expert] += weight
        if weight > _RESCALE:
            self._rescale()

    def touch_batch(self, chosen: Counts, ids: npt.NDArray[np.int32], n_tokens: int) -> None:
        """Add the choices as if they were spread evenly over the n_tokens rows."""
        growth = self._growth
        # ten half-lives forget nearly everything, and more could overflow
        n_seen = min(n_tokens, 10.0 * self._half_life)
        self._weight *= growth**n_seen
        # mean of growth ** -age over the rows
        mean = (1.0 - growth**-n_seen) / (n_tokens * (1.0 - 1.0 / growth))
        each, score, seen = self._weight * mean, self.score, np.flatnonzero(chosen)
        for expert, n in zip(seen.tolist(), chosen[seen].tolist()):
            score[expert] += each * n
        if self._weight > _RESCALE:
            self._rescale()

    def _rescale(self) -> None:
        self.score = [s / self._weight for s in self.score]
        self._weight = 1.0

    def accepts(self, expert: int, victim: int) -> bool:
        """Return whether expert scores clearly higher, so that equal experts do not alternate."""
        return self.score[expert] > self._hysteresis * self.score[victim]

    def start(self, experts: Sequence[int], shares: Sequence[float] | None) -> None:
        """Score as if prior_steps tokens had chosen by shares; without shares, below one choice."""
        if shares is None:
            for rank, expert in enumerate(experts):
                self.score[expert] = 0.5 * self._weight * (1.0 - rank / max(len(experts), 1))
            return
        for expert, share in enumerate(shares):
            self.score[expert] = self._weight * self._prior_steps * share


@dataclass(frozen=True)
class Lru:
    """Evict the expert that was chosen longest ago."""

    name: ClassVar = "lru"
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}

    def layer(self, n_expert: int, n_slots: int, n_expert_used: int) -> LayerPolicy:
        """Return recency, or frequency if the slots cannot hold one token's experts.

        With fewer slots, LRU would evict every expert before it is chosen again.
        """
        if n_slots < n_expert_used:
            return Lfu().layer(n_expert, n_slots, n_expert_used)
        return Recency(n_expert)


@dataclass(frozen=True)
class Lfu:
    """Decayed frequency with hysteresis.

    half_life: tokens after which a choice counts half. hysteresis: an absent expert needs this
    multiple of the victim's score. prior_steps: how many tokens a profile counts for. ranges: of
    each parameter, the least and the most.
    """

    name: ClassVar = "lfu"
    ranges: ClassVar[dict[str, tuple[float, float]]] = {
        "half_life": (1.0, 1e6), "hysteresis": (1.0, 100.0), "prior_steps": (0.0, 1e6)
    }  # fmt: skip
    half_life: float = 96.0
    hysteresis: float = 1.1
    prior_steps: float = 8.0

    def layer(self, n_expert: int, n_slots: int, n_expert_used: int) -> LayerPolicy:
        """Return the frequency state of one layer."""
        return Frequency(n_expert, self.half_life, self.hysteresis, self.prior_steps)


Policy = Lru | Lfu
POLICIES: dict[str, type[Policy]] = {"lru": Lru, "lfu": Lfu}


def parse_policy(text: str) -> Policy:
    """Return the policy written as 'lru' or 'lfu:half_life=32,hysteresis=1.5'."""
    name, _, listed = text.partition(":")
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}; allowed: {', '.join(POLICIES)}")
    ranges, values = POLICIES[name].ranges, dict[str, float]()
    for item in filter(None, listed.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in ranges:
            allowed = ", ".join(ranges) or "none"
            raise ConfigError(f"policy {name} has no parameter {key!r}; allowed: {allowed}")
        try:
            values[key] = float(value)
        except ValueError:
            raise ConfigError(f"policy {name}: {key} is {value!r}; give a number") from None
        low, high = ranges[key]
        if not low <= values[key] <= high:  # NaN is not
            raise ConfigError(
                f"policy {name}: {key} is {values[key]:g}; allowed: {low:g} to {high:g}"
            )
    return POLICIES[name](**values)


def few_slots_warning(n_slots: Sequence[int], n_expert_used: int) -> str:
    """Return one line if layers have fewer slots than one token chooses experts, else ''."""
    short = [n for n in n_slots if 0 < n < n_expert_used]
    if not short:
        return ""
    return (
        f"{len(short)} of {len(n_slots)} layers have fewer slots (least {min(short)}) than a "
        f"token chooses experts ({n_expert_used}): most choices miss, and lru acts as lfu "
        f"there; try at least {n_expert_used * 2} slots a layer"
    )
