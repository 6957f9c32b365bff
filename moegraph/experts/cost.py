"""What a missing expert costs on a machine: uploaded, computed on the CPU, or fetched by a graph.

If the host handles the n missing experts of a layer and gives c of them to the CPU, the layer waits
for the slower of the two:

    stall = fixed + max(0, max(stream(n - c), cpu(c)) - overlap)

`stream` (uploads) and `cpu` are measured curves over the number of experts. `overlap` is how long
the layer's own graph runs on after the host has seen the ids.

If the layer's graph fetches the experts, the layer takes fetch(n) longer, a curve too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import numpy as np

from ..kinds import MAX_CPU_ROWS, MAX_FETCH_ROWS

# What a launch of a kernel takes. On an H200, a token of a 35B-A3B takes llama.cpp 4.48 ms in 1,580
# kernels, and took moegraph 2.33 ms in 661, of the same weights; later 1.67 in 430, 1.62 in 304.
LAUNCH_S = 2.34e-6


@dataclass(frozen=True)
class Curve:
    """Seconds for n experts: linear between the points; the last line continues beyond them.

    points: (n, seconds); n rises and is at least 1, seconds never fall.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, n: float) -> float:
        """Return the seconds for n experts, 0 for none."""
        if n <= 0:
            return 0.0
        points = self.points
        if len(points) == 1 or n <= points[0][0]:
            return points[0][1] * max(n / points[0][0], 1.0)
        after = next((at for at, (x, _) in enumerate(points) if n <= x), len(points) - 1)
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        return y0 + (y1 - y0) * (n - x0) / (x1 - x0)

    @property
    def latency(self) -> float:
        """Return the seconds that do not grow with n: what the last line leaves for no expert."""
        if len(self.points) == 1:
            return 0.0
        (x0, y0), (x1, y1) = self.points[-2:]
        return min(max(0.0, y1 - (y1 - y0) * x1 / (x1 - x0)), self.points[0][1])

    def scaled(self, by: float, latency: float = 0.0) -> Curve:
        """Return the curve with all but the latency multiplied."""
        return Curve(tuple((n, latency + (s - latency) * by) for n, s in self.points))


@dataclass(frozen=True)
class Machine:
    """Times of one machine and model, in seconds, measured or computed from data sheets.

    n_layer, expert_bytes: of the model that was used, as are token_bytes, the weights that a token
    reads, token_params, those that it uses, and token_launches, kernels of LAUNCH_S. whole: a token
    in one graph with all experts resident. Every layer that is not full adds host_layer (graph
    boundary, look-up of slots) if the host handles its missing experts, or fetch_layer if its graph
    fetches them. fixed, overlap, stream, cpu, fetch: see the module. about: what the machine is, in
    words. prompt: a prompt of n rows in one chunk, all experts resident; None if unknown.
    """

    name: str
    n_layer: int
    expert_bytes: int
    token_bytes: int
    token_params: int
    token_launches: int
    whole: float
    host_layer: float
    fixed: float
    overlap: float
    stream: Curve
    cpu: Curve
    fetch_layer: float
    fetch: Curve
    about: str = ""
    prompt: Curve | None = None

    @property
    def title(self) -> str:
        """Return the name, and in brackets what the machine is."""
        return f"{self.name} ({self.about})" if self.about else self.name

    def stall(self, n_cpu: float, n_streamed: float) -> float:
        """Return the seconds a layer waits for its missing experts, 0 if there are none."""
        if n_cpu + n_streamed <= 0:
            return 0.0
        slower = max(self.stream(n_streamed), self.cpu(n_cpu))
        return self.fixed + max(0.0, slower - self.overlap)

    def scaled(
        self, n_layer: int, expert_bytes: int, token: tuple[int, int, int] | None = None
    ) -> Machine:
        """Return this machine for a model of other sizes.

        token: its token_bytes, token_params and token_launches; None: each layer has those of the
        measured model. Of `whole`, launches are replaced, and the rest scales with token_bytes.
        Of the curves, all but the latency scales with the bytes of an expert. `prompt` scales with
        the parameters.
        """
        layers, larger = n_layer / self.n_layer, expert_bytes / self.expert_bytes
        own = self.token_bytes, self.token_params, self.token_launches
        n_bytes, n_params, n_launches = token or (n * layers for n in own)
        launch = min(LAUNCH_S, self.whole / self.token_launches)
        reading = (self.whole - launch * self.token_launches) * n_bytes / self.token_bytes
        curves = self.stream, self.cpu, self.fetch
        stream, cpu, fetch = (curve.scaled(larger, curve.latency) for curve in curves)
        return replace(
            self, n_layer=n_layer, expert_bytes=expert_bytes, token_bytes=round(n_bytes),
            token_params=round(n_params), token_launches=round(n_launches),
            whole=launch * n_launches + reading, stream=stream, cpu=cpu, fetch=fetch,
            prompt=self.prompt and self.prompt.scaled(n_params / self.token_params),
        )  # fmt: skip


