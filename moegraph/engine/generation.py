"""The generation loop: from prompt ids to events."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled
from ..events import CancelToken, GenerationEvent, Progress
from ..kinds import Kind
from ..runner import Output
from ..runner.sweep_batch import SweepBatch
from ..sampling import SamplingParams
from .loader import LoadedModel
from .ownership import Ownership, is_live
from .passes import Passes
from .prefixes import Prefixes
from .rows import RowSampler
from .sequence import Sequence


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
    """One run of the loop: the prompt in chunks, then one token at a time.

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
    ) -> None:
        """prefixes: None to compute the whole prompt. Others: as in `Engine.generate`."""
        self.model = model
        self.passes = passes
        self.ownership = ownership
        self.sequence = sequence
        self.ids = ids
        self.cancel = cancel or CancelToken()
        self.keep_logits = keep_logits
        self.progress = progress
        self.prefixes = prefixes
        self.marks = list(marks) if prefixes else []
        self.greedy = not sampling.needs_logits and not keep_logits
        self.sampler = RowSampler(sampling, model.file.hparams.n_vocab)
        self.sampler.accept_all(sequence.prompt)
        self.prefill_s = self.decode_s = 0.0
        self.is_reading = False  # a prompt that fails leaves the sequence as it was
        self.n_reused = self.n_read = 0

    def run(self) -> Generator[GenerationEvent, None, None]:
        """Yield the events."""
        passes, device = self.passes, self.model.stage.device
        self.model.file.check_unchanged()
        self.started = time.perf_counter()
        n_reused = 0
        if self.prefixes is None:
            passes.reset(0)
        else:
            n_reused = self.prefixes.resume(0, self.ids)
            self.marks = self.prefixes.begin(self.ids, self.marks, n_reused)
        self.n_reused = self.n_read = n_reused
        device.bind_cancel(self.cancel.flag)
        finished = False
        try:
            yield from self._steps(n_reused)
            finished = True
        except Cancelled:
            if not self.is_reading:
                passes.reset(0)
            finished = True
            self._clock()
            text = self.sequence.cancel()
            yield self._event(None, text, None, self.sequence.finish_reason)
        finally:
            # an error, or the caller closed it; what fails in the prompt undoes itself
            is_lost = not finished and not self.is_reading
            if is_lost:
                passes.abandon(0)
            if not device.compute.is_closed:
                device.bind_cancel(None)
                if is_lost and self.ownership.is_here:
                    passes.reset(0)

    def _steps(self, n_reused: int) -> Iterator[GenerationEvent]:
        sequence = self.sequence
        output, logits = self._prefill(n_reused)
        self._clock()
        if sequence.finish_reason:  # nothing to generate
            yield self._event(None, "", logits, sequence.finish_reason)
            return
        while True:
            token = self._pick(output)
            sequence.append(token)
            self._clock()
            if sequence.finish_reason:
                yield self._event(token, sequence.tell(), logits, sequence.finish_reason)
                return
            try:
                self._submit(np.array([[token]], dtype=np.int32), Kind.DECODE)
            except Cancelled:
                # its token was sampled before the cancellation
                yield self._event(token, sequence.tell(), logits, None)
                raise
            # the device computes: now there is time for the rest
            self.sampler.prepare()
            yield self._event(token, sequence.tell(), logits, None)
            output = self.passes.collect()
            logits = output.logits if self.keep_logits else None

    def _prefill(self, n_reused: int) -> tuple[Output, npt.NDArray[np.float32] | None]:
        n = len(self.ids)

        def progress(n_rows: int) -> None:
            self.n_read = n_reused + n_rows
            if self.progress:
                self.progress("prefill", self.n_read, n)

        def meanwhile() -> None:
            if not self.sequence.finish_reason:
                self.passes.build_next(0, self.greedy, self._draws())

        cuts = tuple(mark for mark in self.marks if n_reused < mark < n)
        tokens, draws = self.ids[n_reused:], self._draws()
        batch = SweepBatch(tokens, 0, self.keep_logits, self.greedy, draws, cuts)
        self.is_reading = True
        output, saved = self.passes.read(batch, self.cancel, progress, meanwhile)
        self.is_reading = False
        if self.prefixes:
            for states in saved:
                self.prefixes.save(0, states)
            if n in self.marks:
                self.prefixes.save(0)
        return output, output.logits if self.keep_logits else None

    def _submit(self, tokens: npt.NDArray[np.int32], kind: Kind) -> None:
        self.passes.submit(
            tokens, 0, self.keep_logits, self.greedy, self.cancel, kind, self._draws()
        )

    def _draws(self) -> npt.NDArray[np.int32] | None:
        """Return what a pass needs to list candidates; None if it returns something else."""
        draws = None if self.greedy or self.keep_logits else self.sampler.draw()
        return None if draws is None else draws[None]

    def _pick(self, output: Output) -> int:
        if output.argmax is not None:
            return int(output.argmax[-1])
        if output.candidates is not None:
            token = self.sampler.sample(output.candidates[-1], lambda: self.passes.logits(0))
        else:
            token = self.sampler.sample(None, lambda: output.require_logits()[-1])
        self.sampler.accept(token)
        return token

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
    ) -> GenerationEvent:
        return GenerationEvent(
            token,
            text,
            self.sequence.n_prompt,
            self.sequence.n_generated,
            self.prefill_s,
            self.decode_s,
            reason,
            logits,
            self.n_reused,
            self.n_read,
        )
