"""Replay a routing trace under a policy and a placement: hit rates, bytes, and predicted speed.

The replay calls the expert cache of a run, in the order in which the layered runner calls it. If a
layer's graph fetches, its victims are chosen before the token. If the host handles missing experts,
an uploaded expert may get a slot at once, and an expert that the CPU computed may be promoted. Only
the times are predicted (experts/cost.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..experts.cache import MAX_PROMOTED, ExpertCache
from ..experts.cachestats import CacheStats
from ..experts.cost import Machine, machine_fetches, split_for, streams_rare_misses, usual_slots
from ..experts.policy import Policy
from .profile import Profile
from .trace import Trace

# Rows of a prompt chunk: the default of -ub.
PROMPT_ROWS = 512


@dataclass(frozen=True)
class Simulation:
    """What a replay found, for its counted tokens.

    missing: distinct missing experts, numpy [n_tokens, n_layer]. step_s [n_tokens]: predicted
    seconds of each token. n_streamed: experts uploaded or fetched for the token that missed them.
    n_cpu, n_promoted: experts computed on the CPU, and promoted. uploaded_bytes: bytes of all
    experts that crossed to the device.
    """

    stats: CacheStats
    missing: npt.NDArray[np.int64]
    step_s: npt.NDArray[np.float64]
    n_streamed: int
    n_cpu: int
    n_promoted: int
    uploaded_bytes: int

    @property
    def n_tokens(self) -> int:
        """Return the number of counted tokens."""
        return len(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Return the predicted tokens per second, 0 without tokens."""
        total = float(self.step_s.sum())
        return self.n_tokens / total if total else 0.0

    @property
    def hit_rate(self) -> float:
        """Return hits over choices, full layers included."""
        return self.stats.hit_rate

    @property
    def bytes_per_token(self) -> float:
        """Return the uploaded bytes per token, 0 without tokens."""
        return self.uploaded_bytes / self.n_tokens if self.n_tokens else 0.0

    def quarters(self) -> list[float]:
        """Return the mean missing experts per token in each quarter of the replay."""
        parts = np.array_split(self.missing.sum(axis=1), 4)
        return [float(part.mean()) if part.size else 0.0 for part in parts]


class _Replay:
    """Drives a cache as the runner's MissHandler does, and counts.

    fetch_layers: layers whose graphs fetch. base: seconds of a token that misses nothing. uploaded
    [n_layer]: experts that crossed to the device.
    """

    def __init__(self, cache: ExpertCache, machine: Machine, mode: str, is_pinned: bool) -> None:
        self.cache = cache
        self.fetch_layers = _fetch_layers(cache, machine, mode) if is_pinned else frozenset()
        n_fetching = len(self.fetch_layers)
        n_by_host = sum(n < cache.n_expert for n in cache.n_slots) - n_fetching
        self.base = (
            machine.whole + machine.host_layer * n_by_host + machine.fetch_layer * n_fetching
        )
        n_used, one = cache.n_expert_used, (machine.cpu(1), machine.stream(1))
        if mode == "auto" and streams_rare_misses(*one, min(cache.n_slots), cache.n_expert):
            mode = "stream"
        self.split = split_for(machine, mode, n_used)
        # tables, because every miss needs them: stalls[n missing][c of them on the CPU]
        self.stalls = [[machine.stall(c, n - c) for c in range(n + 1)] for n in range(n_used + 1)]
        self.fetches = [machine.fetch(n) for n in range(n_used + 1)]
        self.promoted: list[tuple[int, int]] = []
        self.n_streamed = self.n_cpu = self.n_promoted = 0
        self.uploaded = [0] * len(cache.n_slots)

    def _begin_pass(self) -> None:
        for il, expert in self.promoted:
            self.cache.mark_resident(il, expert)
        self.promoted.clear()
        for il in self.fetch_layers & self.cache.dirty:
            self.cache.plan_victims(il)
        self.cache.dirty.clear()
        self.cache.begin_pass()

    def token(self, row: list[list[int]], missing: npt.NDArray[np.int64]) -> float:
        """Replay one token; return its seconds, and set missing [n_layer] where experts miss."""
        self._begin_pass()
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
        """Record what a graph fetched; as in a run, choose new victims only if they may differ."""
        self.cache.commit_fetched(il, absent, ids)
        if il in self.cache.dirty:
            self.cache.dirty.discard(il)
            self.cache.plan_victims(il)
        self.n_streamed += len(absent)
        self.uploaded[il] += len(absent)
        return self.fetches[len(absent)]

    def _resolve(self, il: int, absent: list[int], ids: list[int]) -> float:
        n = len(absent)
        n_cpu = self.split[n]
        self.n_streamed += n - n_cpu
        self.n_cpu += n_cpu
        self.uploaded[il] += n - n_cpu
        if self.cache.n_slots[il]:
            for expert in absent[: n - n_cpu]:
                self.cache.admit(il, expert, ids)
            room = max(0, MAX_PROMOTED - len(self.promoted))
            for expert in absent[n - n_cpu :][:room]:
                if self.cache.reserve_slot(il, expert, ids) is not None:
                    self.promoted.append((il, expert))
                    self.n_promoted += 1
                    self.uploaded[il] += 1
        return self.stalls[n][n_cpu]

    def prompt(self, ids: npt.NDArray[np.int32], exchange: bool) -> None:
        """Replay a prompt in chunks; with exchange, admit afterwards what the policy prefers."""
        for start in range(0, len(ids), PROMPT_ROWS):
            self._begin_pass()
            for il in range(ids.shape[1]):
                self.cache.access_batch(il, ids[start : start + PROMPT_ROWS, il])
        if exchange and len(ids):
            for il, n in enumerate(self.cache.n_slots):
                for expert in self.cache.wanted(il, n):
                    self.cache.admit(il, expert, ())


