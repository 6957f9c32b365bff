"""Loads a model: plans the memory, then opens the stages and what runs passes over them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..arch.draftfile import DraftFile
from ..config import EngineConfig
from ..draft.drafter import Drafter
from ..errors import ConfigError, MoegraphError, NativeError, UnsupportedModel
from ..events import Progress, Stopwatch
from ..experts.cache import ExpertCache
from ..experts.policy import POLICIES
from ..ggml.cuda import unused_card
from ..ggml.device import Device, gpu_names
from ..ggml.free_memory import host_memory
from ..ggml.handles import closed_on_failure
from ..ggml.lib import C, ffi
from ..ggml.mapped import WatchedFiles
from ..kinds import MAX_CPU_ROWS
from ..passes.cputhreads import CpuThreads
from ..passes.prefixfile import Widths
from ..placement.drafters import Sources, open_draft_file, with_drafts
from ..placement.footprint import captured_graphs, context_within, sweep_rows
from ..placement.identity import file_hash, router_shape
from ..placement.memory import Budget, Choice, choose
from ..placement.planner import Plan
from ..placement.profile import profile_path
from ..placement.profilefile import ProfileFile, open_profile
from ..placement.split import LINK_RATE, MEMORY_RATE, Place, StagePlan, evened, shares_of
from ..resident.kvpool import PoolShape
from ..resident.sequences import Sequences
from ..resident.stage import Stage, measure_rates, open_stage
from ..runner import AnyRunner, LayeredRunner, Runner, StagedRunner, WholeRunner, reserve_graphs
from ..runner.cpu_experts import CpuExperts, GraphCpuExperts, KernelCpuExperts
from ..runner.layer_graphs import Replay
from ..runner.misses import MissHandler
from ..units import parse_bytes
from .drafters import first_widths, limit_graphs, open_drafters
from .warmup import PassTimes, time_verify, warm_up


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
    policy = config.policy
    policy = POLICIES[policy]() if isinstance(policy, str) else policy
    cache = ExpertCache(hp.n_expert, stage.n_slots, policy, hp.n_expert_used)
    # 'auto' depends on measured times
    miss = "stream" if config.deterministic and config.miss == "auto" else config.miss
    if store.n_held and miss == "cpu":
        raise ConfigError(
            "--miss cpu needs every expert in host memory or in the page cache, and host memory "
            "holds some of them only; use --miss stream, or --host-pin none"
        )
    if store.n_held:
        miss = "stream"
    if miss == "cpu" and not store.is_aligned:
        raise ConfigError(
            "--miss cpu needs expert tensors aligned to 32 bytes, and this file's are not; "
            "use --miss stream"
        )
    if not (hp.has_cpu_kernel or device.can.cpu_threads):
        if miss == "cpu":
            what = f"no kernel computes experts of {hp.name} models on the CPU beside a GPU"
            raise ConfigError(f"--miss cpu: {what}; use --miss stream")
        miss = "stream"
    cpu_experts: CpuExperts | None = None
    if miss != "stream" and store.is_aligned and device.can.cpu_threads:
        cpu_experts = GraphCpuExperts(stage, MAX_CPU_ROWS)
    elif miss != "stream" and store.is_aligned:
        cpu_experts = KernelCpuExperts(stage, device.n_threads, MAX_CPU_ROWS)
    starts = profile.starts(hp.n_layer) if profile else [(None, None)] * hp.n_layer
    placed = {il: cache.layers[il].preload(*starts[il]) for il in store.layers}
    max_rows = stage.state.shape.pass_rows(config.n_rows)
    misses = MissHandler(stage, cache, cpu_experts, miss, max_rows)
    for il, (_, shares) in enumerate(starts):
        if shares is not None:
            misses.residency.routing.expect(il, shares)
    times.lap("measure")
    for il in store.layers:
        misses.uploads.fill(il, placed[il])
        misses.uploads.fill_host(il)
    times.lap("fill")
    return misses


# Bytes a second out of host memory with two channels.
_HOST_RATE = 50e9
_RATES = ("memory_rate", "link_rate")
# Device memory left free with --vram auto, for other programs and for CUDA graphs.
_MARGIN_BYTES = 256 << 20


def open_device(name: str, config: EngineConfig) -> Device:
    """Open one device of a configuration."""
    device = Device(name, config.n_threads, config.cpu_reference, config.deterministic)
    if device.is_invariant and config.miss == "cpu":
        device.close()
        raise ConfigError(
            "--deterministic computes every expert on the GPU, because the CPU rounds "
            "otherwise; drop --miss cpu or --deterministic"
        )
    return device


def open_more(
    devices: Sequence[Device], config: EngineConfig, own: Callable[[Device], Device]
) -> list[Device]:
    """Open the other GPUs where `auto` has taken the first; one that fails is left out."""
    more = list(devices)
    for name in gpu_names():
        if name != devices[0].name:
            try:
                more.append(own(open_device(name, config)))
            except MoegraphError:
                continue
    return more


def places_of(devices: Sequence[Device], config: EngineConfig) -> list[Place]:
    """Return the memory that the plan may use on each device, and the speed of each.

    Speeds are measured where there are several devices with memory of their own, unless decisions
    must not depend on times.
    """
    names = [device.name for device in devices]
    sizes = config.vram.split(",")
    sizes = sizes * len(devices) if len(sizes) == 1 else sizes
    found = []
    for device, size in zip(devices, sizes):
        budget, source = _budget(device, size, names.count(device.name))
        if len(devices) > 1:
            source = f"{source} of {device.name}"
        needs_all = not device.can.host_access
        rates = MEMORY_RATE, LINK_RATE
        if not device.can.own_memory:
            rates = _HOST_RATE, LINK_RATE
        elif len(set(names)) > 1 and not config.deterministic:
            rates = measure_rates(device)
        found.append(Place(budget, source, needs_all, *rates))
    memory, link = (evened([getattr(p, name) for p in found]) for name in _RATES)
    return [replace(place, memory_rate=a, link_rate=b) for place, a, b in zip(found, memory, link)]


def _budget(device: Device, size: str, n_stages: int) -> tuple[int | None, str]:
    """Return the device memory that a stage may use, None without a limit, and what says so.

    n_stages: how many stages are on this device.
    """
    if size != "auto":
        return parse_bytes(size, "g") - device.context_bytes, "--vram"
    if not device.can.own_memory:
        return None, "--vram"
    free = device.memory()[0]
    return (free - max(_MARGIN_BYTES, free // 50)) // n_stages, "the memory that is free"


class _Closes(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closes)


@dataclass(frozen=True)
class LoadedModel:
    """One model on its devices, with everything that computes its passes.

    stages: in order of layers, each on a device. sequences: of all stages. files: watches the
    mapped files. n_ctx: positions of the context. profile: None without one. plan: the expert slots
    of each layer, and the memory that they and all else take; stage_plans: of each stage. times:
    the seconds of each phase of loading. drafters: what can draft tokens, none without `spec`.
    draft_stamps: sizes and times of the drafter's file (`TensorFile.stamps`); () without one.
    config: with `spec` and `n_draft` as they are used. warnings: about the drafter's file, a line
    each. pass_times: for drafts; None without, and if experts may be missing.
    """

    file: ModelFile
    files: WatchedFiles
    stages: tuple[Stage, ...]
    sequences: Sequences
    threads: CpuThreads
    n_ctx: int
    profile: ProfileFile | None
    plan: Plan
    stage_plans: tuple[StagePlan, ...]
    runner: AnyRunner
    times: dict[str, float]
    drafters: tuple[Drafter, ...]
    draft_stamps: tuple[tuple[int, int], ...]
    config: EngineConfig
    warnings: tuple[str, ...]
    pass_times: PassTimes | None

    @property
    def stage(self) -> Stage:
        """Return the last stage, which has the results; the only one on one device."""
        return self.stages[-1]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices of the stages."""
        return tuple(stage.device for stage in self.stages)

    @property
    def device_name(self) -> str:
        """Return the names of the devices, as --device takes them."""
        return ",".join(device.name for device in self.devices)


