"""What a missing expert costs on a machine: streamed to the device, computed on the CPU, or both.

A layer with missing experts stalls the token until the slower of the two paths is done:

    stall = fixed + max(0, max(stream(n - c), cpu(c)) - overlap)

n missing, c of them on the CPU. stream and cpu are measured curves over the number of experts: both
have a latency and a slope, and neither is known beforehand. `overlap` is how long the layer's own
B goes on after the host has seen the ids.

A layer whose graph fetches by itself waits for nobody: it stalls for fetch(n), a curve as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RequestError

_MAX_FILE = 64 * 1024
_MAX_POINTS = 64


@dataclass(frozen=True)
class Curve:
    """Seconds for n experts: straight lines between measured points, the last one continued.

    points: (n, seconds), n rising from 1 or more, seconds not falling.
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


@dataclass(frozen=True)
class Machine:
    """Times of one machine and model, in seconds, measured or reckoned.

    n_layer, expert_bytes: of the model it was measured with. whole: a token in one graph,
    everything resident. Added for each layer that is not pinned: look (graph boundary, look-up of
    slots), or lookup where its graph fetches by itself.
    fixed, overlap, stream, cpu, fetch: see above. about: what the machine is, in words.
    """

    name: str
    n_layer: int
    expert_bytes: int
    whole: float
    look: float
    fixed: float
    overlap: float
    stream: Curve
    cpu: Curve
    lookup: float
    fetch: Curve
    about: str = ""

    @property
    def title(self) -> str:
        """Return its name and what it is, in words."""
        return f"{self.name} ({self.about})" if self.about else self.name

    def stall(self, n_cpu: float, n_streamed: float) -> float:
        """Return how long a layer waits for its missing experts, 0 when there are none."""
        if n_cpu + n_streamed <= 0:
            return 0.0
        slower = max(self.stream(n_streamed), self.cpu(n_cpu))
        return self.fixed + max(0.0, slower - self.overlap)

    def scaled(self, n_layer: int, expert_bytes: int) -> Machine | None:
        """Return this machine for a model of other sizes, or None when that would be a guess.

        A token takes time by its layers, the curves stretch with the bytes; latencies stretch too,
        so nothing is said about experts more than three times larger or smaller.
        """
        ratio = expert_bytes / self.expert_bytes
        if not 1 / 3 <= ratio <= 3:
            return None

        def stretched(curve: Curve) -> Curve:
            return Curve(tuple((n, seconds * ratio) for n, seconds in curve.points))

        return replace(
            self, n_layer=n_layer, expert_bytes=expert_bytes,
            whole=self.whole * n_layer / self.n_layer, stream=stretched(self.stream),
            cpu=stretched(self.cpu), fetch=stretched(self.fetch),
        )  # fmt: skip


def _line(first: float, slope: float) -> Curve:
    """Return a curve of `first` for one expert and `slope` for each further one."""
    return Curve(((1, first), (2, first + slope)))


# Times of a 35B-A3B with experts of 1.9 MB. h200: fitted to speeds with 16 threads of a Xeon, which
# follow from it within 3 % where graphs fetched what was missing, within 10 % where the host saw to
# it (docs/benchmarks.md). desktop: reckoned for 24 GB at 936 GB/s, PCIe 4.0 at 25 GB/s and DDR5 at
# 60 GB/s.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "h200", 40, 1_900_000, whole=2.334e-3, look=10e-6, fixed=53e-6, overlap=0.0,
            stream=Curve(((1, 45e-6), (2, 82e-6), (8, 306e-6))),
            cpu=Curve(((1, 43e-6), (2, 63e-6), (4, 107e-6), (8, 189e-6))),
            lookup=0.9e-6, fetch=Curve(((1, 43e-6), (2, 81e-6), (8, 300e-6))),
            about="H200 and 16 threads of a Xeon, measured",
        ),
        Machine(
            "desktop", 40, 1_900_000, whole=7.0e-3, look=8e-6, fixed=45e-6, overlap=30e-6,
            stream=_line(86e-6, 76e-6), cpu=_line(62e-6, 32e-6),
            lookup=2e-6, fetch=_line(86e-6, 76e-6),
            about="24 GB card, PCIe 4.0, DDR5; reckoned from data sheets",
        ),
    )
}  # fmt: skip


def best_split(on_cpu: Sequence[float], streamed: Sequence[float]) -> list[int]:
    """Return how many of n missing experts the CPU should take, for n = 0 .. len(on_cpu) - 1.

    on_cpu, streamed: seconds for 0, 1, ... experts on either path. Of equal choices the one that
    streams more is taken: what was streamed can stay.
    """

    def best(n: int) -> int:
        return min(range(n + 1), key=lambda c: max(on_cpu[c], streamed[n - c]))

    return [best(n) for n in range(min(len(on_cpu), len(streamed)))]


