"""The generation loop: from prompt ids to events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .errors import Cancelled, InternalError
from .runner import Output
from .sampling import Sampler, SamplingParams
from .sequence import CancelToken, GenerationEvent, Sequence
from .weights import Progress

if TYPE_CHECKING:
    from .engine import Engine


class Generation:
    """One run of the loop: prompt in chunks, then a token at a time.

    The next pass is started before an event is handed out, so that whatever the consumer does with
    the text happens while the device computes.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: Sequence,
        ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        cancel: CancelToken | None,
        keep_logits: bool,
        progress: Progress | None,
    ) -> None:
        self.engine = engine
        self.sequence = sequence
        self.ids = ids
        self.cancel = cancel or CancelToken()
        self.keep_logits = keep_logits
        self.progress = progress
        self.greedy = not sampling.needs_logits and not keep_logits
        self.sampler = Sampler(sampling, engine.hparams.n_vocab)
        self.sampler.accept_all(ids.tolist())
        self.prefill_s = self.decode_s = 0.0
        self.n_reused = 0

    def run(self, reuse: bool) -> Iterator[GenerationEvent]:
        """Yield the events; reuse: continue what the sequence holds if the prompt begins so."""
        engine = self.engine
        engine.file.check_unchanged()
        held = engine.held(0)
        n_reused = len(held)
        if not (reuse and 0 < n_reused < len(self.ids) and self.ids[:n_reused].tolist() == held):
            engine.reset()
            n_reused = 0
        self.n_reused = n_reused
        self.started = time.perf_counter()
        engine.device.bind_cancel(self.cancel.flag)
        finished = False
        try:
            yield from self._steps(n_reused)
            finished = True
        except Cancelled:
            engine.reset()
            finished = True
            self._clock()
            text = self.sequence.cancel()
            yield self._event(None, text, None, self.sequence.finish_reason)
        finally:
            if not engine.device.compute.is_closed:
                engine.device.bind_cancel(None)
            if not finished and not engine.device.compute.is_closed:
                engine.reset()  # an error, or the consumer left in the middle of a pass

    def _steps(self, n_reused: int) -> Iterator[GenerationEvent]:
        sequence = self.sequence
        output, kept = self._prefill(n_reused)
        self._clock()
        if sequence.finish_reason:  # nothing to generate
            yield self._event(None, "", kept, sequence.finish_reason)
            return
        while True:
            token = self._pick(output)
            text = sequence.append(token)
            self._clock()
            event = self._event(token, text, kept, sequence.finish_reason)
            if sequence.finish_reason:
                yield event
                return
            try:
                self._submit(np.array([[token]], dtype=np.int32))
            except Cancelled:
                yield event  # its token was drawn before
                raise
            yield event
            output = self.engine.collect()
            kept = output.logits if self.keep_logits else None

    def _prefill(self, n_reused: int) -> tuple[Output, npt.NDArray[np.float32] | None]:
        rows, step, n = [], self.engine.runner.n_ubatch, len(self.ids)
        output = None
        for start in range(n_reused, n, step):
            chunk = self.ids[start : start + step]
            self._submit(chunk[None, :])
            output = self.engine.collect()
            if self.keep_logits:
                rows.append(output.logits)
            if self.progress:
                self.progress("prefill", min(start + step, n), n)
        if output is None:
            raise InternalError("a prompt without tokens reached the prefill")
        return output, np.concatenate(rows) if rows else None

    def _submit(self, tokens: npt.NDArray[np.int32]) -> None:
        self.engine.submit(tokens, 0, self.keep_logits, self.greedy, self.cancel)

    def _pick(self, output: Output) -> int:
        if output.argmax is not None:
            return int(output.argmax[-1])
        token = self.sampler.sample(output.logits[-1])
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
        )
