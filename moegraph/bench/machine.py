"""Measure a machine with a model: the times from which `plan` and `simulate` predict speed.

All times are measured in the engine that runs the model. A made-up trace replaces the choices of
its router, so that a token misses a known number of experts in every layer; the cost of these
misses is the difference of two token times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..engine import Engine
from ..experts.cost import Curve, Machine
from ..experts.machines import machine_fields
from ..placement.footprint import slot_bytes, token_work
from ..placement.identity import RouterShape
from ..placement.prompttime import compute_seconds
from ..placement.trace import Trace, ids_dtype
from ..resident.stage import Stage
from ..runner.cpu_experts import CpuExperts, GraphCpuExperts, KernelCpuExperts
from ..runner.misses import MissHandler
from ..threads import Threads, default_threads, waiting
from ..units import MiB, format_bytes

# Loads the model with a configuration; a trace replaces the choices of its router.
Load = Callable[[EngineConfig, Trace | None], Engine]

# Tokens of a segment, and how many of its first are not timed, because they fill the slots.
_N_TOKENS, _N_FIRST = 32, 8
# Tokens of the prompts that are timed, and how often, unless one takes longer than _LONG_S.
_PROMPTS, _N_PROMPTS, _LONG_S = (64, 512), 3, 5.0
_N_CTX = 512
_COPY_BYTES, _N_COPIES = 256 * MiB, 5


# Of the tokens of a segment: their median seconds, and the missing experts of a layer and token.
_Segment = tuple[float, float]


def measure_machine(load: Load, name: str, config: EngineConfig) -> dict[str, Any]:
    """Return the measured times of this machine, in the format of a machine file.

    config: gives device and threads; other settings are ignored.
    """
    base: dict[str, Any] = {"n_ctx": _N_CTX, "profile": "none"}
    with load(_changed(config, base), None) as engine:
        model = engine.file
        hp, device = engine.hparams, engine.device
        sizes, token = _expert_bytes(engine), token_work(model)
        whole, prompts = None, []
        if engine.mode == "whole":
            whole = float(np.median(_token_samples(engine, _N_TOKENS)[_N_FIRST:]))
            prompts = [(n, _prompt_seconds(engine, n)) for n in _PROMPTS]
        if device.can.cpu_threads:  # what is compared waits in one way, with as many threads
            base["n_threads"], base["poll"] = engine.threads.current
        words = {
            "model": str(model.kv.get("general.name") or model.path.name),
            "device": device.description, "own_memory": device.can.own_memory,
        }  # fmt: skip
    shape = RouterShape(hp.n_layer, hp.n_expert, hp.n_expert_used)
    k = hp.n_expert_used
    n_slots = max(k, min(2 * k, hp.n_expert // 3))
    partial = {**base, "mode": "layered", "cache_slots": n_slots * len(sizes), "policy": "lru",
               "pin_layers": 0, "miss": "stream"}  # fmt: skip
    plan = [0, 1, k] if n_slots < hp.n_expert else [0]
    routing = _routing(shape, plan)
    with load(_changed(config, {**partial, "host_pin": "none"}), routing) as engine:
        by_host = [_segment(engine) for _ in plan]
        host_misses = _handler(engine)
        unpinned = stream = [host_misses.uploads.seconds(n) for n in range(1, k + 1)]
        n_threads = config.n_threads or default_threads()
        counts = sorted({min(2**power, n_threads) for power in range(10)} | {n_threads})
        on_cpu = {n: _cpu_seconds(engine.stage, n, k) for n in counts}
    # 'auto' as in a run; the CPU device pins only with 'all'
    pin = "auto" if words["own_memory"] else "all"
    with load(_changed(config, {**partial, "host_pin": pin}), routing) as engine:
        if words["own_memory"]:
            stream = [_handler(engine).uploads.seconds(n) for n in range(1, k + 1)]
        n_fetching = _handler(engine).stats({}).n_fetching
        by_graph = [_segment(engine) for _ in plan] if n_fetching == len(sizes) else []
        if not prompts:
            upload = _curve_of(stream)
            prompts = [(n, _prompt_seconds(engine, n, upload)) for n in _PROMPTS]
    machine = _machine(name, words, sizes, token, whole, stream, on_cpu[n_threads], unpinned,
                       by_host, by_graph)  # fmt: skip
    machine = replace(machine, n_layer=hp.n_layer, prompt=_curve(prompts))
    return {**machine_fields(machine), "measured": _beside(
        words, n_threads, whole is not None, machine, stream, on_cpu
    )}  # fmt: skip


def _changed(config: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    settings = {"device": config.devices[0], "n_threads": config.n_threads}
    return EngineConfig(**{**settings, **changes}).validate()


def _handler(engine: Engine) -> MissHandler:
    (part,) = engine.runner.parts
    misses: MissHandler = part.misses  # type: ignore[attr-defined]
    return misses


def _expert_bytes(engine: Engine) -> list[int]:
    """Return the bytes of an expert of each layer with a router."""
    return [size for size in slot_bytes(engine.file) if size]


def _routing(shape: RouterShape, plan: Sequence[int]) -> Trace:
    """Return a segment of tokens that miss plan[0] experts in each layer, one for plan[1], ...

    The other experts of a token are always the same. The missing ones are drawn in turn from all
    remaining experts, so that LRU has evicted an expert before its next turn.
    """
    k, pool = shape.n_expert_used, shape.n_expert - shape.n_expert_used
    rows, at = [], 0
    for n in np.repeat(plan, _N_TOKENS).tolist():
        rows.append([*range(k - n), *(k + (at + i) % pool for i in range(n))])
        at += n
    ids = np.array(rows, dtype=ids_dtype(shape.n_expert))
    return Trace(shape, np.repeat(ids[:, None, :], shape.n_layer, axis=1))


def _segment(engine: Engine) -> _Segment:
    """Time the tokens of the next segment and count their missing experts."""
    _token_samples(engine, _N_FIRST)
    before = engine.expert_stats()
    samples = _token_samples(engine, _N_TOKENS - _N_FIRST)
    after = engine.expert_stats()
    assert before is not None and after is not None
    cache = after.since(before).cache
    return float(np.median(samples)), cache.missing_per_step / len(_expert_bytes(engine))


def _token_samples(engine: Engine, n: int) -> list[float]:
    token, samples = np.zeros(1, dtype=np.int32), []
    for _ in range(n):
        start = time.perf_counter()
        engine.forward(token, greedy=True)
        samples.append(time.perf_counter() - start)
    return samples


def _prompt_seconds(engine: Engine, n: int, upload: Curve | None = None) -> float:
    """Return the seconds of a prompt of n tokens with all experts resident.

    upload: seconds to send n experts of a layer, if some are missing; their cost is then taken off
    by the law of placement/prompttime.py.
    """
    ids, samples = np.arange(n, dtype=np.int32) % engine.hparams.n_vocab, []
    for at in range(1 + _N_PROMPTS):
        engine.reset()
        before, start = engine.expert_stats(), time.perf_counter()
        engine.prefill(ids, greedy=True)
        seconds = time.perf_counter() - start
        after = engine.expert_stats()
        if upload and before and after:
            spent, sizes = after.since(before), _expert_bytes(engine)
            link = len(sizes) * upload(spent.n_bytes_to_device / sum(sizes))
            seconds = compute_seconds(seconds, 1.0 - spent.cache.hit_rate, link)
        if at:  # graphs are built in the first one
            samples.append(seconds)
        elif seconds > _LONG_S:
            return seconds
    engine.reset()
    return float(np.median(samples))


def _cpu_seconds(stage: Stage, n_threads: int, k: int) -> list[float]:
    """Return the seconds of 1 to k experts on n_threads CPU threads; [] if the CPU cannot."""
    device = stage.device
    if not stage.store.is_aligned or not (stage.hp.has_cpu_kernel or device.can.cpu_threads):
        return []
    cpu_experts: CpuExperts
    if device.can.cpu_threads:
        device.use_threads(Threads(n_threads, waiting(n_threads)))
        cpu_experts = GraphCpuExperts(stage, 1)
    else:
        cpu_experts = KernelCpuExperts(stage, n_threads, 1)
    try:
        return [cpu_experts.measure(n) for n in range(1, k + 1)]
    finally:
        cpu_experts.close()


def _machine(
    name: str, words: dict[str, Any], sizes: Sequence[int], token: tuple[int, int, int],
    whole: float | None, stream: Sequence[float], on_cpu: Sequence[float],
    unpinned: Sequence[float], by_host: Sequence[_Segment], by_graph: Sequence[_Segment],
) -> Machine:  # fmt: skip
    """Return the machine that predicts the measured times.

    unpinned: seconds to upload 1, 2, ... experts that are not pinned, as in the tokens of by_host.
    """
    n_layer = len(sizes)
    no_miss = by_host[0][0]  # a token that misses nothing, in layers that the host handles
    whole = no_miss if whole is None else min(whole, no_miss)
    streamed = _curve_of(stream)
    stalls = _stalls(by_host, n_layer)
    fixed = max(0.0, stalls[0][1] - _curve_of(unpinned)(stalls[0][0])) if stalls else 0.0
    fetched = _stalls(by_graph, n_layer)
    fetch_layer = max(0.0, (by_graph[0][0] - whole) / n_layer) if by_graph else 0.0
    about = f"{words['device']}, measured with {words['model']}"
    return Machine(
        name, n_layer, sum(sizes) // len(sizes), *token, whole, (no_miss - whole) / n_layer,
        fixed, 0.0, streamed, _curve_of(on_cpu) if on_cpu else streamed,
        fetch_layer, _curve(fetched) if fetched else streamed, about[:200],
    )  # fmt: skip


def _stalls(segments: Sequence[_Segment], n_layer: int) -> list[tuple[float, float]]:
    """Return (missing experts of a layer, seconds they cost), against segments[0] without any."""
    return [
        (round(n_missing, 3), max(1e-9, (seconds - segments[0][0]) / n_layer))
        for seconds, n_missing in segments[1:]
        if n_missing >= 1.0
    ]


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Return points as a curve; raise seconds that noise made smaller than those before."""
    found: list[tuple[float, float]] = []
    for n, seconds in sorted(points):
        if not found or n > found[-1][0]:
            found.append((n, max([seconds, *(s for _, s in found)])))
    return Curve(tuple(found))


