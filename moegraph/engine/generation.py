"""The generation loop: from prompt ids to events."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled
from ..events import CancelToken, GenerationEvent, Progress
from ..loop.drawing import Drawing
from ..loop.requests import Constraint
from ..loop.sequence import Sequence
from ..passes.passes import Passes
from ..passes.prefixes import Prefixes
from ..passes.prompts import is_short
from ..passes.speculation import Speculation
from ..runner import Batch, Output
from ..runner.sweep_batch import SweepBatch
from ..sampling import SamplingParams
from .drafted import DraftedSteps
from .loader import LoadedModel
from .ownership import Ownership, is_live
from .steps import SEQ, Drawn, Steps


class Events(Iterator[GenerationEvent]):
    """The events of one generation; it claims the engine when its first event is asked for.

    If a call is refused because the engine is busy or belongs to another thread, the generation
    does not change.
    """

    def __init__(self, steps: Generator[GenerationEvent, None, None], ownership: Ownership) -> None:
        self._steps = steps
        self._ownership = ownership

    def __next__(self) -> GenerationEvent:
        if is_live(self._steps):  # an ended generation needs no engine
            self._ownership.claim(self._steps)
        return next(self._steps)

    def close(self) -> None:
        """End the generation and release the engine; a second call does nothing.

        Raises:
            RequestError: the generation is running and the engine belongs to another thread.
        """
        if self._ownership.holds(self._steps):
            self._ownership.enter()
        self._steps.close()


class Generation:
    """One run of the loop: the prompt in chunks, then steps, each of which draws tokens.

    The next pass starts before an event is yielded, so that the device computes while the caller
    handles the text.
    """

    def __init__(
        self,
        model: LoadedModel,
        passes: Passes,
        ownership: Ownership,
        sequence: Sequence,
        ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        cancel: CancelToken | None,
        keep_logits: bool,
        progress: Progress | None,
        prefixes: Prefixes | None,
        marks: SequenceOf[int],
        speculation: Speculation | None,
        constraint: Constraint | None,
    ) -> None:
        """prefixes: None to compute the whole prompt. Others: as in `Engine.generate`.

        speculation: what drafts; None to draw one token with each pass.
        """
        self.model = model
        self.passes = passes
        self.ownership = ownership
        self.sequence = sequence
        self.ids = ids
        self.cancel = cancel or CancelToken()
        self.keep_logits = keep_logits
        self.progress = progress
        self.prefixes = prefixes
        self.marks = [int(mark) for mark in marks] if prefixes else []  # also those of numpy
        n_vocab = model.file.hparams.n_vocab
        drawing = Drawing(passes, sequence, sampling, n_vocab, keep_logits, constraint)
        self.greedy = drawing.greedy
        self.speculation = speculation
        self.steps = Steps(passes, drawing, self.cancel)
        if speculation:
            streams = model.stage.device.can.streams
            self.steps = DraftedSteps(passes, drawing, self.cancel, speculation, streams)
        self.prefill_s = self.decode_s = 0.0
        self.is_reading = False  # a prompt that fails leaves the sequence as it was
        self.n_reused = self.n_read = 0

    def run(self) -> Generator[GenerationEvent, None, None]:
        """Yield the events."""
        passes, devices = self.passes, self.model.devices
        self.model.file.check_unchanged()
        self.started = time.perf_counter()
        n_reused = 0
        if self.prefixes is None:
            passes.reset(SEQ)
        else:
            n_reused = self.prefixes.resume(SEQ, self.ids)
            self.marks = self.prefixes.begin(self.ids, self.marks, n_reused)
        self.n_reused = self.n_read = n_reused
        if self.speculation:
            self.speculation.begin(SEQ, passes.held(SEQ))
        self._bind(self.cancel.flag)
        finished = False
        try:
            yield from self._steps(n_reused)
            finished = True
        except Cancelled:
            finished = True
            self._clock()
            text = self.sequence.cancel()
            yield self._event(None, text, None, self.sequence.finish_reason)
        finally:
            # an error, or the caller closed it; what fails in the prompt undoes itself
            is_lost = not finished and not self.is_reading
            if is_lost:
                passes.abandon(SEQ)
            if not devices[-1].compute.is_closed:
                self._bind(None)
                if is_lost and self.ownership.is_here:
                    passes.reset(SEQ)

    def _bind(self, flag: npt.NDArray[np.int32] | None) -> None:
        for device in self.model.devices:
            device.bind_cancel(flag)

    def _steps(self, n_reused: int) -> Iterator[GenerationEvent]:
        sequence, steps = self.sequence, self.steps
        output = self._prefill(n_reused)
        self._bind(None)  # what is left are passes of a few rows; see `Steps.submit`
        self._clock()
        if sequence.finish_reason:  # nothing to generate
            logits = output.logits if self.keep_logits else None
            yield self._event(None, "", logits, sequence.finish_reason)
            return
        drawn = steps.first(output)
        while True:
            self._clock()
            if sequence.finish_reason:
                yield from self._events(drawn)
                return
            try:
                steps.submit()
            except Cancelled:
                # these tokens were drawn before the cancellation
                yield from self._events(drawn)
                raise
            yield from self._events(drawn)
            drawn = steps.collect()

    def _events(self, drawn: SequenceOf[Drawn]) -> Iterator[GenerationEvent]:
        """Yield the events of the last tokens."""
        sequence = self.sequence
        n_before = sequence.n_generated - len(drawn)
        for n, one in enumerate(drawn, n_before + 1):
            text = sequence.tell()
            reason = sequence.finish_reason if n == sequence.n_generated else None
            yield self._event(one.token, text, one.logits, reason, n)

    def _prefill(self, n_reused: int) -> Output:
        n = len(self.ids)

        def progress(n_rows: int) -> None:
            self.n_read = n_reused + n_rows
            if self.progress:
                self.progress("prefill", self.n_read, n)

        def meanwhile() -> None:
            runner = self.model.runner
            if runner.device.can.streams and not self.sequence.finish_reason:
                row = np.zeros((1, 1), dtype=np.int32)  # its graphs, while the device computes
                batch = Batch(row, (SEQ,), greedy=self.greedy, draws=self.steps.draws())
                runner.build_ahead(batch)

        cuts = tuple(mark for mark in self.marks if n_reused < mark < n)
        tokens, draws = self.ids[n_reused:], self.steps.draws()
        batch = SweepBatch(tokens, SEQ, self.keep_logits, self.greedy, draws, cuts)
        is_sweep = not is_short(batch, self.model.runner.n_ubatch)
        self.is_reading = True
        if self.speculation and is_sweep:
            batch = replace(batch, taps=self.speculation.prompt_taps(SEQ, tokens))
        output, saved = self.passes.read(batch, self.cancel, progress, meanwhile)
        self.is_reading = False
        if self.speculation and not is_sweep:
            self.speculation.committed(SEQ, tokens.tolist())
        if self.prefixes:
            for states in saved:
                self.prefixes.save(SEQ, states)
            if n in self.marks:
                self.prefixes.save(SEQ)
        return output

    def _clock(self) -> None:
        now = time.perf_counter() - self.started
        if not self.sequence.n_generated or not self.prefill_s:
            self.prefill_s = now
        self.decode_s = now - self.prefill_s

    def _event(
        self,
        token: int | None,
        text: str,
        logits: npt.NDArray[np.float32] | None,
        reason: str | None,
        n_generated: int | None = None,
    ) -> GenerationEvent:
        """n_generated: None: all tokens so far."""
        return GenerationEvent(
            token,
            text,
            self.sequence.n_prompt,
            self.sequence.n_generated if n_generated is None else n_generated,
            self.prefill_s,
            self.decode_s,
            reason,
            logits,
            self.n_reused,
            self.n_read,
        )
