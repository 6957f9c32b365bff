"""One request on the caller's thread: the loop turns as the caller asks for events."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..events import CancelToken, GenerationEvent, Progress
from ..loop.answer import Answer
from ..loop.core import Core
from ..loop.loop import Loop
from ..loop.requests import Request
from ..text.tokenizer import Tokenizer
from .ownership import Ownership, is_live

SEQ = 0  # the sequence of a generation


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
    """A request that a loop of its own answers, in sequence 0.

    A step of the loop ends when the next pass was started, so the device computes while the text
    of the last one is made and the caller handles it.
    """

    def __init__(
        self, core: Core, ownership: Ownership, request: Request, vocabulary: Tokenizer | None,
        cancel: CancelToken | None, progress: Progress | None, keep_logits: bool,
    ) -> None:  # fmt: skip
        """vocabulary: None for no text. Others: as in `Engine.generate`.

        Raises:
            RequestError, ContextOverflow: the request is wrong.
        """
        self._core, self._ownership = core, ownership
        self._n_told = 0
        self._answer = Answer.of(request, core, vocabulary, None, cancel, progress, keep_logits)

    def run(self) -> Generator[GenerationEvent, None, None]:
        """Yield the events."""
        answer, loop = self._answer, Loop(self._core, 1)
        is_failed = False
        answer.submit()
        if not answer.request.reuse:
            self._core.passes.reset(SEQ)  # else what it holds would be saved
        loop.add(answer)
        try:
            while not answer.is_over:
                if answer.cancel.is_set() and answer.sequence.tokens:
                    loop.cancel(answer)
                if not loop.step() and not answer.is_over:
                    raise InternalError("a request was left without an answer")
                while answer.fresh:
                    yield self._next_event()
            if answer.error:
                error, answer.error, is_failed = answer.error, None, True
                try:
                    raise error
                finally:
                    del error  # its frames know the answer: a circle would keep their memory
            if not answer.is_drawn or not self._n_told:
                reason = answer.reason or "cancelled"
                text = "" if answer.is_drawn else answer.sequence.cancel(reason)
                yield self._event(None, text, answer.prompt_logits, reason)
        finally:
            if not answer.is_over or is_failed:
                self._give_up()

    def _give_up(self) -> None:
        """End early: after an error, or because the caller closed the generation."""
        passes, answer = self._core.passes, self._answer
        if answer.sequence.tokens:
            passes.abandon(SEQ)
        else:  # what the sequence was before the prompt is right
            passes.abandon_prompts()
        if self._core.devices[-1].compute.is_closed:
            return
        for device in self._core.devices:
            device.bind_cancel(None)
        if self._ownership.is_here:
            passes.clean_up()

    def _next_event(self) -> GenerationEvent:
        """Return the event of the next token that was drawn."""
        answer, sequence = self._answer, self._answer.sequence
        token, logits = answer.fresh.popleft()
        self._n_told += 1
        text = sequence.tell()
        reason = sequence.finish_reason if self._n_told == len(sequence.tokens) else None
        return self._event(token, text, logits, reason)

    def _event(
        self, token: int | None, text: str, logits: npt.NDArray[np.float32] | None,
        reason: str | None,
    ) -> GenerationEvent:  # fmt: skip
        answer = self._answer
        if logits is not None and logits.ndim == 1:
            logits = logits[None]
        prefill_s, decode_s = answer.times()
        return GenerationEvent(
            token, text, len(answer.ids), self._n_told, prefill_s, decode_s, reason, logits,
            answer.n_cached, answer.n_read,
        )  # fmt: skip