def _fetch_layers(cache: ExpertCache, machine: Machine, mode: str) -> frozenset[int]:
    """Return the layers whose graphs fetch."""
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

    n_slots [n_layer]: from a plan. mode: a value of --miss. profile: the experts that fill the
    slots at the start; without one, those with the lowest ids. skip: tokens after the prompt that
    are replayed but not counted. slot_bytes [n_layer]: bytes of one expert of each layer; default:
    those of the trace, else of the machine. exchange: after the prompt, give slots to the experts
    that the policy then prefers. is_pinned: the experts are in pinned memory, so graphs may fetch.

    Raises:
        RequestError: the trace does not fit the placement, or all its tokens are prompt or skipped.
    """
    shape = trace.shape
    if len(n_slots) != shape.n_layer:
        raise RequestError(f"the trace has {shape.n_layer} layers, the placement {len(n_slots)}")
    first = trace.n_prompt + skip
    if first >= trace.n_tokens:
        raise RequestError(
            f"the trace has {trace.n_tokens} tokens, and the first {first} are not counted "
            f"(prompt {trace.n_prompt}, skipped {skip}); record a longer trace or skip fewer"
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
    replay.uploaded = [0] * shape.n_layer
    rows = trace.ids[first:].tolist()
    step_s = [replay.token(row, missing[at]) for at, row in enumerate(rows)]
    sizes = slot_bytes or trace.slot_bytes or [machine.expert_bytes] * shape.n_layer
    return Simulation(
        cache.stats.since(before), missing, np.array(step_s), replay.n_streamed, replay.n_cpu,
        replay.n_promoted, sum(n * size for n, size in zip(replay.uploaded, sizes)),
    )  # fmt: skip


def warm_cache(
    trace: Trace, n_slots: Sequence[int], policy: Policy, profile: Profile | None,
    profile_class: str | None,
) -> ExpertCache:  # fmt: skip
    """Return a cache whose slots are filled as at the start of a run."""
    shape = trace.shape
    cache = ExpertCache(shape.n_expert, n_slots, policy, shape.n_expert_used)
    ranking = profile.ranking(profile_class).tolist() if profile else None
    shares = profile.shares(profile_class).tolist() if profile else None
    for il in range(shape.n_layer):
        cache.preload(il, ranking[il] if ranking else None, shares[il] if shares else None)
    return cache


def even_slots(n_layer: int, n_expert: int, share: float) -> list[int]:
    """Return slots [n_layer] for a share of all experts, 0 to 1, spread evenly."""
    each, extra = divmod(round(share * n_layer * n_expert), n_layer)
    return [min(each + (il < extra), n_expert) for il in range(n_layer)]
