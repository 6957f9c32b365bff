"""Replay a routing trace under a policy and a placement: hit rates, bytes, and predicted speed.

The replay drives the expert cache itself, in the order in which the layered runner does: where a
graph fetches by itself, slots to give up are chosen before the token; elsewhere, what is streamed
may take a slot at once, and what the CPU computes may go up in the background and is resident from
the next token on. Only the times are a model (cost.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from .cache import MAX_PROMOTED, ExpertCache
from .cachestats import CacheStats
from .cost import Machine, machine_fetches, split_for, streams_rare_misses, usual_slots
from .policy import Policy
from .profile import Profile
from .trace import Trace

# Rows of a prompt chunk, by default.
PROMPT_ROWS = 512


@dataclass(frozen=True)
class Simulation:
    """What a replay found, for its counted tokens.

    missing: distinct experts missing, numpy [n_tokens, n_layer]. step_s [n_tokens]: predicted
    seconds of each token. n_streamed, n_cpu, n_promoted: experts streamed for a token's own use,
    computed on the CPU, and sent up in the background.
    """

    stats: CacheStats
    missing: npt.NDArray[np.int64]
    step_s: npt.NDArray[np.float64]
    n_streamed: int
    n_cpu: int
    n_promoted: int
    fetched_bytes: int

    @property
    def n_tokens(self) -> int:
        """Return how many tokens were counted."""
        return len(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Return the predicted speed; 0 without tokens."""
        total = float(self.step_s.sum())
        return self.n_tokens / total if total else 0.0

    @property
    def hit_rate(self) -> float:
        """Return hits over choices, pinned layers included."""
        return self.stats.hit_rate

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes moved to the device for a token."""
        return self.fetched_bytes / self.n_tokens if self.n_tokens else 0.0

    def quarters(self) -> list[float]:
        """Return the missing experts of a token in each quarter of the replay."""
        parts = np.array_split(self.missing.sum(axis=1), 4)
        return [float(part.mean()) if part.size else 0.0 for part in parts]


class _Replay:
    """Drives a cache as the layered runner's miss handling does, and counts.

    fetch_layers: layers whose graphs fetch. base: seconds of a token that misses nothing.
    """

    def __init__(self, cache: ExpertCache, machine: Machine, mode: str, is_pinned: bool) -> None:
        self.cache = cache
        self.fetch_layers = _fetch_layers(cache, machine, mode) if is_pinned else frozenset()
        n_waiting = sum(n < cache.n_expert for n in cache.n_slots) - len(self.fetch_layers)
        self.base = (
            machine.whole + machine.look * n_waiting + machine.lookup * len(self.fetch_layers)
        )
        n_used, one = cache.n_expert_used, (machine.cpu(1), machine.stream(1))
        if mode == "auto" and streams_rare_misses(*one, min(cache.n_slots), cache.n_expert):
            mode = "stream"
        self.split = split_for(machine, mode, n_used)
        # stalls of few missing experts are asked for again and again
        self.stalls = [[machine.stall(c, n - c) for c in range(n + 1)] for n in range(n_used + 1)]
        self.fetches = [machine.fetch(n) for n in range(n_used + 1)]
        self.promoted: list[tuple[int, int]] = []
        self.n_streamed = self.n_cpu = self.n_promoted = 0
        self.fetched = [0] * len(cache.n_slots)

    def _begin_step(self) -> None:
        for il, expert in self.promoted:
            self.cache.mark_resident(il, expert)
        self.promoted.clear()
        for il in self.fetch_layers & self.cache.dirty:
            self.cache.plan_victims(il)
        self.cache.dirty.clear()
        self.cache.begin_pass()

    def token(self, row: list[list[int]], missing: npt.NDArray[np.int64]) -> float:
        """Replay one token; return its seconds and note what each layer missed."""
        self._begin_step()
        seconds = self.base
        for il, ids in enumerate(row):
            absent = self.cache.access(il, ids)
            if absent:
                missing[il] = len(absent)
            if il in self.fetch_layers:
                seconds += self._commit_fetched(il, absent, ids)
            elif absent:
                seconds += self._resolve(il, absent, ids)
        return seconds

    def _commit_fetched(self, il: int, absent: list[int], ids: list[int]) -> float:
        """Note what a graph fetched; as in a run, a list is made anew only when it may change."""
        self.cache.commit_fetched(il, absent, ids)
        if il in self.cache.dirty:
            self.cache.dirty.discard(il)
            self.cache.plan_victims(il)
        self.n_streamed += len(absent)
        self.fetched[il] += len(absent)
        return self.fetches[len(absent)]

    def _resolve(self, il: int, absent: list[int], ids: list[int]) -> float:
        n = len(absent)
        n_cpu = self.split[n]
        self.n_streamed += n - n_cpu
        self.n_cpu += n_cpu
        self.fetched[il] += n - n_cpu
        if self.cache.n_slots[il]:
            for expert in absent[: n - n_cpu]:
                self.cache.admit(il, expert, ids)
            room = max(0, MAX_PROMOTED - len(self.promoted))
            for expert in absent[n - n_cpu :][:room]:
                if self.cache.reserve_slot(il, expert, ids) is not None:
                    self.promoted.append((il, expert))
                    self.n_promoted += 1
                    self.fetched[il] += 1
        return self.stalls[n][n_cpu]

    def prompt(self, ids: npt.NDArray[np.int32], exchange: bool) -> None:
        """Replay a prompt: chunks of many rows touch the cache; at its end experts may change."""
        for start in range(0, len(ids), PROMPT_ROWS):
            self._begin_step()
            for il in range(ids.shape[1]):
                self.cache.access_batch(il, ids[start : start + PROMPT_ROWS, il])
        if exchange and len(ids):
            for il, n in enumerate(self.cache.n_slots):
                for expert in self.cache.wanted(il, n):
                    self.cache.admit(il, expert, ())


def _fetch_layers(cache: ExpertCache, machine: Machine, mode: str) -> frozenset[int]:
    """Return the layers whose graphs fetch by themselves."""
    n_used, n_expert = cache.n_expert_used, cache.n_expert
    n_slots = usual_slots(cache.n_slots, n_used, n_expert)
    if not machine_fetches(machine, mode, n_used, n_slots, n_expert):
        return frozenset()
    return frozenset(il for il in range(len(cache.n_slots)) if cache.can_fetch(il))


def simulate(
    trace: Trace, n_slots: Sequence[int], policy: Policy, machine: Machine, *, mode: str = "auto",
    profile: Profile | None = None, profile_class: str | None = None, skip: int = 0,
    slot_bytes: Sequence[int] | None = None, exchange: bool = True, is_pinned: bool = True,
) -> Simulation:  # fmt: skip
    """Replay a trace.

    n_slots [n_layer]: as a plan has them. mode: 'auto', 'cpu' or 'stream'. profile: fills the slots
    at the start, the lowest ids without. skip: tokens behind the prompt that are replayed and not
    counted. slot_bytes [n_layer]: bytes of one expert; without, as the trace has them, or else as
    the machine's. exchange: at the end
    of the prompt, the slots get the experts that the policy prefers by then. is_pinned: the experts
    are in pinned host memory, so graphs may fetch them by themselves.

    Raises:
        RequestError: the trace does not fit the placement, or has no token left to count.
    """
    shape = trace.shape
    if len(n_slots) != shape.n_layer:
        raise RequestError(f"the trace has {shape.n_layer} layers, the placement {len(n_slots)}")
    first = trace.n_prompt + skip
    if first >= trace.n_tokens:
        raise RequestError(
            f"the trace has {trace.n_tokens} tokens, of which the first {first} are not counted "
            f"(prompt {trace.n_prompt}, skipped {skip}): nothing is left to replay"
        )
    cache = warm_cache(trace, n_slots, policy, profile, profile_class)
    replay = _Replay(cache, machine, mode, is_pinned)
    replay.prompt(trace.ids[: trace.n_prompt].astype(np.int32), exchange)
    missing = np.zeros((trace.n_tokens - first, shape.n_layer), dtype=np.int64)
    unseen = np.zeros(shape.n_layer, dtype=np.int64)
    for row in trace.ids[trace.n_prompt : first].tolist():
        replay.token(row, unseen)
    before = cache.stats
    replay.n_streamed = replay.n_cpu = replay.n_promoted = 0
    replay.fetched = [0] * shape.n_layer
    rows = trace.ids[first:].tolist()
    step_s = [replay.token(row, missing[at]) for at, row in enumerate(rows)]
    sizes = slot_bytes or trace.slot_bytes or [machine.expert_bytes] * shape.n_layer
    return Simulation(
        cache.stats.since(before), missing, np.array(step_s), replay.n_streamed, replay.n_cpu,
        replay.n_promoted, sum(n * size for n, size in zip(replay.fetched, sizes)),
    )  # fmt: skip


def warm_cache(
    trace: Trace, n_slots: Sequence[int], policy: Policy, profile: Profile | None,
    profile_class: str | None,
) -> ExpertCache:  # fmt: skip
    """Return a cache with its slots filled as at the start of a run."""
    shape = trace.shape
    cache = ExpertCache(shape.n_expert, n_slots, policy, shape.n_expert_used)
    ranking = profile.ranking(profile_class).tolist() if profile else None
    shares = profile.shares(profile_class).tolist() if profile else None
    for il in range(shape.n_layer):
        cache.preload(il, ranking[il] if ranking else None, shares[il] if shares else None)
    return cache


def even_slots(n_layer: int, n_expert: int, share: float) -> list[int]:
    """Return slots for a share of all experts, 0 to 1, as even as the planner spreads them."""
    each, extra = divmod(round(share * n_layer * n_expert), n_layer)
    return [min(each + (il < extra), n_expert) for il in range(n_layer)]