class Loading:
    """Loads an open model file onto its devices."""

    def __init__(self, model: ModelFile, config: EngineConfig, stack: ExitStack) -> None:
        """stack: gets the calls that free everything, also of what was opened before a failure."""
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
        """Open everything in order; arguments and errors as in `Engine.load`.

        beside: work of other threads that must end before anything is measured.
        """
        config = self.config
        files = self._own(WatchedFiles(self.file.mappings()))
        # the stages close them too, and a second close does nothing; but planning may fail
        self.devices = [self._own(open_device(name, config)) for name in config.devices]
        if config.device == "auto" and self.devices[0].can.cpu_threads:
            self._warnings += filter(None, [unused_card()])
        if routing is not None:
            config = replace(config, spec="off")  # it replaces the choices of single rows
        self.config = config = with_drafts(config)
        threads = CpuThreads(self.devices, config)
        self._times.lap("device")
        self.n_ctx = self._context()
        if config.n_ctx < 0:
            self.config = config = replace(config, n_ctx=self.n_ctx)
        self._profile = self._read_profile()
        choice = self._choose()
        plan, sources = choice.plan, choice.sources
        self.config = config = replace(config, n_ubatch=choice.n_ubatch)
        self._times.lap("plan")
        stages, sequences = self._open_stages(choice, progress)
        if sources.draft:
            files.add(sources.draft.source.mappings())
        drafters = self._open_drafters(stages, config, sources)
        if drafters:
            self._times.lap("drafters")
        if beside:
            wait([beside])
            self._times.lap("tokenizer")
        rings = [planned.plan.ring_groups for planned in choice.stages]
        runner = open_runners(
            stages, rings, self._stack, config, self._profile, routing, self._times
        )
        self._limit_graphs(runner, choice, drafters)
        reserve_graphs(runner.parts, config.n_draft)
        if runner.mode == "whole":
            warm_up(runner)
        for device in self.devices:
            device.note_peak()
        files.check()
        self.file.check_unchanged()
        self._times.lap("graphs")
        times, stamps = None, sources.draft.source.stamps if sources.draft else ()
        if drafters:
            times = time_verify(runner, first_widths(config, runner), threads.begin)
            self._times.lap("drafts")
        return LoadedModel(
            self.file, files, tuple(stages), sequences, threads, self.n_ctx, self._profile, plan,
            choice.stages, runner, self._times.seconds, drafters, stamps, config,
            tuple(self._warnings), times,
        )  # fmt: skip

    def _context(self) -> int:
        """Return the positions of the context."""
        config, is_own = self.config, self.devices[0].can.own_memory
        if config.n_ctx >= 0:
            return config.n_ctx or self.hparams.n_ctx_train
        n_bytes = Budget.of(places_of(self.devices, config), is_own).n_bytes
        if n_bytes is None:
            n_bytes = host_memory().spare or 0
        return context_within(self.file, config, n_bytes, is_own)

    def _limit_graphs(
        self, runner: AnyRunner, choice: Choice, drafters: tuple[Drafter, ...]
    ) -> None:
        """Let captured graphs take what the plan has for them.

        Those of the model's layers may take half of what it leaves over, too.
        """
        for part, planned in zip(runner.parts, choice.stages):
            spare = planned.plan.margin
            if part.device.can.streams and spare is not None:
                planned_bytes = captured_graphs(
                    self.hparams, self.config, self.n_ctx, planned.layers
                )
                part.graphs.max_device_bytes = planned_bytes + max(0, spare) // 2
        if runner.parts[-1].device.can.streams and choice.stages[-1].plan.margin is not None:
            limit_graphs(drafters, self.hparams, self.config, self.n_ctx)

    def _open_stages(
        self, choice: Choice, progress: Progress | None
    ) -> tuple[list[Stage], Sequences]:
        """Open the stages in order of layers, and the sequences that they share."""
        config, stages = self.config, list[Stage]()
        sequences = Sequences(PoolShape.of(config, self.n_ctx))
        left = sum(planned.plan.host_bytes for planned in choice.stages)
        room = None if config.host_mem == "auto" else parse_bytes(config.host_mem, "g")
        for device, planned in zip(self.devices, choice.stages):
            share = planned.plan.host_bytes / max(left, 1)
            own = None if room is None else int(room * share)
            left -= planned.plan.host_bytes
            room = None if room is None or own is None else room - own
            has_mtp = choice.sources.mtp and planned.layers.stop == self.hparams.n_layer
            stages.append(
                self._own(
                    open_stage(
                        device, self.file, planned.layers, choice.plan.n_slots, config, self.n_ctx,
                        progress, self._times, has_mtp, sequences, (own, share),
                    )
                )
            )  # fmt: skip
        return stages, self._own(sequences)

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
        """Return how the memory is divided, and what is loaded to draft tokens."""
        draft = open_draft_file(self.file, self.config, self._stack)
        choice = self._choose_for(self.devices, draft)
        if self.config.device == "auto" and not choice.plan.all_resident:
            more = open_more(self.devices, self.config, self._own)
            wider = self._choose_for(more, draft) if len(more) > len(self.devices) else choice
            if wider.plan.resident_share > choice.plan.resident_share:
                self.devices, choice = more, wider
            else:
                for device in more[len(self.devices) :]:
                    device.close()
        if not choice.plan.all_resident and self.config.mode == "whole":
            raise ConfigError(
                "mode 'whole' needs every expert on the device, but not all experts get a slot; "
                "use --mode auto, or raise --vram, --pin-layers or --cache-slots"
            )
        self._warnings += [*(draft.warnings if draft else ()), *choice.notes]
        return choice

    def _choose_for(self, devices: list[Device], draft: DraftFile | None) -> Choice:
        """Return how the memory of these devices is divided."""
        demand = self._profile.demand if self._profile else None
        is_own = devices[0].can.own_memory
        shares = shares_of(self.config.split)
        budget = Budget.of(places_of(devices, self.config), is_own, demand, shares)
        return choose(self.file, self.config, self.n_ctx, draft, budget)

    def _open_drafters(
        self, stages: list[Stage], config: EngineConfig, sources: Sources
    ) -> tuple[Drafter, ...]:
        """Open what drafts; `auto` goes on without what fails, and warns."""
        with ExitStack() as own:  # frees what was opened before the failure
            try:
                drafters = open_drafters(stages, self.file, config, sources, own)
                self._stack.push(own.pop_all())
                return drafters
            except (NativeError, ConfigError, UnsupportedModel) as error:
                if config.spec != "auto":
                    raise
                self._warnings.append(f"no drafts by a model: {error}")
                for stage in stages:
                    stage.hidden_states.close()
        return open_drafters(stages, self.file, config, Sources(), self._stack)


