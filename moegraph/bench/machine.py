"""Measure a machine with a model: the times from which `plan` and `simulate` predict speed.

Everything is timed in the engine that runs the model. Its router's choices are replaced by a
recording that misses a known number of experts in every layer of a token, so that what a miss costs
is the difference of two token times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..engine import Engine
from ..experts.cost import Curve, Machine, machine_fields
from ..experts.identity import RouterShape
from ..experts.trace import Trace, ids_dtype
from ..footprint import slot_bytes
from ..runner.cpu_experts import CpuExperts, KernelCpuExperts
from ..runner.cpu_experts_graph import GraphCpuExperts
from ..runner.misses import MissHandler
from ..threads import Threads, default_threads, waiting
from ..units import MiB, format_bytes

# Loads the model under a configuration, with recorded routing or with its own.
Load = Callable[[EngineConfig, Trace | None], Engine]

# Tokens of one kind; the first ones fill the slots and are not counted.
_N_TOKENS, _N_FIRST = 32, 8
_N_CTX = 512
_COPY_BYTES, _N_COPIES = 256 * MiB, 5


@dataclass(frozen=True)
class _Segment:
    """What tokens of one kind took: seconds, and how many experts each layer lacked."""

    seconds: float
    n_missing: float


def measure_machine(load: Load, name: str, config: EngineConfig) -> dict[str, Any]:
    """Return the measured times of this machine as `find_machine` reads them from a file.

    name: of the machine. config: device and threads; the rest of it is chosen here.
    """
    base: dict[str, Any] = {"n_ctx": _N_CTX, "profile": "none", "prefetch": "off"}
    with load(_changed(config, base), None) as engine:
        model = engine.file
        hp, device = engine.hparams, engine.device
        sizes = slot_bytes(model)
        whole = None
        if engine.mode == "whole":
            whole = float(np.median(_token_samples(engine, _N_TOKENS)[_N_FIRST:]))
        if device.is_cpu:  # one way to wait and one number of threads for all that is compared
            base["n_threads"], base["poll"] = engine.threads.tuner.current
        words = {
            "model": str(model.kv.get("general.name") or model.path.name),
            "device": device.description, "is_cpu": device.is_cpu,
        }  # fmt: skip
    shape = RouterShape(hp.n_layer, hp.n_expert, hp.n_expert_used)
    k = hp.n_expert_used
    n_slots = max(k, min(2 * k, hp.n_expert // 3))
    partial = {**base, "mode": "layered", "cache_slots": n_slots * hp.n_layer, "policy": "lru",
               "pin_layers": 0, "miss": "stream"}  # fmt: skip
    plan = [0, 1, k] if n_slots < hp.n_expert else [0]
    routing = _routing(shape, plan)
    with load(_changed(config, {**partial, "host_pin": "none"}), routing) as engine:
        by_host = [_segment(engine) for _ in plan]
        host_misses = _handler(engine)
        unpinned = stream = [host_misses.stream_seconds(n) for n in range(1, k + 1)]
        n_threads = config.n_threads or default_threads()
        threads = _thread_counts(n_threads)
        on_cpu = {n: _cpu_seconds(engine, host_misses, n, k) for n in threads}
    # as in a run: a card has what it may lack in pinned memory where that can be had
    pin = "all" if words["is_cpu"] else "auto"
    with load(_changed(config, {**partial, "host_pin": pin}), routing) as engine:
        if not words["is_cpu"]:
            stream = [_handler(engine).stream_seconds(n) for n in range(1, k + 1)]
        n_fetching = len(_handler(engine).miss_mode.fetch_layers)
        by_graph = [_segment(engine) for _ in plan] if n_fetching == hp.n_layer else []
    machine = _machine(name, words, sizes, whole, stream, on_cpu[n_threads], unpinned,
                       by_host, by_graph)  # fmt: skip
    return {**machine_fields(machine), "measured": _beside(
        words, n_threads, whole is not None, machine, stream, on_cpu
    )}  # fmt: skip


def _changed(config: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    settings = {"device": config.device, "n_threads": config.n_threads}
    return EngineConfig(**{**settings, **changes}).validate()


def _handler(engine: Engine) -> MissHandler:
    """Return what sees to missing experts, in an engine that may miss some."""
    misses: MissHandler = engine.runner.misses  # type: ignore[attr-defined]
    return misses


def _routing(shape: RouterShape, plan: Sequence[int]) -> Trace:
    """Return tokens that miss plan[0], then plan[1], ... experts in each layer.

    The others are always the same. Those that are missed come from so many that a least recently
    used one is gone by the time it comes again.
    """
    k, pool = shape.n_expert_used, shape.n_expert - shape.n_expert_used
    rows, at = [], 0
    for n in plan:
        for _ in range(_N_TOKENS):
            rows.append([*range(k - n), *(k + (at + i) % pool for i in range(n))])
            at += n
    ids = np.array(rows, dtype=ids_dtype(shape.n_expert))
    return Trace(shape, np.repeat(ids[:, None, :], shape.n_layer, axis=1))


def _segment(engine: Engine) -> _Segment:
    """Time the tokens of the next segment, and count what they missed."""
    _token_samples(engine, _N_FIRST)
    before = engine.expert_stats()
    samples = _token_samples(engine, _N_TOKENS - _N_FIRST)
    after = engine.expert_stats()
    assert before is not None and after is not None
    cache = after.since(before).cache
    n_layer = len(cache.missing)
    return _Segment(float(np.median(samples)), cache.missing_per_step / n_layer)


def _token_samples(engine: Engine, n: int) -> npt.NDArray[np.float64]:
    """Return the seconds of n single-token passes."""
    token, samples = np.zeros(1, dtype=np.int32), []
    for _ in range(n):
        start = time.perf_counter()
        engine.forward(token, greedy=True)
        samples.append(time.perf_counter() - start)
    return np.array(samples)


def _thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... threads and the most."""
    return sorted({min(2**power, most) for power in range(10)} | {most})


