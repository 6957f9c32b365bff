"""Replay a routing trace under a policy and a placement: hit rates, bytes, and predicted speed.

The replay drives the `Residency` of a run, one for each device, with the ids that the trace holds.
So it decides what a run decides. Only the times are predicted
(experts/cost.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from ..config import ExpertPolicy
from ..errors import RequestError
from ..experts.cache import ExpertCache
from ..experts.cachestats import CacheStats
from ..experts.cost import Machine, choose_ways, machine_costs, pass_time
from ..experts.hostlevel import HostLevel
from ..experts.residency import Pairs, Residency
from ..kinds import Kind
from ..resident.layout import host_slots
from .profile import Profile
from .trace import Trace

# From a stage to the next one on two cards of one machine, through host memory (two H200).
HOP_S = 50e-6


@dataclass(frozen=True)
class Simulation:
    """What a replay found, for its counted tokens.

    missing: distinct missing experts, numpy [n_tokens, n_layer]. step_s [n_tokens]: predicted
    seconds of each token. n_streamed: experts uploaded or fetched for the token that missed them.
    n_cpu, n_promoted: experts computed on the CPU, and promoted. uploaded_bytes: bytes of all
    experts that crossed to the device. stage_s [n_stages]: mean seconds of a token in each stage;
    hops are in step_s alone. file_bytes: bytes of experts read from the file.
    """

    stats: CacheStats
    missing: npt.NDArray[np.int64]
    step_s: npt.NDArray[np.float64]
    n_streamed: int
    n_cpu: int
    n_promoted: int
    uploaded_bytes: int
    stage_s: npt.NDArray[np.float64]
    file_bytes: int = 0

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
    def bytes_per_token(self) -> float:
        """Return the uploaded bytes per token, 0 without tokens."""
        return self.uploaded_bytes / self.n_tokens if self.n_tokens else 0.0

    def quarters(self) -> list[float]:
        """Return the mean missing experts per token in each quarter of the replay."""
        parts = np.array_split(self.missing.sum(axis=1), 4)
        return [float(part.mean()) if part.size else 0.0 for part in parts]


@dataclass(frozen=True)
class HostLimit:
    """Bytes of host memory for experts, and bytes a second at which a disk reads the others."""

    n_bytes: int
    disk_rate: float


class _Replay:
    """Drives the residency of a stage, pass by pass, and counts.

    level: of experts in host memory that does not hold all. layers: of the stage. routed: those
    with a router. n_streamed, n_cpu, n_promoted: as in `Simulation`. uploaded, read [n_layer]:
    experts that crossed to the device, and those that came from the file.
    """

    def __init__(
        self, residency: Residency, level: HostLevel | None, read_s: Sequence[float],
        machine: Machine, layers: range, routed: Sequence[int],
    ) -> None:  # fmt: skip
        """read_s [n_layer]: seconds of reading an expert from the file."""
        self.residency, self.layers, self.routed = residency, layers, routed
        self.level, self._read_s = level, read_s
        self.cache = residency.cache
        n_used = self.cache.n_expert_used
        self.machine = machine
        self.n_partial = sum(n < self.cache.n_expert for n in self.cache.n_slots)
        # tables, because every miss needs them: stalls[n missing][c of them on the CPU]
        self.stalls = [[machine.stall(c, n - c) for c in range(n + 1)] for n in range(n_used + 1)]
        self.fetches = [machine.fetch(n) for n in range(n_used + 1)]
        self.clear()

    def clear(self) -> None:
        """Count from now on."""
        self.n_streamed = self.n_cpu = self.n_promoted = 0
        self.uploaded, self.read = ([0] * len(self.cache.n_slots) for _ in range(2))

    def _move(self, il: int, admitted: Pairs, others: Sequence[int]) -> float:
        """Do what happens in host memory; return the seconds of reading from the file."""
        if self.level is None or il not in self.level.layers:
            return 0.0
        self.level.begin(il, others)
        n = len(self.level.move(il, admitted).read) + len(self.level.move(il, (), others).read)
        self.read[il] += n
        return n * self._read_s[il]

    def token(self, row: npt.NDArray[np.int32], missing: npt.NDArray[np.int64]) -> float:
        """Replay one token; return its seconds, and set missing [n_layer] where experts miss."""
        residency, machine = self.residency, self.machine
        fetch_layers = residency.begin_pass(Kind.DECODE, 1).mode.fetch_layers
        residency.begin_fetch(fetch_layers)
        # of a token that misses nothing
        seconds = machine.whole * (len(self.layers) / len(self.cache.n_slots))
        seconds += machine.fetch_layer * len(fetch_layers)
        seconds += machine.host_layer * (self.n_partial - len(fetch_layers))
        for il in self.routed:
            ids = row[il]
            if il in fetch_layers:
                n = len(residency.fetched(il, ids).experts)
                self.n_streamed += n
                self.uploaded[il] += n
                missing[il] = n
                seconds += self.fetches[n]
            elif remedy := residency.routed(il, ids):
                n_cpu, n_promoted = len(remedy.on_cpu), len(remedy.promoted)
                n_streamed = len(remedy.admitted) + len(remedy.staged)
                self.n_streamed += n_streamed
                self.n_cpu += n_cpu
                self.n_promoted += n_promoted
                self.uploaded[il] += n_streamed + n_promoted
                missing[il] = n_streamed + n_cpu
                reading = self._move(il, remedy.admitted, remedy.staged)
                last = reading + self.stalls[1][0] if reading else 0.0  # others go meanwhile
                seconds += max(self.stalls[n_streamed + n_cpu][n_cpu], last)
        residency.results_arrived(seconds)
        return seconds

    def prompt(self, ids: npt.NDArray[np.int32]) -> None:
        """Replay a prompt; a long one keeps what it sends and the policy prefers."""
        residency = self.residency
        terms = residency.begin_pass(Kind.PREFILL, len(ids))
        residency.begin_fetch(terms.mode.fetch_layers)
        for il in self.routed:
            chosen = ids[:, il].reshape(-1)
            if il in terms.mode.fetch_layers:
                residency.fetched(il, chosen)
                continue
            missing = residency.routed(il, chosen)
            if missing and not terms.mode.admits:
                slots = residency.preferred(il, missing.staged)
                kept = list(slots.items())
                residency.keep(il, kept)
                self._move(il, kept, [e for e in missing.staged if e not in slots])
        residency.results_arrived()


def simulate(
    trace: Trace, n_slots: Sequence[int], policy: ExpertPolicy, machine: Machine, *,
    mode: str = "auto", profile: Profile | None = None, profile_class: str | None = None,
    skip: int = 0, slot_bytes: Sequence[int] | None = None, is_pinned: bool = True,
    stages: Sequence[range] = (), limit: HostLimit | None = None,
) -> Simulation:  # fmt: skip
    """Replay a trace.

    n_slots [n_layer]: from a plan. mode: a value of --miss. profile: the experts that fill the
    slots at the start; without one, those with the lowest ids. skip: tokens after the prompt that
    are replayed but not counted. slot_bytes [n_layer]: bytes of one expert of each layer, 0 for a
    dense one; default: those of the trace, else of the machine. is_pinned: the experts are in
    pinned memory, so graphs may fetch. stages: the layers of each device, if there are several;
    each takes the machine's times. limit: of host memory; None: all experts have room.
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
    sizes = slot_bytes or trace.slot_bytes or [machine.expert_bytes] * shape.n_layer
    stages = stages or (range(shape.n_layer),)
    replays = []
    for layers in stages:
        routed = [il for il in layers if sizes[il]]
        own = [n if il in routed else shape.n_expert for il, n in enumerate(n_slots)]
        cache = warm_cache(trace, own, policy, profile, profile_class)
        replays.append(_open_replay(cache, machine, mode, layers, sizes, is_pinned, limit))
    ids = trace.ids.astype(np.int32)
    missing = np.zeros((trace.n_tokens - first, shape.n_layer), dtype=np.int64)
    unseen = np.zeros(shape.n_layer, dtype=np.int64)
    before = []
    for replay in replays:
        if trace.n_prompt:
            replay.prompt(ids[: trace.n_prompt])
        for row in ids[trace.n_prompt : first]:
            replay.token(row, unseen)
        before.append(replay.cache.stats)
        replay.clear()
    seconds = np.array(
        [
            [replay.token(row, missing[at]) for replay in replays]
            for at, row in enumerate(ids[first:])
        ]
    )
    stats = CacheStats.joined([r.cache.stats.since(old) for r, old in zip(replays, before)])
    return Simulation(
        stats, missing, seconds.sum(axis=1) + HOP_S * (len(stages) - 1),
        sum(r.n_streamed for r in replays), sum(r.n_cpu for r in replays),
        sum(r.n_promoted for r in replays),
        sum(n * size for r in replays for n, size in zip(r.uploaded, sizes)), seconds.mean(axis=0),
        sum(n * size for r in replays for n, size in zip(r.read, sizes)),
    )  # fmt: skip