def best_split(on_cpu: Sequence[float], streamed: Sequence[float]) -> list[int]:
    """Return how many of n missing experts the CPU should take, for n = 0 .. len(on_cpu) - 1.

    on_cpu, streamed: seconds to compute 0, 1, ... experts on the CPU, and to upload them. Of equal
    splits it takes the one with more uploads, because uploaded experts can stay.
    """

    def best(n: int) -> int:
        return min(range(n + 1), key=lambda c: max(on_cpu[c], streamed[n - c]))

    return [best(n) for n in range(min(len(on_cpu), len(streamed)))]


# Weight of the last layer in what is known of the CPU's speed: a pass has some forty.
_CPU_WEIGHT = 0.03


class MissSplit:
    """How many of the missing experts of a layer the CPU computes; the device computes the others.

    on_cpu, streamed: measured seconds to compute, and to upload, 0, 1, ... experts of one row.
    per_row: what each further row adds to the time of an expert on the CPU, as a share of the first
    row; an upload takes the same time for any number of rows. decode: how many of 0, 1, ...
    missing experts of one row the CPU takes.
    """

    def __init__(
        self, on_cpu: Sequence[float], streamed: Sequence[float], per_row: float = 1.0
    ) -> None:
        self.on_cpu, self.streamed, self._per_row = list(on_cpu), list(streamed), per_row
        self._slower, self._expected = [1.0] * (MAX_CPU_ROWS + 1), 0.0
        self.decode = best_split(on_cpu, streamed)

    @classmethod
    def fixed(cls, n_expert_used: int, on_cpu: bool) -> MissSplit:
        """Return the split that gives all experts to the CPU, or none of them."""
        free, never = [0.0] * (n_expert_used + 1), [0.0] + [math.inf] * n_expert_used
        return cls(free, never) if on_cpu else cls(never, free)

    def n_cpu(self, rows: Sequence[int], n_rows: int = 0) -> int:
        """Return how many experts the CPU takes, counted from the end of rows.

        rows: how many rows chose each missing expert, in falling order. n_rows: of the pass.
        """
        n, more, slower = len(rows), self._per_row, self._slower[n_rows]
        # what the CPU computes if it takes 0, 1, ... experts
        loads = [0.0, *accumulate(1.0 + more * (r - 1) for r in reversed(rows))]

        def is_cpu_last(c: int) -> bool:
            return slower * _seconds(self.on_cpu, loads[c]) >= _seconds(self.streamed, n - c)

        # the fewest with which the CPU takes as long as the uploads; with all of them it does
        fewest = bisect_left(range(n), True, key=is_cpu_last)
        seconds = slower * _seconds(self.on_cpu, loads[fewest])
        if fewest and _seconds(self.streamed, n - fewest + 1) <= seconds:
            fewest -= 1
        self._expected = _seconds(self.on_cpu, loads[fewest])
        return fewest

    def took(self, n_rows: int, seconds: float) -> None:
        """Note how long the CPU took for what `n_cpu` gave it last, in a pass of n_rows rows.

        0: `n_cpu` gave it nothing. It was timed alone; beside uploads, which its first thread
        enqueues, it is slower.
        """
        if n_rows > 1 and seconds and 0.0 < self._expected < math.inf:
            slower = min(max(seconds / self._expected, 0.5), 4.0)
            self._slower[n_rows] += _CPU_WEIGHT * (slower - self._slower[n_rows])


# Share of the choices that miss, by the share of its experts that a layer has slots for: `lfu` on
# generated traces, which are as skewed as published 35B traces (docs/residency.md). They are
# constants: another policy, a flatter router or another text misses more or less.
_SHARES, _MISSING = (0.0, 0.09, 0.24, 0.39, 0.59, 1.0), (1.0, 0.34, 0.112, 0.047, 0.02, 0.0)
# If the host handles missing experts: seconds for every layer, and more for one that misses some.
# Measured on the server of the benchmarks (h200: host_layer and fixed), used for every machine. The
# reaction grows with the rows: 110 to 130 us were measured with 8 rows, 330 us with 32.
_BOUNDARY, _REACTION = 10e-6, 50e-6


def expected_missing(n_slots: float, n_expert: int, n_used: int, n_rows: float) -> float:
    """Return how many experts of a layer n_rows rows miss, if they choose independently.

    The number for one row is assumed from the share of slots (_MISSING).
    """
    n_of_row = n_used * float(np.interp(n_slots / n_expert, _SHARES, _MISSING))
    n_absent = max(n_expert - n_slots, n_of_row, 1.0)
    return n_absent * (1.0 - math.pow(1.0 - n_of_row / n_absent, n_rows))


