"""Opens what runs passes: over one stage, or over several; the slots of experts are filled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..errors import ConfigError
from ..events import Stopwatch
from ..experts.cache import ExpertCache
from ..experts.policy import POLICIES
from ..ggml.handles import closed_on_failure
from ..kinds import MAX_CPU_ROWS
from ..placement.footprint import sweep_rows
from ..placement.profilefile import ProfileFile
from ..resident.stage import Stage
from ..runner import AnyRunner, LayeredRunner, Runner, StagedRunner, WholeRunner
from ..runner.cpu_experts import CpuExperts, GraphCpuExperts, KernelCpuExperts
from ..runner.misses import MissHandler
from ..runner.replay import Replay


def open_runners(
    stages: Sequence[Stage],
    rings: Sequence[int],
    stack: ExitStack,
    config: EngineConfig,
    profile: ProfileFile | None = None,
    routing: npt.NDArray[np.int32] | None = None,
    times: Stopwatch | None = None,
) -> AnyRunner:
    """Return what runs passes over all stages of a model.

    rings: the ring_groups of each stage. stack: gets the calls that close everything. Others, and
    errors: as in `open_runner`.
    """
    parts = []
    for stage, ring_groups in zip(stages, rings):
        parts.append(open_runner(stage, config, profile, routing, times, ring_groups))
        stack.callback(parts[-1].close)
    if len(parts) == 1:
        return parts[0]
    runner = StagedRunner(parts)
    stack.callback(runner.close)
    return runner


def open_runner(
    stage: Stage,
    config: EngineConfig,
    profile: ProfileFile | None = None,
    routing: npt.NDArray[np.int32] | None = None,
    times: Stopwatch | None = None,
    ring_groups: int = 0,
) -> Runner:
    """Return what runs passes over a stage, its slots filled; close it before the stage.

    profile: which experts fill the slots; the first ones without it. routing: see `Engine.load`.
    times: measures the phases. ring_groups: see `Sweeps`.

    Raises:
        ConfigError, NativeError, OutOfDeviceMemory: as in `Engine.load`.
    """
    n_ubatch = min(config.n_rows, stage.state.n_ctx)
    n_sweep = sweep_rows(n_ubatch, stage.state.n_ctx)
    with closed_on_failure():
        if not stage.device.can.host_access and (routing is not None or config.mode == "layered"):
            raise ConfigError(
                f"on {stage.device.name} one graph computes a pass: neither --mode layered nor "
                "given routing works there"
            )
        if stage.is_full and routing is None and config.mode != "layered":
            return WholeRunner(stage, n_ubatch, n_sweep)
        misses = None
        if not stage.is_full:
            misses = _open_misses(stage, config, profile, times or Stopwatch())
        replay = None if routing is None else Replay(stage, routing)
        return LayeredRunner(stage, n_ubatch, misses, replay, n_sweep, ring_groups)


def _open_misses(
    stage: Stage, config: EngineConfig, profile: ProfileFile | None, times: Stopwatch
) -> MissHandler:
    """Open the cache and what computes missing experts, and fill the slots."""
    device, hp, store = stage.device, stage.hp, stage.store
    policy = POLICIES[config.policy]()
    cache = ExpertCache(hp.n_expert, stage.n_slots, policy, hp.n_expert_used)
    # 'auto' depends on measured times
    miss = "stream" if config.deterministic and config.miss == "auto" else config.miss
    if miss == "cpu" and not store.is_aligned:
        raise ConfigError(
            "--miss cpu needs expert tensors aligned to 32 bytes, and this file's are not; "
            "use --miss stream"
        )
    cpu_experts: CpuExperts | None = None
    if miss != "stream" and store.is_aligned and device.can.cpu_threads:
        cpu_experts = GraphCpuExperts(stage, MAX_CPU_ROWS)
    elif miss != "stream" and store.is_aligned:
        cpu_experts = KernelCpuExperts(stage, device.n_threads, MAX_CPU_ROWS)
    starts = profile.starts(hp.n_layer) if profile else [(None, None)] * hp.n_layer
    placed = {il: cache.layers[il].preload(*starts[il]) for il in store.layers}
    max_rows = stage.state.shape.pass_rows(config.n_rows)
    misses = MissHandler(stage, cache, cpu_experts, miss, max_rows, not config.deterministic)
    for il, (_, shares) in enumerate(starts):
        if shares is not None:
            misses.residency.routing.expect(il, shares)
    times.lap("measure")
    for il in store.layers:
        misses.uploads.fill(il, placed[il])
    times.lap("fill")
    return misses
