"""Loads a model: plans the memory, then opens the stages and what runs passes over them."""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..arch.draftfile import DraftFile
from ..config import EngineConfig
from ..draft.drafter import Drafter
from ..errors import ConfigError, NativeError, UnsupportedModel
from ..events import Progress, Stopwatch
from ..ggml.device import Device
from ..ggml.free_memory import host_memory
from ..ggml.mapped import WatchedFiles
from ..passes.cputhreads import CpuThreads
from ..placement.draftchoice import Choice, Room, choose
from ..placement.drafters import Sources, open_draft_file, with_drafts
from ..placement.footprint import captured_graphs, context_within
from ..placement.identity import router_shape
from ..placement.planner import Plan
from ..placement.profile import profile_path
from ..placement.profilefile import ProfileFile, open_profile
from ..placement.split import StagePlan, shares_of
from ..resident.poolshape import PoolShape
from ..resident.sequences import Sequences
from ..resident.stage import Stage, open_stage
from ..runner import AnyRunner
from .devices import joined_name, open_device, open_more, places_of
from .drafters import first_widths, limit_graphs, open_drafters
from .runners import open_runners
from .warmup import PassTimes, time_verify, warm_up


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
    draft_stamps: sizes and times of the drafter's file, `GgufFile.stamps`; () without one. config:
    with `spec` and `n_draft` as they are used. warnings: about the drafter's file, a line each.
    pass_times: for drafts; None without, and if experts may be missing.
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
        return joined_name(self.devices)


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
        config = self.config
        files = self._own(WatchedFiles(self.file.mappings()))
        # the stages close them too, and a second close does nothing; but planning may fail
        self.devices = [self._own(open_device(name, config)) for name in config.devices]
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
        if not plan.all_resident and config.mode == "whole":
            raise ConfigError(
                "mode 'whole' needs every expert on the device, but not all experts get a slot; "
                "use --mode auto, or raise --vram, --pin-layers or --cache-slots"
            )
        self._times.lap("plan")
        stages, sequences = self._open_stages(choice, progress)
        if sources.draft:
            files.add(sources.draft.mappings())
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
        runner.reserve_graphs(config.n_draft)
        if runner.mode == "whole":
            warm_up(runner)
        for device in self.devices:
            device.note_peak()
        files.check()
        self.file.check_unchanged()
        self._times.lap("graphs")
        threads.measure(runner, progress)
        self._times.lap("threads")
        times = None
        if drafters:
            times = time_verify(runner, first_widths(config, runner), threads.begin)
            self._times.lap("drafts")
        return LoadedModel(
            self.file, files, tuple(stages), sequences, threads, self.n_ctx, self._profile, plan,
            choice.stages, runner, self._times.seconds, drafters,
            sources.draft.stamps if sources.draft else (), config, tuple(self._warnings), times,
        )  # fmt: skip

    def _context(self) -> int:
        """Return the positions of the context."""
        config, is_own = self.config, self.devices[0].can.own_memory
        if config.n_ctx >= 0:
            return config.n_ctx or self.hparams.n_ctx_train
        n_bytes = Room.of(places_of(self.devices, config), is_own).n_bytes
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
        for device, planned in zip(self.devices, choice.stages):
            has_mtp = choice.sources.mtp and planned.layers.stop == self.hparams.n_layer
            stages.append(
                self._own(
                    open_stage(
                        device, self.file, planned.layers, choice.plan.n_slots, config, self.n_ctx,
                        progress, self._times, has_mtp, sequences,
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
        """Return how the memory is divided, and what is loaded to draft tokens.

        Raises:
            ConfigError: the settings need a drafter's file, and name none.
            ModelFileError: the settings ask for the MTP block, and the file lacks it; or the
                drafter's file is damaged, or does not fit.
        """
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
        self._warnings += [*(draft.warnings if draft else ()), *choice.notes]
        return choice

    def _choose_for(self, devices: list[Device], draft: DraftFile | None) -> Choice:
        """Return how the memory of these devices is divided; errors as in `_choose`."""
        demand = self._profile.demand if self._profile else None
        is_own = devices[0].can.own_memory
        shares = shares_of(self.config.split)
        room = Room.of(places_of(devices, self.config), is_own, demand, shares)
        return choose(self.file, self.config, self.n_ctx, draft, room)

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
                    stage.taps.close()
        return open_drafters(stages, self.file, config, Sources(), self._stack)
