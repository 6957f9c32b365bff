"""The generation loop: from prompt ids to events."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled
from ..events import CancelToken, GenerationEvent, Progress
from ..kinds import Kind
from ..runner import Output
from ..sampling import Sampler, SamplingParams
from .loader import LoadedModel
from .ownership import Ownership, is_live
from .passes import Passes
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
    ) -> None:
        self.model = model
        self.passes = passes
        self.ownership = ownership
        self.sequence = sequence
        self.ids = ids
        self.cancel = cancel or CancelToken()
        self.keep_logits = keep_logits
        self.progress = progress
        self.greedy = not sampling.needs_logits and not keep_logits
        self.sampler = Sampler(sampling, model.file.hparams.n_vocab)
        self.sampler.accept_all(ids.tolist())
        self.prefill_s = self.decode_s = 0.0
        self.is_reading = False  # a prompt that fails leaves the sequence as it was
        self.n_reused = self.n_read = 0

    def run(self, reuse: bool) -> Generator[GenerationEvent, None, None]:
        """Yield the events; reuse: as in `Engine.generate`."""
        passes, device = self.passes, self.model.stage.device
        self.model.file.check_unchanged()
        held = passes.held(0)
        n_reused = len(held)
        if not (reuse and 0 < n_reused < len(self.ids) and self.ids[:n_reused].tolist() == held):
            passes.reset(0)
            n_reused = 0
        self.n_reused = self.n_read = n_reused
        self.started = time.perf_counter()
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
            text = sequence.append(token)
            self._clock()
            event = self._event(token, text, logits, sequence.finish_reason)
            if sequence.finish_reason:
                yield event
                return
            try:
                self._submit(np.array([[token]], dtype=np.int32), Kind.DECODE)
            except Cancelled:
                yield event  # its token was sampled before the cancellation
                raise
            yield event
            output = self.passes.collect()
            logits = output.logits if self.keep_logits else None

    def _prefill(self, n_reused: int) -> tuple[Output, npt.NDArray[np.float32] | None]:
        n = len(self.ids)

        def progress(n_rows: int) -> None:
            self.n_read = n_reused + n_rows
            if self.progress:
                self.progress("prefill", self.n_read, n)

        self.is_reading = True
        output = self.passes.read(
            self.ids[n_reused:], 0, self.keep_logits, self.greedy, self.cancel, progress
        )
        self.is_reading = False
        return output, output.logits if self.keep_logits else None

    def _submit(self, tokens: npt.NDArray[np.int32], kind: Kind) -> None:
        self.passes.submit(tokens, 0, self.keep_logits, self.greedy, self.cancel, kind)

    def _pick(self, output: Output) -> int:
        if output.argmax is not None:
            return int(output.argmax[-1])
        token = self.sampler.sample(output.require_logits()[-1])
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