def _open_replay(
    cache: ExpertCache, machine: Machine, mode: str, layers: range, sizes: Sequence[int],
    is_pinned: bool, limit: HostLimit | None,
) -> _Replay:  # fmt: skip
    """Return the replay of a stage."""
    n_slots, n_used = cache.n_slots, cache.n_expert_used
    routed = [il for il in layers if sizes[il]]
    level = open_level(cache, n_slots, sizes, limit, len(routed) / sum(map(bool, sizes)))
    costs = machine_costs(machine, n_used)
    ways = choose_ways("stream" if level else mode, costs, n_slots, n_used, cache.n_expert)
    pinned = [il for il in routed if is_pinned and not (level and il in level.layers)]
    residency = Residency(cache, ways, fetchable=pinned)
    read_s = [size / limit.disk_rate if limit else 0.0 for size in sizes]
    return _Replay(residency, level, read_s, machine, layers, routed)


def open_level(
    cache: ExpertCache, n_slots: Sequence[int], sizes: Sequence[int], limit: HostLimit | None,
    share: float = 1.0,
) -> HostLevel | None:  # fmt: skip
    """Return what host memory holds as at the start of a run; None if it has room for all experts.

    sizes [n_layer]: bytes of an expert. share: of the limit.
    """
    missing = {il: sizes[il] for il, n in enumerate(n_slots) if n < cache.n_expert}
    room = int(limit.n_bytes * share) if limit else None
    held = host_slots(room, missing, n_slots, cache.n_expert)
    held = {il: n for il, n in held.items() if n < cache.n_expert}
    if not held:
        return None
    level = HostLevel(cache, held)
    for il in held:
        level.fill(il)
    return level


