"""Loads a model: plans the memory, then opens weights, banks, state and runner on the device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..errors import ConfigError
from ..events import Progress
from ..experts.cache import ExpertCache
from ..experts.policy import POLICIES
from ..experts.prefetch import MAX_PREFETCH
from ..ggml.device import Device
from ..ggml.mapped import WatchedFiles
from ..graphs.layer import Model
from ..kinds import MAX_CPU_ROWS
from ..modelfile import ModelFile
from ..placement.footprint import needed_bytes, ring_groups, sweep_rows
from ..placement.identity import router_shape
from ..placement.planner import Plan, make_plan
from ..placement.profile import profile_path
from ..placement.profilefile import ProfileFile, open_profile
from ..resident.bank import ExpertBanks
from ..resident.ring import Ring
from ..resident.state import State
from ..resident.store import ExpertStore
from ..resident.weights import Loader, Weights
from ..runner import LayeredRunner, Runner, WholeRunner
from ..runner.cpu_experts import CpuExperts, KernelCpuExperts
from ..runner.cpu_experts_graph import GraphCpuExperts
from ..runner.misses import MissHandler
from ..runner.replay import Replay
from ..units import parse_bytes
from .cputhreads import CpuThreads

# Device memory left free with --vram auto, for other programs and for CUDA graphs.
_MARGIN_BYTES = 256 << 20


class _Closes(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closes)


@dataclass(frozen=True)
class LoadedModel:
    """One model on one device, with everything that computes its passes.

    files: watches the mapped files. n_ctx: positions of the context. profile: None without one.
    plan: the expert slots of each layer, and the memory that they and all else take.
    """

    file: ModelFile
    files: WatchedFiles
    device: Device
    threads: CpuThreads
    n_ctx: int
    profile: ProfileFile | None
    plan: Plan
    weights: Weights
    banks: ExpertBanks
    state: State
    runner: Runner


def load_model(
    model: ModelFile,
    config: EngineConfig,
    progress: Progress | None,
    routing: npt.NDArray[np.int32] | None,
    stack: ExitStack,
) -> LoadedModel:
    """Load an open model file onto a device; arguments and errors as in `Engine.load`.

    stack: gets the calls that free everything, also of what was opened before a failure.
    """
    return _Loading(model, config, stack).load(progress, routing)


class _Loading:
    """What one call of `load_model` knows from step to step."""

    def __init__(self, model: ModelFile, config: EngineConfig, stack: ExitStack) -> None:
        self.file = model
        self.config = config
        self.hparams = model.hparams
        self._stack = stack

    def load(self, progress: Progress | None, routing: npt.NDArray[np.int32] | None) -> LoadedModel:
        """Open everything in order; see `Engine.load`."""
        config, hp = self.config, self.hparams
        files = self._own(WatchedFiles(self.file.mappings()))
        self.device = self._own(Device(config.device, config.n_threads, config.cpu_reference))
        threads = CpuThreads(self.device, config)
        self.n_ctx = config.n_ctx or hp.n_ctx_train
        self._profile = self._read_profile()
        plan = self._make_plan()
        n_slots = None if plan.all_resident else list(plan.n_slots)
        if n_slots is not None and config.mode == "whole":
            raise ConfigError(
                "mode 'whole' needs every expert on the device, but not all experts get a slot; "
                "use --mode auto, or raise --vram, --pin-layers or --cache-slots"
            )
        loader = Loader(self.device, self.file, progress)
        try:
            weights = self._own(Weights(loader, self.file))
            may_prefetch = (
                config.prefetch == "auto" and not config.deterministic and routing is None
            )
            n_prefetch_slots = MAX_PREFETCH if may_prefetch else 0
            self.banks = self._own(
                ExpertBanks(self.device, loader, self.file, n_slots, n_prefetch_slots)
            )
        finally:
            loader.close()
        state = self._own(
            State(self.device, hp, self.n_ctx, config.n_seq, config.type_k, config.type_v)
        )
        parts = Model(hp, weights, self.banks, state)
        n_ubatch = min(config.n_ubatch, state.n_ctx)
        n_sweep = sweep_rows(n_ubatch, state.n_ctx)
        runner: Runner
        if n_slots is None and routing is None and config.mode != "layered":
            runner = self._own(WholeRunner(self.device, parts, n_ubatch, n_sweep))
        else:
            misses = None if n_slots is None else self._open_misses(n_slots)
            ring = None if misses is None else self._open_ring(misses)
            replay = None if routing is None else Replay(self.device, hp, routing)
            runner = self._own(
                LayeredRunner(self.device, parts, n_ubatch, n_sweep, misses, replay, ring)
            )
        runner.reserve_graphs()
        self.device.note_peak()
        files.check()
        self.file.check_unchanged()
        threads.measure(runner)
        return LoadedModel(
            self.file, files, self.device, threads, self.n_ctx, self._profile, plan,
            weights, self.banks, state, runner,
        )  # fmt: skip

    def _open_misses(self, n_slots: list[int]) -> MissHandler:
        """Open the expert store and the cache, and fill the slots."""
        config, hp = self.config, self.hparams
        partial = [il for il, n in enumerate(n_slots) if n < hp.n_expert]
        store = self._own(ExpertStore(self.device, self.file, partial, config.host_pin))
        policy = POLICIES[config.policy]()
        cache = ExpertCache(hp.n_expert, n_slots, policy, hp.n_expert_used)
        # 'auto' depends on measured times
        miss = "stream" if config.deterministic and config.miss == "auto" else config.miss
        if miss == "cpu" and not store.is_aligned:
            raise ConfigError(
                "--miss cpu needs expert tensors aligned to 32 bytes, and this file's are not; "
                "use --miss stream"
            )
        cpu_experts: CpuExperts | None = None
        if miss != "stream" and store.is_aligned and self.device.can.cpu_threads:
            cpu_experts = GraphCpuExperts(self.device, hp, store, MAX_CPU_ROWS)
        elif miss != "stream" and store.is_aligned:
            cpu_experts = KernelCpuExperts(
                self.device, hp, store, self.device.n_threads, MAX_CPU_ROWS
            )
        profile = self._profile
        starts = profile.starts(hp.n_layer) if profile else [(None, None)] * hp.n_layer
        placed = {il: cache.layers[il].preload(*starts[il]) for il in partial}
        max_rows = config.n_ubatch * config.n_seq
        misses = MissHandler(
            self.device,
            self.banks,
            store,
            cache,
            cpu_experts,
            miss,
            max_rows,
            not config.deterministic,
        )
        for il in partial:
            misses.fill(il, placed[il])
        return misses

    def _open_ring(self, misses: MissHandler) -> Ring | None:
        """Open the memory through which prompts send experts; None if every layer is full."""
        layers = misses.store.layers
        if not layers:
            return None
        n_groups = ring_groups(self.hparams.n_expert)
        return self._own(Ring(self.device, self.file, layers, n_groups))

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

    def _make_plan(self) -> Plan:
        """Return how many expert slots each layer gets."""
        config, free = self.config, self.device.memory()[0]
        budget, source = None, "--vram"
        if config.vram != "auto":
            budget = parse_bytes(config.vram, "g") - self.device.context_bytes
        elif self.device.can.own_memory:
            budget, source = free - max(_MARGIN_BYTES, free // 50), "the memory that is free"
        return make_plan(
            needed_bytes(self.file, config, self.n_ctx),
            budget,
            config.pin_layers if config.pin_layers >= 0 else None,
            config.cache_slots if config.cache_slots >= 0 else None,
            source,
            self._profile.demand if self._profile else None,
        )