# Of the format of what is saved; it changes with what computes it.
_VERSION = 2
_SETTINGS = ("type_k", "type_v", "cpu_reference", "deterministic")


def prefix_identity(loaded: LoadedModel) -> str:
    """Return a hash of a loaded model, its settings, the kinds of its devices, and what drafts.

    How many sequences there are, and of what length, does not matter.
    """
    config: EngineConfig = loaded.config
    parts = {
        "version": _VERSION,
        "patches": ffi.string(C.mg_patchset_built()).decode(),
        "model": file_hash(loaded.file),
        "devices": [device.name.partition(":")[0] for device in loaded.devices],
        "settings": {name: getattr(config, name) for name in _SETTINGS},
        "widths": asdict(prefix_widths(loaded)),
        "drafters": [one.name for one in loaded.drafters],
        "draft": loaded.draft_stamps,
        "stages": [stage.layers.stop for stage in loaded.stages],  # copies have them in order
    }
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def prefix_widths(loaded: LoadedModel) -> Widths:
    """Return what the files of beginnings of prompts have of a position, and of the states."""
    copies, drafters = loaded.sequences.copies, loaded.drafters
    drafted = {one.name: list(one.row_widths) for one in drafters if one.row_widths}
    return Widths(copies.row_widths, drafted, copies.states_bytes)