def fetches_in_graph(
    on_cpu: Sequence[float], streamed: Sequence[float], n_missing: float, n_rows: int = 1
) -> bool:
    """Return whether graphs of n_rows rows should fetch, instead of the host handling misses.

    on_cpu, streamed: seconds to compute, and to upload, 0, 1, ... n_expert_used experts. n_missing:
    mean over layers. A fetching graph can only copy, at the bandwidth-limited time per expert, but
    never waits for the host.
    """
    n_used = min(len(on_cpu), len(streamed)) - 1
    stalls = [max(on_cpu[c], streamed[n - c]) for n, c in enumerate(best_split(on_cpu, streamed))]
    reaction = _REACTION * (1.0 + math.log2(n_rows))
    by_host = _BOUNDARY + min(n_missing, 1.0) * reaction + _seconds(stalls, n_missing)
    return n_missing * streamed[n_used] / n_used < by_host


def fetch_limit(
    on_cpu: Sequence[float], streamed: Sequence[float], n_rows: int, n_expert: int
) -> float:
    """Return up to how many missing experts of a layer graphs of n_rows rows should fetch."""
    if fetches_in_graph(on_cpu, streamed, n_expert, n_rows):
        return math.inf

    def is_more(thousandths: int) -> bool:
        return not fetches_in_graph(on_cpu, streamed, thousandths / 1000, n_rows)

    return (bisect_left(range(1000 * n_expert), True, key=is_more) - 1) / 1000


def _seconds(measured: Sequence[float], n: float) -> float:
    """Return the seconds for n experts: linear between points, proportional beyond the last."""
    last, at = len(measured) - 1, int(n)
    if at >= last:
        return measured[last] * (n / last)
    low = measured[at]
    return low if at == n else low + (measured[at + 1] - low) * (n - at)


@dataclass(frozen=True)
class MissCosts:
    """What was measured, or what a machine file says, about one model on one machine.

    on_cpu, streamed, per_row: as in `MissSplit`; empty if the CPU cannot compute experts, or if
    they are not needed.
    """

    on_cpu: tuple[float, ...] = ()
    streamed: tuple[float, ...] = ()
    per_row: float = 1.0


@dataclass(frozen=True)
class MissWays:
    """Who computes missing experts, decided once, before the first pass.

    split: how many of a layer's missing experts the CPU takes. cpu: it takes any.
    fetch_limits: for 1, 2, ... MAX_FETCH_ROWS rows, up to how many missing experts of a layer that
    can graphs fetch; no CPU is involved there. expected: how many are expected at first.
    """

    split: MissSplit
    cpu: bool
    fetch_limits: Sequence[float]
    expected: Sequence[float] = (0.0,) * MAX_FETCH_ROWS


def choose_ways(
    mode: str, costs: MissCosts, n_slots: Sequence[int], n_expert_used: int, n_expert: int
) -> MissWays:
    """Return who computes missing experts; mode: a value of --miss, n_slots [n_layer]."""
    if mode != "auto" or not costs.on_cpu:
        is_cpu = mode == "cpu"
        split = MissSplit.fixed(n_expert_used, is_cpu)
        return MissWays(split, is_cpu, (-1.0 if is_cpu else math.inf,) * MAX_FETCH_ROWS)
    on_cpu, streamed, widths = costs.on_cpu, costs.streamed, range(1, MAX_FETCH_ROWS + 1)
    # layers with fewer slots than a row chooses experts cannot fetch; full ones miss nothing
    able = [n for n in n_slots if n_expert_used <= n < n_expert]
    usual = sum(able) / max(len(able), 1)
    return MissWays(
        MissSplit(on_cpu, streamed, costs.per_row), True,
        [fetch_limit(on_cpu, streamed, n, n_expert) for n in widths],
        [expected_missing(usual, n_expert, n_expert_used, n) for n in widths],
    )  # fmt: skip


def machine_costs(machine: Machine, n_expert_used: int) -> MissCosts:
    """Return what a machine takes for 0, 1, ... n_expert_used experts."""
    counts = range(n_expert_used + 1)
    return MissCosts(tuple(map(machine.cpu, counts)), tuple(map(machine.stream, counts)))


# Weight of the last pass in the mean of what passes miss.
_WEIGHT = 0.25
# A change makes other graphs run and other lists due, so it must pay more than a little.
_SLACK, _FASTER = 1.2, 0.97
# So many passes of each way are compared; before those of a trial, others build graphs and lists.
_JUDGED, _SETTLING = 16, 4
# Each pass earns this part of a pass for trials. So many passes are what the first trial is taken
# to cost, as its graphs must be built, and what every other one costs at least.
_SHARE, _FIRST_PRICE, _LEAST_PRICE = 0.01, 10.0, 4.0