class MissSplit:
    """How many of the missing experts of a layer the CPU takes, and how many the device.

    on_cpu, streamed: seconds for 0, 1, ... experts that one row chose, as measured. per_row: what a
    further row adds to an expert on the CPU, as a share of the first; the device does not mind, a
    copy is a copy. decode, bypassed: the answers for 0, 1, ... experts of one row.
    """

    def __init__(
        self, on_cpu: Sequence[float], streamed: Sequence[float], per_row: float = 1.0
    ) -> None:
        self.on_cpu, self.streamed, self._per_row = list(on_cpu), list(streamed), per_row
        counts = range(min(len(on_cpu), len(streamed)))
        self.decode = best_split(on_cpu, streamed)
        self.bypassed = [n if on_cpu[n] <= streamed[n] else self.decode[n] for n in counts]

    @classmethod
    def fixed(cls, n_expert_used: int, on_cpu: bool) -> MissSplit:
        """Return the split that gives all experts to the CPU, or none."""
        free, never = [0.0] * (n_expert_used + 1), [0.0] + [math.inf] * n_expert_used
        return cls(free, never) if on_cpu else cls(never, free)

    def n_cpu(self, rows: Sequence[int], bypassed: bool = False) -> int:
        """Return how many experts the CPU takes, the last ones.

        rows: how many rows chose each missing expert, falling. bypassed: nothing is gained by what
        was streamed, so the CPU takes all where it is quicker by itself.
        """
        n, load = len(rows), 0.0
        if bypassed:
            total = sum(1.0 + self._per_row * (r - 1) for r in rows)
            if _seconds(self.on_cpu, total) <= _seconds(self.streamed, n):
                return n
        best, found = _seconds(self.streamed, n), 0
        for c, r in enumerate(reversed(rows), 1):
            load += 1.0 + self._per_row * (r - 1)
            cpu, rest = _seconds(self.on_cpu, load), _seconds(self.streamed, n - c)
            if max(cpu, rest) < best:
                best, found = max(cpu, rest), c
            if cpu >= rest:
                break
        return found


# The CPU computes one missing expert only where streaming it takes so many times as long.
_CPU_ADVANTAGE = 1.5


def streams_rare_misses(cpu_one: float, stream_one: float, n_slots: int, n_expert: int) -> bool:
    """Return whether to stream every missing expert, so that nothing is published for the CPU.

    cpu_one, stream_one: seconds for one expert. n_slots: of the layer that has the fewest. Where
    half of the experts or more are resident, few layers miss, and mostly one; publishing
    activations costs every layer, and what was streamed can stay. So streaming one expert has to
    take 1.5 times as long as computing it on the CPU before the CPU gets any.
    """
    return 2 * n_slots >= n_expert and stream_one < _CPU_ADVANTAGE * cpu_one


# Choices that miss in a layer with that share of its experts: `lfu` on traces of our generator,
# which is as skewed as published 35B traces (docs/residency.md). Another policy, a flatter router
# or another text misses more or less; nothing here is measured on the machine or the model.
_SHARES, _MISSING = (0.0, 0.09, 0.24, 0.39, 0.59, 1.0), (1.0, 0.34, 0.112, 0.047, 0.02, 0.0)
# Where the host sees to what is missing: seconds for each layer, and for each that lacks something.
# As on the server of the benchmarks (h200: look and fixed), and taken for every machine.
_BOUNDARY, _REACTION = 10e-6, 50e-6


def usual_slots(n_slots: Sequence[int], n_expert_used: int, n_expert: int) -> float:
    """Return the mean slots of those layers that can hold a row's experts and not all; 0: none."""
    able = [n for n in n_slots if n_expert_used <= n < n_expert]
    return sum(able) / len(able) if able else 0.0


def fetches_in_graph(
    on_cpu: Sequence[float], streamed: Sequence[float], n_slots: float, n_expert: int
) -> bool:
    """Return whether graphs should fetch what is missing by themselves.

    on_cpu, streamed: seconds for 0, 1, ... n_expert_used experts on either path. n_slots: of a
    layer, as `usual_slots` has them. Alone, the device can only copy, but nothing waits for the
    host: a graph takes for each expert what many at a time take.

    Only the curves are of this machine. How many experts are missing is assumed, by the share of
    slots alone (_MISSING), because no pass has run yet when this is decided, and it stays decided.
    """
    n_used = min(len(on_cpu), len(streamed)) - 1
    n_missing = n_used * float(np.interp(n_slots / n_expert, _SHARES, _MISSING))
    stalls = [max(on_cpu[c], streamed[n - c]) for n, c in enumerate(best_split(on_cpu, streamed))]
    by_host = _BOUNDARY + min(n_missing, 1.0) * _REACTION + _seconds(stalls, n_missing)
    return n_missing * streamed[n_used] / n_used < by_host


def _seconds(measured: Sequence[float], n: float) -> float:
    """Return the seconds for n experts: between two points on a line, beyond the last in ratio."""
    last, at = len(measured) - 1, int(n)
    if at >= last:
        return measured[last] * (n / last)
    low = measured[at]
    return low if at == n else low + (measured[at + 1] - low) * (n - at)


