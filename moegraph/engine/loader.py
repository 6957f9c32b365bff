"""Loads a model: plans the memory, then opens the stage and its runner on the device."""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..draft.drafter import Drafter
from ..errors import ConfigError, NativeError, UnsupportedModel
from ..events import Progress, Stopwatch
from ..experts.cache import ExpertCache
from ..experts.policy import POLICIES
from ..experts.prefetch import MAX_PREFETCH
from ..ggml.device import Device
from ..ggml.handles import closed_on_failure
from ..ggml.mapped import WatchedFiles
from ..kinds import MAX_CPU_ROWS
from ..modelfile import ModelFile
from ..placement.draftchoice import Choice, Room, choose
from ..placement.drafters import Sources, open_draft_file, with_drafts
from ..placement.footprint import sweep_rows
from ..placement.identity import router_shape
from ..placement.planner import Plan
from ..placement.profile import profile_path
from ..placement.profilefile import ProfileFile, open_profile
from ..resident.stage import Stage, open_stage
from ..runner import LayeredRunner, Runner, WholeRunner
from ..runner.cpu_experts import CpuExperts, KernelCpuExperts
from ..runner.cpu_experts_graph import GraphCpuExperts
from ..runner.misses import MissHandler
from ..runner.replay import Replay
from ..units import parse_bytes
from .cputhreads import CpuThreads
from .drafters import first_widths, open_drafters
from .warmup import PassTimes, time_verify, warm_up

# Device memory left free with --vram auto, for other programs and for CUDA graphs.
_MARGIN_BYTES = 256 << 20


class _Closes(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closes)


@dataclass(frozen=True)
class LoadedModel:
    """One model on one device, with everything that computes its passes.

    files: watches the mapped files. n_ctx: positions of the context. profile: None without one.
    plan: the expert slots of each layer, and the memory that they and all else take. times: the
    seconds of each phase of loading. drafters: what can draft tokens, none without `spec`. config:
    with `spec` and `n_draft` as they are used. warnings: about the drafter's file, a line each.
    pass_times: for drafts; None without, and if experts may be missing.
    """

    file: ModelFile
    files: WatchedFiles
    stage: Stage
    threads: CpuThreads
    n_ctx: int
    profile: ProfileFile | None
    plan: Plan
    runner: Runner
    times: dict[str, float]
    drafters: tuple[Drafter, ...]
    config: EngineConfig
    warnings: tuple[str, ...]
    pass_times: PassTimes | None


def load_model(
    model: ModelFile,
    config: EngineConfig,
    progress: Progress | None,
    routing: npt.NDArray[np.int32] | None,
    stack: ExitStack,
    beside: Future[Any] | None = None,
) -> LoadedModel:
    """Load an open model file onto a device; arguments and errors as in `Engine.load`.

    stack: gets the calls that free everything, also of what was opened before a failure. beside:
    work of other threads that must end before anything is measured.
    """
    return _Loading(model, config, stack).load(progress, routing, beside)