class _Width:
    """The choice for passes of one number of rows; mean, limit: of missing experts of a layer."""

    def __init__(self, mean: float, limit: float) -> None:
        self.fetches = mean <= limit
        self._mean, self._limit = mean, limit
        self._times: list[float] = []  # seconds of the last passes; in a trial, of its passes
        self._usual = 0.0  # median of the passes before the trial; 0: no trial
        self._is_refuted = False  # the law says otherwise than `fetches`
        self._credit, self._price = 0.0, _FIRST_PRICE  # passes

    def _law(self) -> bool:
        return self._mean <= (_SLACK if self.fetches else 1.0 / _SLACK) * self._limit

    def observe(self, n_missing: float, seconds: float) -> None:
        """Note what the last pass missed and took; decide about the next one."""
        self._mean += _WEIGHT * (n_missing - self._mean)
        if self._usual:
            self._times.append(seconds)
            if len(self._times) == _SETTLING + _JUDGED:
                self._judge()
            return
        if self._is_refuted != (self._law() != self.fetches):
            self._is_refuted = not self._is_refuted
            self._times.clear()  # of another text
        self._times = [*self._times, seconds][-_JUDGED:]
        self._credit = min(self._credit + _SHARE, self._price)
        is_near = self._limit / 3 < self._mean < 3 * self._limit
        needed = 0.0 if self._is_refuted else self._price if is_near else math.inf
        if self._credit >= needed and len(self._times) == _JUDGED:
            self._usual, self._times = float(np.median(self._times)), []
            self.fetches = not self.fetches

    def _judge(self) -> None:
        """End a trial: keep the way that was faster, and move the limit if it says otherwise."""
        times, usual = self._times, self._usual
        cost = max(sum(times) / usual - len(times), 0.0)
        self._credit, self._price = -cost, max(cost, _LEAST_PRICE)
        if np.median(times[_SETTLING:]) > _FASTER * usual:
            self.fetches = not self.fetches
        if self._law() != self.fetches:
            self._limit = self._mean
        self._usual, self._times, self._is_refuted = 0.0, [], False


class FetchChoice:
    """Whether graphs of passes fetch missing experts, for each number of rows.

    How much rows miss cannot be told in advance: those of most texts mostly choose what is
    resident, others do not, and sequences of different texts each need their own experts. Nor can
    the host's stall, which the machine, the sampler and other work lengthen. So the law
    (`fetches_in_graph`) applied to what the last passes missed only says what to try, and the
    clock decides: some passes go the other way, and the way whose median is lower by 3 % stays.
    If the law was wrong, its limit moves to what was missed then.

    Without the law's word, the other way is tried if the passes miss between a third and three
    times the limit. Trials wait until 1 % of the passes has paid for the last one.
    """

    def __init__(self, ways: MissWays, most_rows: int) -> None:
        """most_rows: whose ids a look-up takes."""
        limits = ways.fetch_limits[:most_rows]
        self.may_fetch = max(limits, default=-1.0) >= 0
        self._widths = [_Width(mean, limit) for mean, limit in zip(ways.expected, limits)]

    def fetches(self, n_rows: int) -> bool:
        """Return whether graphs of n_rows rows fetch."""
        return n_rows <= len(self._widths) and self._widths[n_rows - 1].fetches

    def observe(self, n_rows: int, n_missing: float, seconds: float) -> None:
        """Note how many experts a pass missed, the mean of the layers that can fetch, and its time.

        Passes of so many rows can fetch.
        """
        self._widths[n_rows - 1].observe(n_missing, seconds)


# Time of a pass over that of one row, with every expert resident: up to 16 rows as measured of a
# 35B-A3B (docs/benchmarks/drafts.jsonl), beyond as measured of an earlier version, scaled to that.
pass_time = cache(Curve((
    (1, 1.0), (2, 1.28), (3, 1.43), (4, 1.56), (8, 2.03), (12, 2.38), (16, 2.7), (23, 3.15),
    (32, 3.7), (65, 5.7),
)))  # fmt: skip
# How many rows of different texts choose as many experts as so many rows of one text.
independent_rows = Curve(
    ((1, 1.0), (2, 1.71), (4, 2.86), (8, 4.62), (16, 7.11), (32, 10.33), (65, 15.0))
)


@dataclass(frozen=True)
class Experts:
    """What missing experts cost. n_expert, n_expert_used: of the model.

    n_layer: layers with a router. miss_s: seconds that a pass takes longer for each missing expert.
    """

    n_layer: int
    n_expert: int
    n_expert_used: int
    miss_s: float

    def distinct(self, n_rows: int) -> float:
        """Return how many experts of all layers a pass of this many rows chooses."""
        unchosen = 1.0 - self.n_expert_used / self.n_expert  # of one row
        share = 1.0 - math.pow(unchosen, independent_rows(n_rows))
        return self.n_layer * self.n_expert * share