def warm_cache(
    trace: Trace, n_slots: Sequence[int], policy: ExpertPolicy, profile: Profile | None,
    profile_class: str | None,
) -> ExpertCache:  # fmt: skip
    """Return a cache whose slots are filled as at the start of a run."""
    shape = trace.shape
    cache = ExpertCache(shape.n_expert, n_slots, policy, shape.n_expert_used)
    ranking = profile.ranking(profile_class).tolist() if profile else None
    shares = profile.shares(profile_class).tolist() if profile else None
    for il, layer in enumerate(cache.layers):
        layer.preload(ranking[il] if ranking else None, shares[il] if shares else None)
    return cache


def even_slots(routed: Sequence[bool], n_expert: int, share: float) -> list[int]:
    """Return slots [n_layer] for a share of all experts, 0 to 1, spread evenly.

    routed [n_layer]: whether a layer has experts; one without counts as full.
    """
    each, extra = divmod(round(share * sum(routed) * n_expert), sum(routed))
    found = zip(routed, accumulate(routed))
    return [min(each + (n <= extra), n_expert) if has else n_expert for has, n in found]


def throughput(stage_seconds: Sequence[float], n_seq: int) -> tuple[float, int, float]:
    """Return tokens a second of n_seq sequences in stages in a row, and how they come about.

    A token passes all stages in turn. Sequences divide into groups, and stages work on different
    groups at once; but a pass of fewer rows costs more for each. So all numbers of groups are
    tried: the second result is the best. The third is the share of the time in which a stage
    computes, the mean of all. stage_seconds: of each stage, for a pass of one row.
    """

    def of_groups(n_groups: int) -> tuple[float, int, float]:
        scale, total = pass_time(-(-n_seq // n_groups)), sum(stage_seconds)
        through = scale * total + HOP_S * len(stage_seconds)
        # a group comes back after it has been through; a stage takes the groups one after another
        round_s = max(through, n_groups * scale * max(stage_seconds))
        busy = n_groups * scale * total / (len(stage_seconds) * round_s)
        return n_seq / round_s, n_groups, busy

    each = (of_groups(n) for n in range(1, min(n_seq, 4 * len(stage_seconds)) + 1))
    return max(each, key=itemgetter(0))