def split_for(machine: Machine, mode: str, n: int) -> list[int]:
    """Return `best_split` of a machine for up to n experts; mode: 'auto', 'cpu' or 'stream'."""
    if mode == "cpu":
        return list(range(n + 1))
    if mode == "stream":
        return [0] * (n + 1)
    counts = range(n + 1)
    return best_split([machine.cpu(c) for c in counts], [machine.stream(c) for c in counts])


def machine_fetches(
    machine: Machine, mode: str, n_expert_used: int, n_slots: float, n_expert: int
) -> bool:
    """Return whether graphs fetch what is missing by themselves, where they can.

    mode: as in `split_for`; the rest as in `fetches_in_graph`.
    """
    if mode != "auto":
        return mode == "stream"
    on_cpu, streamed = (
        [curve(n) for n in range(n_expert_used + 1)] for curve in (machine.cpu, machine.stream)
    )
    return fetches_in_graph(on_cpu, streamed, n_slots, n_expert)


def find_machine(name: str) -> Machine:
    """Return a machine by name, or from a JSON file.

    Raises:
        RequestError: no such name, and no file that describes a machine.
    """
    if name in MACHINES:
        return MACHINES[name]
    try:
        with open(name, "rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise RequestError(
            f"{name}: no such machine ({', '.join(MACHINES)}) and cannot read it as a file: "
            f"{error.strerror}"
        ) from error
    try:
        content = json.loads(data[:_MAX_FILE])
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RequestError(f"{name}: not a machine description, which is a JSON object")
    return _machine(name, content)


def machine_fields(machine: Machine) -> dict[str, Any]:
    """Return a machine as its JSON file has it: times in microseconds."""
    sizes = {name: getattr(machine, name) for name in _SIZES}
    times = {key: _us(getattr(machine, name)) for key, name in _TIMES.items()}
    curves = {
        key: [[n, _us(s)] for n, s in getattr(machine, name).points]
        for key, name in _CURVES.items()
    }
    return {"name": machine.name, "about": machine.about, **sizes, **times, **curves}


def _us(seconds: float) -> float:
    """Return microseconds to the picosecond, so that 8e-6 s is written as 8.0."""
    return round(seconds * 1e6, 6)


_SIZES = ("n_layer", "expert_bytes")
# Fields of the file, and of a Machine.
_TIMES = {
    "whole_us": "whole", "host_layer_us": "look", "fetch_layer_us": "lookup", "fixed_us": "fixed",
    "overlap_us": "overlap",
}  # fmt: skip
_CURVES = {"stream_us": "stream", "cpu_us": "cpu", "fetch_us": "fetch"}
# Texts, and what a measurement tells beside the times; nothing is computed from them.
_WORDS = ("name", "about", "measured")


def _machine(path: str, content: dict[str, Any]) -> Machine:
    def wrong(field: str, expected: str) -> RequestError:
        return RequestError(f"{path}: {field} is {content.get(field)!r}; expected {expected}")

    known = {*_WORDS, *_SIZES, *_TIMES, *_CURVES}
    unknown = sorted(set(content) - known)
    if unknown:
        listed = ", ".join(sorted(known))
        raise RequestError(f"{path}: unknown field {unknown[0]!r}; known: {listed}")
    name = content.get("name", Path(path).stem)
    sizes = {field: content.get(field) for field in _SIZES}
    for field, size in sizes.items():
        if type(size) is not int or size < 1:
            raise wrong(field, "a positive integer")
    texts = {"name": name, "about": content.get("about", "")}
    for field, text in texts.items():
        if not isinstance(text, str) or len(text) > 200:
            raise wrong(field, "a short text")
    times = {}
    for field, attribute in _TIMES.items():
        value = content.get(field, 0.0)
        if not _is_time(value) or (field == "whole_us" and not value):
            raise wrong(field, "microseconds")
        times[attribute] = value / 1e6
    curves: dict[str, Curve] = {}
    for field, attribute in _CURVES.items():
        points: Any = content.get(field)
        if field == "fetch_us" and field not in content:
            curves[attribute] = curves["stream"]  # the same bytes on the same way
            continue
        if not _is_curve(points):
            raise wrong(field, "[[n, microseconds], ...], both rising")
        curves[attribute] = Curve(tuple((n, us / 1e6) for n, us in points))
    fields: dict[str, Any] = {**texts, **sizes, **times, **curves}
    return Machine(**fields)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12


def _is_curve(points: Any) -> bool:
    """Return whether points is a list of (n, microseconds) as a Curve wants it."""
    if not isinstance(points, list) or not 1 <= len(points) <= _MAX_POINTS:
        return False
    if not all(isinstance(p, list) and len(p) == 2 and all(map(_is_time, p)) for p in points):
        return False
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(points, points[1:]))
    return rising and points[0][0] >= 1 and points[0][1] > 0