def _curve_of(seconds: Sequence[float]) -> Curve:
    """Return the seconds of 1, 2, ... experts as a curve."""
    return _curve(list(enumerate(seconds, 1)))


def _beside(
    words: dict[str, Any], n_threads: int, has_whole: bool, machine: Machine,
    stream: Sequence[float], on_cpu: dict[int, list[float]],
) -> dict[str, Any]:  # fmt: skip
    """Return what else was measured, for people and other programs."""
    size = machine.expert_bytes
    notes = []
    if not words["own_memory"]:
        notes.append("the device is the CPU: an upload is a copy within host memory")
    if not has_whole:
        notes.append("not all experts fit on the device: whole_us includes layer boundaries")
    if not any(on_cpu.values()):
        notes.append("the file's tensors are not aligned for the CPU: cpu_us repeats stream_us")
    found: dict[str, Any] = {
        "model": words["model"], "device": words["device"], "n_threads": n_threads, "notes": notes,
        "host_copy_bytes_per_s": round(_host_copy()),
        "cpu_us_by_threads": {
            str(n): [[at, round(1e6 * s, 3)] for at, s in enumerate(times, 1)]
            for n, times in on_cpu.items()
        },
    }  # fmt: skip
    if words["own_memory"]:
        found["link_bytes_per_s"] = [
            [n * size, round(n * size / seconds)] for n, seconds in enumerate(stream, 1)
        ]
    return found


def _host_copy() -> float:
    """Return the bytes per second that one thread copies in host memory; the best of a few runs."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target, times = np.zeros_like(source), []
    for _ in range(_N_COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return _COPY_BYTES / min(times)


def summary_line(fields: dict[str, Any]) -> str:
    """Return the result of a measurement in one line."""
    measured = fields["measured"]
    return (
        f"measured with {measured['model']}: {fields['whole_us'] / 1e3:.2f} ms a token with all "
        f"experts of {format_bytes(fields['expert_bytes'])} resident"
    )
