"""The engine: a model loaded on a device, for passes and generations."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile, open_model
from ..closing import Closable
from ..config import EngineConfig
from ..draft.dflash import DFlashDrafter, describe
from ..draft.plan import SpecStats
from ..errors import RequestError
from ..events import CancelToken, Progress
from ..experts.cachestats import ExpertStats
from ..ggml.handles import closed_on_failure
from ..gguf import resolve_target
from ..loop.answer import Core
from ..loop.requests import Constraint, Request
from ..passes.checks import Cancel, Seqs, prompt_ids
from ..passes.grouppasses import GroupPasses
from ..passes.passes import Passes
from ..passes.prefixdisk import PrefixDisk
from ..passes.prefixes import Prefixes
from ..passes.prefixstore import PrefixStore
from ..passes.sequencecopies import SequenceCopies
from ..passes.slotfiles import SlotFiles
from ..pictures import Picture
from ..placement.profilefile import ProfileUpdate
from ..runner import Output, StagedRunner
from ..runner.sweep_batch import SweepBatch
from ..sampling import SamplingParams
from ..text.tokenizer import Tokenizer
from ..units import MiB
from .drafters import open_speculation
from .generation import Events, Generation, Ownership
from .loader import LoadedModel, Loading, prefix_identity, prefix_widths
from .use import ExpertUse, memory_use

if TYPE_CHECKING:
    from .chat import ChatModel
    from .chatanswer import ChatAnswer

Ids = SequenceOf[int] | npt.NDArray[np.int32]
Objects = SequenceOf[Mapping[str, Any]]


class Engine(Closable):
    """One model, loaded on its devices, generating for one sequence at a time.

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
        tokenizer: Future[Tokenizer] | None = None,
    ) -> None:
        """Load an open model file and own it; see `Engine.load`.

        tokenizer: that of the model, which is being opened; the engine owns it too.
        """
        self.file = model
        self.config = config
        self.hparams = model.hparams
        self._stack = ExitStack()
        self._stack.callback(model.close)
        self._opening = tokenizer
        if tokenizer:
            self._stack.callback(_close_opened, tokenizer)
        self.ownership = Ownership()
        with closed_on_failure():
            try:
                loading = Loading(model, config, self._stack)
                self._take(loading.load(progress, routing, tokenizer))
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
        """Load a GGUF file, or a shipped model by its name, onto one or several devices.

        progress: called with ("load", bytes done, bytes in total).
        routing: recorded expert ids, numpy shape [n_steps, n_layer, n_expert_used]; they replace
            the router's choice in one-row passes, for measuring.

        Raises:
            ConfigError: a setting is wrong, or there is no such device.
            ModelFileError, UnsupportedModel: moegraph cannot run the file.
            OutOfDeviceMemory: the model does not fit; the message names the setting to lower.
        """
        config = (config or EngineConfig()).validate()
        return cls(open_model(resolve_target(path)), config, progress, routing)

    def _take(self, loaded: LoadedModel) -> None:
        """Keep what was loaded, and make what runs passes over it."""
        self._loaded = loaded
        decided = loaded.config
        self.config = replace(self.config, n_ubatch=decided.n_ubatch, n_ctx=decided.n_ctx)
        self._profile = loaded.profile
        self._use = ExpertUse(loaded.runner)
        self.n_ctx = loaded.n_ctx
        self.plan, self.stage_plans = loaded.plan, loaded.stage_plans
        self.stages, self.stage = loaded.stages, loaded.stage
        self.devices, self.device = loaded.devices, loaded.stage.device
        self.state = loaded.sequences
        self.threads = loaded.threads
        self.runner = loaded.runner
        runner = loaded.runner
        self._messages: list[str] = []
        rest = loaded.files, loaded.n_ctx, loaded.threads
        if isinstance(runner, StagedRunner):
            self._messages = runner.lines
            self.passes: Passes = GroupPasses(runner, *rest)
        else:
            self.passes = Passes(runner, *rest)
        self.speculation = open_speculation(
            loaded.drafters, loaded.config, loaded.runner, loaded.pass_times,
            loaded.profile.profile.drafts if loaded.profile else {},
        )  # fmt: skip
        self.copies = SequenceCopies(self.passes, lambda: self.speculation)
        self._stack.callback(self.copies.close)
        limit = None if self.config.cache_ram < 0 else self.config.cache_ram * MiB
        self.prefixes = Prefixes(self.passes, self.copies, PrefixStore(self.copies, limit))
        self._stack.callback(self.prefixes.close)
        self.slot_files: SlotFiles | None = None

    @property
    def core(self) -> Core:
        """What a loop over requests needs of this engine."""
        return Core(
            self.file, self.passes, self.prefixes, self.copies, self.speculation, self.runner,
            self.devices, self.stage, self.n_ctx,
            self.config.n_keep if self.config.context_shift else None,
        )  # fmt: skip

    def keep_prefixes(
        self, folder: str | os.PathLike[str] | None, max_bytes: int, slots: Path | None = None
    ) -> None:
        """Keep beginnings of prompts in a folder too, in files of at most max_bytes together.

        They outlive the engine. slots: a folder in which a `Service` saves sequences by name.

        Raises:
            ConfigError: the folder cannot be used.
            ModelFileError: the model file cannot be read.
        """
        self.ownership.enter_alone()
        kept = prefix_identity(self._loaded), prefix_widths(self._loaded)
        if folder is not None:
            self.prefixes.store.disk = PrefixDisk(Path(folder), *kept, max_bytes)
        if slots is not None:
            self.slot_files = SlotFiles(self.prefixes, self.copies, Path(slots), *kept)

    def save_profile(self) -> ProfileUpdate | None:
        """Add the experts chosen since the last call to the routing profile; see `ProfileUpdate`.

        How right drafts were is added too. Returns None if there is no profile, or if no expert can
        be missing and nothing was drafted.
        """
        if self._profile is None:
            return None
        counts, stats = self._use.counts(), self.spec_stats()
        drafts = stats.drafts if stats else {}
        return None if counts is None and not drafts else self._profile.update(counts, drafts)

    @property
    def load_times(self) -> dict[str, float]:
        """Seconds of each phase of loading, in order; together the time that `Engine.load` took.

        device: open the device and watch the file. plan: divide the memory. weights: all weights
        except routed experts. banks: expert slots, and the experts of full layers. state: the KV
        cache. host: experts in host memory. tokenizer: wait for a tokenizer that is being opened.
        measure: times of the CPU and of uploads. fill: experts that are resident from the start.
        graphs: build the runner's first graphs. drafters, drafts: open what drafts tokens, and time
        verify passes; without drafts, neither. host, measure and fill only if experts can be
        missing.
        """
        return dict(self._loaded.times)

    @property
    def device_name(self) -> str:
        """Names of the devices in use, as --device takes them: cpu, cuda:N or cuda:0,cuda:1."""
        return self._loaded.device_name

    @property
    def mode(self) -> str:
        """'whole' or 'layered'."""
        return self.runner.mode

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
        if self._opening:
            return self._opening.result()
        return self._stack.enter_context(closing(Tokenizer(self.file)))

    def memory(self) -> dict[str, int]:
        """Return bytes: peaks of device and host, parts on the host, and parts on the device.

        host_pinned_bytes: copies of experts, and what copies of prompts pass through.
        host_mapped_bytes: tensors that passes read where the file is mapped; the system may drop
        them from memory and read them again.

        Raises:
            RequestError: the engine is closed.
        """
        self.ownership.require_open()
        return memory_use(self._loaded)

    def expert_stats(self) -> ExpertStats | None:
        """Return the counters of the expert cache; None in mode 'whole', which has no cache."""
        return self._use.stats()

    def spec_stats(self) -> SpecStats | None:
        """Return what was drafted and accepted since loading; None if nothing drafts."""
        return self.speculation.controller.stats if self.speculation else None

    @property
    def warnings(self) -> list[str]:
        """Warnings about threads, drafters, pinned memory, cache and profile, one line each."""
        found = [self.threads.warning, *self._loaded.warnings, *self._use.warnings]
        if self._use.misses and self._profile:
            found.append(self._profile.warning)
        return [line for line in found if line]

    @property
    def drafter_lines(self) -> list[str]:
        """What the drafter's file says: target layers, mask, block, window, rope, a line each."""
        found = [one for one in self._loaded.drafters if isinstance(one, DFlashDrafter)]
        return [line for drafter in found for line in describe(drafter.hparams)]

    def drain_messages(self) -> list[str]:
        """Return messages about devices, misses, drafters, saved prompts since the last call."""
        messages, self._messages = self._messages, []
        found = self.speculation.drain_messages() if self.speculation else []
        disk = self.prefixes.store.disk
        found += disk.drain_messages() if disk else []
        return messages + found + self.copies.memory.drain_messages()

    def hand_over(self) -> None:
        """Release the engine from this thread; the next thread that calls owns it.

        A running generation goes on there.

        Raises:
            RequestError: the engine is closed, or it belongs to another thread.
        """
        self.ownership.hand_over()

    def reset(self, seq: int = 0) -> None:
        """Empty a sequence, also of a pass in flight; its other sequences and results stay.

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
        return list(self.passes.held(seq))

    def forward(
        self,
        tokens: Ids,
        seq: Seqs = 0,
        all_rows: bool = False,
        greedy: bool = False,
        cancel: Cancel = None,
    ) -> Output:
        """Run token rows as one pass and wait for it.

        tokens: numpy shape [n_seq_tokens], or [n_seqs, n_seq_tokens].
        seq: the sequence of each row of tokens, or the first of consecutive sequences.
        all_rows: results for every row; otherwise for the last row of each sequence.
        greedy: return the device's argmax instead of logits.
        cancel: a token for the pass, or one or None for each row of tokens.

        Raises:
            RequestError, ContextOverflow, EngineBusy, Cancelled: as in `submit`.
            NativeError, ModelFileError: as in `collect`.
        """
        self.ownership.enter_alone()
        return self.passes.run(tokens, seq, all_rows, greedy, cancel)

    def prefill(
        self,
        tokens: Ids,
        seq: int = 0,
        all_rows: bool = False,
        greedy: bool = False,
        cancel: CancelToken | None = None,
        progress: Callable[[int], None] = lambda n_rows: None,
    ) -> Output:
        """Compute a prompt of any length that continues a sequence, and wait for it.

        The prompt is computed layer by layer, so that an expert that is not on the device is copied
        there once (docs/how-it-works.md). If this fails or is cancelled, the sequence is what it
        was before.

        tokens: [n]. all_rows, greedy: as in `forward`.
        progress: called with the number of rows that the work done so far amounts to.

        Raises:
            RequestError: wrong ids or sequence, a pass is in flight, the engine is closed, or it
                belongs to another thread.
            ContextOverflow: the rows do not fit into the context.
            EngineBusy: a generation is running.
            Cancelled: cancel was set.
            NotFinite, ModelFileError: as in `collect`.
        """
        self.ownership.enter_alone()
        ids = prompt_ids(tokens, self.hparams.n_vocab)
        return self.passes.read(SweepBatch(ids, seq, all_rows, greedy), cancel, progress)[0]

    def forward_logits(
        self, tokens: Ids, pos0: int = 0, seq: int = 0, all_rows: bool = True
    ) -> npt.NDArray[np.float32]:
        """Run tokens as one pass from position pos0; return logits F32 [n_out, n_vocab] (numpy).

        Raises:
            RequestError: the sequence does not hold pos0 positions; others as in `forward`.
        """
        self.ownership.enter_alone()
        self._expect_position(seq, pos0)
        return self.forward(tokens, seq, all_rows).require_logits()

    def _expect_position(self, seq: int, pos0: int) -> None:
        n_held = len(self.passes.held(seq))
        if pos0 != n_held:
            raise RequestError(
                f"sequence {seq} holds {n_held} positions, but the pass starts at {pos0}; "
                "reset the sequence or change pos0"
            )

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
        self._expect_position(seq, pos0)
        return self.passes.nodes(tokens, seq)

    def submit(self, tokens: Ids, seq: Seqs, all_rows: bool, greedy: bool, cancel: Cancel) -> None:
        """Start a pass without waiting; arguments as in `forward`.

        Only one pass may be in flight: collect it before the next. A pass is cancelled once all its
        sequences are; until then it runs to its end, and `reset` ends a single sequence, also in
        flight. A pass that fails or is cancelled before its first graph is launched changes no
        sequence; later, its sequences are emptied.

        Raises:
            RequestError: wrong ids or shape, too many rows, a pass is in flight, the engine is
                closed, or it belongs to another thread.
            ContextOverflow: the rows do not fit into the context.
            EngineBusy: a generation is running.
            Cancelled: all sequences were cancelled while the pass was launched.
        """
        self.ownership.enter_alone()
        self.passes.submit(tokens, seq, all_rows, greedy, cancel)

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results.

        Raises:
            RequestError: no pass is in flight, the engine is closed, or it belongs to another
                thread.
            EngineBusy: a generation is running.
            NotFinite: a result is not finite (a NativeError); see `Passes.collect`.
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
        marks: SequenceOf[int] = (),
        constraint: Constraint | None = None,
        pictures: SequenceOf[tuple[int, Picture]] = (),
    ) -> Events:
        """Generate from a prompt; yields one event for each token, the last with a finish_reason.

        The computation starts when the caller asks for the first event. From then on the generation
        owns the engine until its last event, `close()`, or the deletion of the iterator.

        prompt: token ids, or text for `tokenizer.encode`.
        sampling: None for greedy decoding.
        max_tokens: limit of generated tokens; None: until the context is full.
        cancel: ends a prompt at once, and the sequence is what it was; ends an answer after the
            step under way, and the sequence keeps it.
        keep_logits: each event carries the logits computed since the last event.
        progress: called with ("prefill", rows done, rows in total) after each chunk of the prompt.
        ignore_eos: continue after an end-of-generation token.
        text: decode tokens to text; False gives ids only and needs no vocabulary.
        reuse: do not compute anew the beginning that the prompt shares with an earlier one, if the
            sequence can go on there: after all that it holds, or at a mark.
        marks: how many of the prompt's tokens later prompts may begin with; for reuse, the states
            after so many tokens are kept. The limit is `cache_ram`; see `Prefixes`.
        constraint: a grammar that the answer follows.
        pictures: each with its first row in the prompt, which has its ids there.

        Raises:
            RequestError, ContextOverflow: the request is wrong; raised by this call.
            EngineBusy: another generation is running; raised when the first event is asked for.
            ModelFileError: the model file was changed or cut short.
            NativeError: a result is not finite.
        """
        self.ownership.enter()
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        marks = tuple(int(mark) for mark in marks)  # also those of numpy
        request = Request(
            prompt, sampling or SamplingParams(temperature=0.0), max_tokens, stop, ignore_eos,
            marks, reuse=reuse, constraint=constraint, pictures=pictures,
        )  # fmt: skip
        generation = Generation(
            self.core, self.ownership, request, self.tokenizer if text else None, cancel, progress,
            keep_logits,
        )  # fmt: skip
        return Events(generation.run(), self.ownership)

    def chat(
        self, messages: Objects, tools: Objects = (), *, cancel: CancelToken | None = None,
        progress: Progress | None = None, **more: Any,
    ) -> ChatAnswer:  # fmt: skip
        """Answer a conversation; yields the parts of the answer, as `generate` does with events.

        messages, tools: in OpenAI's form. cancel, progress, errors: as in `generate`.
        more: fields of `ChatRequest`, such as sampling, max_tokens, tool_choice and format.
        """
        from .chat import ChatRequest
        from .chatanswer import ChatAnswer

        self.ownership.enter()
        prepared = self._chat_model.prepare(ChatRequest(messages=messages, tools=tools, **more))
        generation = Generation(
            self.core, self.ownership, prepared.request, self.tokenizer, cancel, progress
        )
        return ChatAnswer(Events(generation.run(), self.ownership), prepared.parser)

    @cached_property
    def _chat_model(self) -> ChatModel:
        from .chat import ChatModel

        return self._stack.enter_context(ChatModel.of(self))

    def close(self) -> None:
        """Free everything in reverse order of loading; a second call does nothing.

        The mapping of the file goes with the last reference to the engine.
        """
        self.ownership.is_closed = True
        self._stack.close()


def _close_opened(tokenizer: Future[Tokenizer]) -> None:
    """Close a tokenizer once it is open, unless that failed."""
    if not tokenizer.cancel() and tokenizer.exception() is None:
        tokenizer.result().close()