def _cpu_seconds(engine: Engine, misses: MissHandler, n_threads: int, k: int) -> list[float]:
    """Return the seconds that 1 to k experts take on the CPU with so many threads; [] if none."""
    store, device = misses.store, engine.device
    if not store.is_aligned:
        return []
    cpu_experts: CpuExperts
    if device.is_cpu:
        device.use_threads(Threads(n_threads, waiting(n_threads)))
        cpu_experts = GraphCpuExperts(device, engine.hparams, store, 1)
    else:
        cpu_experts = KernelCpuExperts(device, engine.hparams, store, n_threads, 1)
    try:
        return [cpu_experts.measure(n) for n in range(1, k + 1)]
    finally:
        cpu_experts.close()


def _machine(
    name: str, words: dict[str, Any], sizes: Sequence[int], whole: float | None,
    stream: Sequence[float], on_cpu: Sequence[float], unpinned: Sequence[float],
    by_host: Sequence[_Segment], by_graph: Sequence[_Segment],
) -> Machine:  # fmt: skip
    """Return the machine whose law gives the times that were measured.

    unpinned: seconds of streams as they were in the tokens of by_host.
    """
    n_layer = len(sizes)
    bare = by_host[0].seconds  # nothing missing, the host looks at every layer
    whole = bare if whole is None else min(whole, bare)
    streamed = _curve(list(enumerate(stream, 1)))
    stalls = _stalls(by_host, n_layer)
    fixed = 0.0
    if stalls:
        n, seconds = stalls[0]
        fixed = max(0.0, seconds - _curve(list(enumerate(unpinned, 1)))(n))
    fetched = _stalls(by_graph, n_layer)
    lookup = max(0.0, (by_graph[0].seconds - whole) / n_layer) if by_graph else 0.0
    about = f"{words['device']}, measured with {words['model']}"
    return Machine(
        name, n_layer, sum(sizes) // len(sizes), whole, (bare - whole) / n_layer, fixed, 0.0,
        streamed, _curve(list(enumerate(on_cpu, 1))) if on_cpu else streamed,
        lookup, _curve(fetched) if fetched else streamed, about[:200],
    )  # fmt: skip


def _stalls(segments: Sequence[_Segment], n_layer: int) -> list[tuple[float, float]]:
    """Return (experts a layer lacks, seconds it stalls), from the difference to lacking none."""
    return [
        (round(part.n_missing, 3), max(1e-9, (part.seconds - segments[0].seconds) / n_layer))
        for part in segments[1:]
        if part.n_missing >= 1.0
    ]


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Return points as a curve, which does not fall: noise may make more take less."""
    found: list[tuple[float, float]] = []
    for n, seconds in sorted(points):
        if not found or n > found[-1][0]:
            found.append((n, max([seconds, *(s for _, s in found)])))
    return Curve(tuple(found))


def _beside(
    words: dict[str, Any], n_threads: int, has_whole: bool, machine: Machine,
    stream: Sequence[float], on_cpu: dict[int, list[float]],
) -> dict[str, Any]:  # fmt: skip
    """Return what else was measured, and what the times mean, for people and other programs."""
    size = machine.expert_bytes
    notes = []
    if words["is_cpu"]:
        notes.append("the device is the CPU: streaming an expert is a copy within host memory")
    if not has_whole:
        notes.append("not all experts fit on the device: whole_us has the boundaries of layers in")
    if not any(on_cpu.values()):
        notes.append("the file's tensors are not aligned for the CPU: cpu_us is stream_us")
    found: dict[str, Any] = {
        "model": words["model"], "device": words["device"], "n_threads": n_threads, "notes": notes,
        "host_copy_bytes_per_s": round(_host_copy()),
        "cpu_us_by_threads": {
            str(n): [[at, round(1e6 * s, 3)] for at, s in enumerate(times, 1)]
            for n, times in on_cpu.items()
        },
    }  # fmt: skip
    if not words["is_cpu"]:
        found["link_bytes_per_s"] = [
            [n * size, round(n * size / seconds)] for n, seconds in enumerate(stream, 1)
        ]
    return found


def _host_copy() -> float:
    """Return bytes a second that one thread copies within host memory, the best of a few."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target, times = np.zeros_like(source), []
    for _ in range(_N_COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return _COPY_BYTES / min(times)


def summary_line(fields: dict[str, Any]) -> str:
    """Return what was measured in one line."""
    measured = fields["measured"]
    return (
        f"measured with {measured['model']}: {fields['whole_us'] / 1e3:.2f} ms a token with all "
        f"experts of {format_bytes(fields['expert_bytes'])} resident; predicts for experts of a "
        "third to three times that size"
    )
