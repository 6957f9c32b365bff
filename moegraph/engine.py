"""The engine: a model loaded on a device, for passes and generations."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .config import EngineConfig
from .cputhreads import CpuThreads
from .errors import ConfigError
from .experts.bank import ExpertBanks
from .experts.cache import ExpertCache
from .experts.cachestats import ExpertStats
from .experts.identity import router_shape
from .experts.planner import make_plan
from .experts.policy import POLICIES
from .experts.prefetch import MAX_PREFETCH
from .experts.profile import profile_path
from .experts.profilefile import ProfileFile, ProfileUpdate, open_profile
from .experts.store import ExpertStore
from .footprint import needed_bytes
from .generation import Events, Generation
from .ggml.device import Device
from .ggml.handles import closed_on_failure
from .ggml.mapped import WatchedFiles
from .graphs.layer import Model
from .kinds import MAX_CPU_ROWS
from .modelfile import ModelFile, open_model, resolve_target
from .ownership import Ownership
from .passes import Passes, checked_ids
from .runner import LayeredRunner, Output, Runner, WholeRunner
from .runner.cpu_experts import CpuExperts, KernelCpuExperts
from .runner.cpu_experts_graph import GraphCpuExperts
from .runner.misses import MissHandler
from .runner.replay import Replay
from .sampling import SamplingParams
from .sequence import CancelToken, Sequence
from .state import State
from .units import parse_bytes
from .weights import Loader, Progress, Weights

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Device memory left free with --vram auto, for other programs and for CUDA graphs.
_MARGIN_BYTES = 256 << 20

Ids = SequenceOf[int] | npt.NDArray[np.int32]


class _Closes(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closes)


class Engine:
    """One model, loaded on one device, generating for one sequence at a time.

    Create it with `Engine.load`. Close it, or use it as a context manager.

    An engine belongs to the first thread that uses it; `hand_over` releases it for another thread.
    A generation owns the engine while it runs: until it ends or is closed, passes and a second
    generation are refused. Any thread may close an engine while no call is running.

    Errors are those of `moegraph.errors`, with one exception: if a CUDA call fails, ggml aborts.
    That ends the process with status 4 and cannot be caught.
    """

    def __init__(
        self,
        model: ModelFile,
        config: EngineConfig,
        progress: Progress | None,
        routing: npt.NDArray[np.int32] | None,
    ) -> None:
        """Load an open model file and own it; see `Engine.load`."""
        self.file = model
        self.config = config
        self.hparams = model.hparams
        self._stack = ExitStack()
        self._stack.callback(model.close)
        self._n_saved: npt.NDArray[np.int64] | int = 0  # choices that are in the profile
        self.ownership = Ownership()
        with closed_on_failure():
            try:
                self._load(progress, routing)
            except BaseException:
                self.close()
                raise

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        routing: npt.NDArray[np.int32] | None = None,
    ) -> Engine:
        """Load a GGUF file, or a shipped model by its name, onto a device.

        progress: called with (stage, bytes done, bytes in total) while loading.
        routing: recorded expert ids, numpy shape [n_steps, n_layer, n_expert_used]; they replace
            the router's choice in one-row passes, for measuring.

        Raises:
            ConfigError: a setting is wrong, or there is no such device.
            ModelFileError, UnsupportedModel: moegraph cannot run the file.
            OutOfDeviceMemory: the model does not fit; the message names the setting to lower.
        """
        config = (config or EngineConfig()).validate()
        return cls(open_model(resolve_target(path)), config, progress, routing)

    def _load(self, progress: Progress | None, routing: npt.NDArray[np.int32] | None) -> None:
        config, hp = self.config, self.hparams
        self._files = self._own(WatchedFiles(self.file.mappings()))
        self.device = self._own(Device(config.device, config.n_threads, config.cpu_reference))
        self.threads = CpuThreads(self.device, config)
        self.n_ctx = config.n_ctx or hp.n_ctx_train
        self._profile = self._read_profile()
        n_slots = self._plan_slots()
        if n_slots is not None and config.mode == "whole":
            raise ConfigError(
                "mode 'whole' needs every expert on the device, but not all experts get a slot; "
                "use --mode auto, or raise --vram, --pin-layers or --cache-slots"
            )
        loader = Loader(self.device, self.file, progress)
        try:
            self.weights = self._own(Weights(loader, self.file))
            may_prefetch = (
                config.prefetch == "auto" and not config.deterministic and routing is None
            )
            n_prefetch_slots = MAX_PREFETCH if may_prefetch else 0
            self.banks = self._own(
                ExpertBanks(self.device, loader, self.file, n_slots, n_prefetch_slots)
            )
        finally:
            loader.close()
        self.state = self._own(
            State(self.device, hp, self.n_ctx, config.n_seq, config.type_k, config.type_v)
        )
        parts = Model(hp, self.weights, self.banks, self.state)
        n_ubatch = min(config.n_ubatch, self.state.n_ctx)
        self.runner: Runner
        if n_slots is None and routing is None and config.mode != "layered":
            self.runner = self._own(WholeRunner(self.device, parts, n_ubatch))
        else:
            misses = None if n_slots is None else self._open_misses(n_slots)
            replay = None if routing is None else Replay(self.device, hp, routing)
            self.runner = self._own(LayeredRunner(self.device, parts, n_ubatch, misses, replay))
        self.runner.reserve_graphs()
        self.passes = Passes(self.runner, self._files, self.n_ctx, self.threads)
        self.device.note_peak()
        self._files.check()
        self.file.check_unchanged()
        self.threads.measure(self.runner)

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
        if miss != "stream" and store.is_aligned and self.device.is_cpu:
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

    def _read_profile(self) -> ProfileFile | None:
        """Return the profile that --profile names, or the one beside the model; None without."""
        config, beside = self.config, profile_path(self.file.path)
        return open_profile(
            config.profile, config.profile_class, beside, lambda: router_shape(self.file)
        )

    def save_profile(self) -> ProfileUpdate | None:
        """Add the experts chosen since the last call to the routing profile; see `ProfileUpdate`.

        Returns None if there is no profile, or if no expert can be missing.
        """
        misses = self._misses
        if self._profile is None or not misses:
            return None
        counts = np.array(misses.residency.routing.counts, dtype=np.int64)
        update = self._profile.update(counts - self._n_saved)
        if not update.why:
            self._n_saved = counts
        return update

    def _own(self, part: Part) -> Part:
        """Have `close` close a part, in reverse order of these calls; return the part."""
        self._stack.callback(part.close)
        return part

    def _plan_slots(self) -> list[int] | None:
        """Return the expert slots of each layer, or None if all experts are resident."""
        config, free = self.config, self.device.memory()[0]
        budget, source = None, "--vram"
        if config.vram != "auto":
            budget = parse_bytes(config.vram, "g") - self.device.context_bytes
        elif not self.device.is_cpu:
            budget, source = free - max(_MARGIN_BYTES, free // 50), "the memory that is free"
        self.plan = make_plan(
            needed_bytes(self.file, config, self.n_ctx),
            budget,
            config.pin_layers if config.pin_layers >= 0 else None,
            config.cache_slots if config.cache_slots >= 0 else None,
            source,
            self._profile.demand if self._profile else None,
        )
        return None if self.plan.all_resident else list(self.plan.n_slots)

    @property
    def device_name(self) -> str:
        """Name of the device in use: cpu or cuda:N."""
        return self.device.name

    @property
    def mode(self) -> str:
        """'whole' or 'layered'."""
        return self.runner.mode

    @property
    def _misses(self) -> MissHandler | None:
        return self.runner.misses if isinstance(self.runner, LayeredRunner) else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, opened at first use.

        Raises:
            RequestError: the engine is closed.
        """
        self.ownership.require_open()
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from .tokenizer import Tokenizer

        return self._own(Tokenizer(self.file))

    def memory(self) -> dict[str, int]:
        """Return bytes: peaks of device and host, pinned memory, and the parts on the device.

        Raises:
            RequestError: the engine is closed.
        """
        self.ownership.require_open()
        scale = 1 if sys.platform == "darwin" else 1024
        return {
            "device_peak_bytes": self.device.note_peak(),
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
            "host_pinned_bytes": self._misses.pinned_bytes if self._misses else 0,
            "weights_bytes": self.weights.n_bytes + self.banks.n_bytes,
            "kv_bytes": self.state.kv_bytes,
            "state_bytes": self.state.recurrent_bytes,
            "compute_bytes": self.runner.compute_bytes,
        }

    def expert_stats(self) -> ExpertStats | None:
        """Return the counters of the expert cache; None in mode 'whole', which has no cache."""
        if not isinstance(self.runner, LayeredRunner):
            return None
        phases, misses = dict(self.runner.phases), self._misses
        if misses is None:
            return ExpertStats(self.runner.cache.stats, 0, 0, 0, None, phases)
        return misses.stats(phases)

    @property
    def warnings(self) -> list[str]:
        """Warnings about threads, pinned memory, cache and profile, one line each."""
        found, misses = [self.threads.warning], self._misses
        if misses:
            profile = self._profile.warning if self._profile else ""
            found += [*misses.warnings, profile]
        return [line for line in found if line]

    def drain_messages(self) -> list[str]:
        """Return the guard's messages since the last call, one line each."""
        guard = self._misses.residency.guard if self._misses else None
        if not guard:
            return []
        found, guard.messages = guard.messages, []
        return found

    def hand_over(self) -> None:
        """Release the engine from this thread; the next thread that calls owns it.

        A running generation goes on there.

        Raises:
            RequestError: the engine is closed, or it belongs to another thread.
        """
        self.ownership.hand_over()

    def reset(self, seq: int = 0) -> None:
        """Empty a sequence and drop the results of a pass in flight that includes it.

        Raises:
            RequestError: there is no such sequence, the engine is closed, or it belongs to another
                thread.
            EngineBusy: a generation is running.
        """
        self.ownership.enter_alone()
        self.passes.reset(seq)

    def held(self, seq: int) -> list[int]:
        """Return the token ids that a sequence holds.

        Raises:
            RequestError: there is no such sequence.
        """
        return self.passes.held(seq)

    def forward(
        self,
        tokens: Ids,
        seq: int = 0,
        all_rows: bool = False,
        greedy: bool = False,
        cancel: CancelToken | None = None,
    ) -> Output:
        """Run token rows as one pass and wait for it.

        tokens: numpy shape [n_seq_tokens], or [n_seqs, n_seq_tokens] for consecutive sequences from
            seq.
        all_rows: results for every row; otherwise for the last row of each sequence.
        greedy: return the device's argmax instead of logits.

        Raises:
            RequestError, ContextOverflow, EngineBusy, Cancelled: as in `submit`.
            NativeError, ModelFileError: as in `collect`.
        """
        self.submit(tokens, seq, all_rows, greedy, cancel)
        return self.collect()

    def forward_logits(
        self, tokens: Ids, pos0: int = 0, seq: int = 0, all_rows: bool = True
    ) -> npt.NDArray[np.float32]:
        """Run tokens as one pass from position pos0; return logits F32 [n_out, n_vocab] (numpy).

        Raises:
            RequestError: the sequence does not hold pos0 positions; others as in `forward`.
        """
        self.ownership.enter_alone()
        self.passes.expect_position(seq, pos0)
        return self.forward(tokens, seq, all_rows).require_logits()

    def forward_nodes(
        self, tokens: Ids, pos0: int = 0, seq: int = 0
    ) -> dict[tuple[str, int], npt.NDArray[Any]]:
        """Run tokens as one pass; return every named node by (name, il), in numpy shapes.

        On CUDA, set GGML_CUDA_DISABLE_FUSION=1 first: fused nodes have no values.

        Raises:
            RequestError: as in `forward_logits`.
            ConfigError: not every expert is resident.
        """
        self.ownership.enter_alone()
        self.passes.expect_position(seq, pos0)
        return self.passes.nodes(tokens, seq)

    def submit(
        self,
        tokens: Ids,
        seq: int,
        all_rows: bool,
        greedy: bool,
        cancel: CancelToken | None,
    ) -> None:
        """Start a pass without waiting; arguments as in `forward`.

        Only one pass may be in flight: collect it before the next. If a pass fails or is cancelled,
        its sequences are emptied.

        Raises:
            RequestError: wrong ids or shape, too many rows, a pass is in flight, the engine is
                closed, or it belongs to another thread.
            ContextOverflow: the rows do not fit into the context.
            EngineBusy: a generation is running.
            Cancelled: cancel was set while the pass was launched.
        """
        self.ownership.enter_alone()
        self.passes.submit(tokens, seq, all_rows, greedy, cancel)

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results.

        Raises:
            RequestError: no pass is in flight, the engine is closed, or it belongs to another
                thread.
            EngineBusy: a generation is running.
            NativeError: a result is not finite; the message names the first such layer.
            ModelFileError: the model file was cut short; the engine is unusable from then on.
        """
        self.ownership.enter_alone()
        return self.passes.collect()

    def generate(
        self,
        prompt: Ids | str,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: SequenceOf[str] = (),
        *,
        cancel: CancelToken | None = None,
        keep_logits: bool = False,
        progress: Progress | None = None,
        ignore_eos: bool = False,
        text: bool = True,
        reuse: bool = False,
    ) -> Events:
        """Generate from a prompt; yields one event for each token, the last with a finish_reason.

        The computation starts when the caller asks for the first event. From then on the generation
        owns the engine until its last event, `close()`, or the deletion of the iterator.

        prompt: token ids, or text for `tokenizer.encode`.
        sampling: None for greedy decoding.
        max_tokens: limit of generated tokens; None: until the context is full.
        keep_logits: each event carries the logits computed since the last event.
        progress: called with ("prefill", rows done, rows in total) after each chunk of the prompt.
        ignore_eos: continue after an end-of-generation token.
        text: decode tokens to text; False gives ids only and needs no vocabulary.
        reuse: if the prompt starts with the tokens that the sequence holds, compute only the rest.

        Raises:
            RequestError, ContextOverflow: the request is wrong; raised by this call.
            EngineBusy: another generation is running; raised when the first event is asked for.
            ModelFileError: the model file was changed or cut short.
            NativeError: a result is not finite.
        """
        self.ownership.enter()
        sampling = (sampling or SamplingParams(temperature=0.0)).validate(self.hparams.n_vocab)
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        ids = checked_ids(prompt, self.hparams.n_vocab).reshape(-1)
        vocabulary = self.tokenizer if text else None
        sequence = Sequence(
            ids.tolist(),
            n_ctx=self.n_ctx,
            max_tokens=max_tokens,
            piece=vocabulary.piece if vocabulary else None,
            eog_ids=vocabulary.eog_ids if vocabulary and not ignore_eos else frozenset(),
            stop=stop,
        )
        generation = Generation(self, sequence, ids, sampling, cancel, keep_logits, progress)
        return Events(generation.run(reuse), self.ownership)

    def close(self) -> None:
        """Free everything in reverse order of loading; a second call does nothing."""
        self.ownership.is_closed = True
        self._stack.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