class _Loading:
    """What one call of `load_model` knows from step to step."""

    def __init__(self, model: ModelFile, config: EngineConfig, stack: ExitStack) -> None:
        self.file = model
        self.config = config
        self.hparams = model.hparams
        self._stack = stack
        self._times = Stopwatch()
        self._warnings: list[str] = []

    def load(
        self,
        progress: Progress | None,
        routing: npt.NDArray[np.int32] | None,
        beside: Future[Any] | None,
    ) -> LoadedModel:
        """Open everything in order; see `Engine.load`."""
        config, hp = self.config, self.hparams
        files = self._own(WatchedFiles(self.file.mappings()))
        # the stage closes it too, and a second close does nothing; but planning may fail
        self.device = self._own(
            Device(config.device, config.n_threads, config.cpu_reference, config.deterministic)
        )
        if self.device.is_invariant and config.miss == "cpu":
            raise ConfigError(
                "--deterministic computes every expert on the GPU, because the CPU rounds "
                "otherwise; drop --miss cpu or --deterministic"
            )
        if routing is not None:
            config = replace(config, spec="off")  # it replaces the choices of single rows
        self.config = config = with_drafts(config)
        threads = CpuThreads(self.device, config)
        self._times.lap("device")
        self.n_ctx = config.n_ctx or hp.n_ctx_train
        self._profile = self._read_profile()
        choice = self._choose()
        plan, sources = choice.plan, choice.sources
        self.config = config = replace(config, n_ubatch=choice.n_ubatch)
        if not plan.all_resident and config.mode == "whole":
            raise ConfigError(
                "mode 'whole' needs every expert on the device, but not all experts get a slot; "
                "use --mode auto, or raise --vram, --pin-layers or --cache-slots"
            )
        self._times.lap("plan")
        may_prefetch = config.prefetch == "auto" and not config.deterministic and routing is None
        n_prefetch_slots = MAX_PREFETCH if may_prefetch else 0
        stage = self._own(
            open_stage(
                self.device, self.file, range(hp.n_layer), plan.n_slots, config, self.n_ctx,
                n_prefetch_slots, progress, self._times, sources.mtp,
            )
        )  # fmt: skip
        if sources.draft:
            files.add(sources.draft.mappings())
        drafters = self._open_drafters(stage, config, sources)
        if drafters:
            self._times.lap("drafters")
        if beside:
            wait([beside])
            self._times.lap("tokenizer")
        args = self._profile, routing, self._times, plan.ring_each
        runner = self._own(open_runner(stage, config, *args))
        runner.reserve_graphs(config.n_draft)
        if runner.mode == "whole":
            warm_up(runner)
        self.device.note_peak()
        files.check()
        self.file.check_unchanged()
        self._times.lap("graphs")
        threads.measure(runner)
        self._times.lap("threads")
        times = None
        if drafters:
            times = time_verify(runner, first_widths(config, self.device.can.streams))
            self._times.lap("drafts")
        return LoadedModel(
            self.file, files, stage, threads, self.n_ctx, self._profile, plan, runner,
            self._times.seconds, drafters, config, tuple(self._warnings), times,
        )  # fmt: skip

    def _read_profile(self) -> ProfileFile | None:
        """Return the profile that --profile names, or the one beside the model; None without."""
        config, beside = self.config, profile_path(self.file.path)
        return open_profile(
            config.profile, config.profile_class, beside, lambda: router_shape(self.file)
        )

    def _own(self, part: Part) -> Part:
        """Have the stack close a part, in reverse order of these calls; return the part."""
        self._stack.callback(part.close)
        return part

    def _choose(self) -> Choice:
        """Return how the memory is divided, and what is loaded to draft tokens.

        Raises:
            ConfigError: the settings need a drafter's file, and name none.
            ModelFileError: the settings ask for the MTP block, and the file lacks it; or the
                drafter's file is damaged, or does not fit.
        """
        budget, source = self._budget()
        demand = self._profile.demand if self._profile else None
        room = Room(budget, source, self.device.can.own_memory, demand)
        draft = open_draft_file(self.file, self.config, self._stack)
        choice = choose(self.file, self.config, self.n_ctx, draft, room)
        self._warnings += [*(draft.warnings if draft else ()), *choice.notes]
        return choice

    def _budget(self) -> tuple[int | None, str]:
        """Return the device memory that the plan may use, None without a limit, and who says so."""
        if self.config.vram != "auto":
            return parse_bytes(self.config.vram, "g") - self.device.context_bytes, "--vram"
        if not self.device.can.own_memory:
            return None, "--vram"
        free = self.device.memory()[0]
        return free - max(_MARGIN_BYTES, free // 50), "the memory that is free"

    def _open_drafters(
        self, stage: Stage, config: EngineConfig, sources: Sources
    ) -> tuple[Drafter, ...]:
        """Open what drafts; `auto` goes on without what fails, and warns."""
        with ExitStack() as own:  # frees what was opened before the failure
            try:
                drafters = open_drafters(stage, self.file, config, sources, own)
                self._stack.push(own.pop_all())
                return drafters
            except (NativeError, ConfigError, UnsupportedModel) as error:
                if config.spec != "auto":
                    raise
                self._warnings.append(f"no drafts by a model: {error}")
                stage.taps.close()
        return open_drafters(stage, self.file, config, Sources(), self._stack)


def open_runner(
    stage: Stage,
    config: EngineConfig,
    profile: ProfileFile | None = None,
    routing: npt.NDArray[np.int32] | None = None,
    times: Stopwatch | None = None,
    ring_each: int = 0,
) -> Runner:
    """Return what runs passes over a stage, its slots filled; close it before the stage.

    profile: which experts fill the slots; the first ones without it. routing: see `Engine.load`.
    times: measures the phases. ring_each: see `Sweeps`.

    Raises:
        ConfigError, NativeError, OutOfDeviceMemory: as in `Engine.load`.
    """
    n_ubatch = min(config.n_rows, stage.state.n_ctx)
    n_sweep = sweep_rows(n_ubatch, stage.state.n_ctx)
    with closed_on_failure():
        if stage.is_full and routing is None and config.mode != "layered":
            return WholeRunner(stage, n_ubatch, n_sweep)
        misses = None
        if not stage.is_full:
            misses = _open_misses(stage, config, profile, times or Stopwatch())
        replay = None if routing is None else Replay(stage, routing)
        return LayeredRunner(stage, n_ubatch, misses, replay, n_sweep, ring_each)


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
        misses.fill(il, placed[il])
    times.lap("fill")
    return misses
