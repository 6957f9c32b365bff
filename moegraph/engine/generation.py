"""A generation: one request on the caller's thread, and who owns the engine meanwhile."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import EngineBusy, InternalError, RequestError
from ..events import CancelToken, GenerationEvent, Progress
from ..loop.answer import Answer, Core
from ..loop.loop import Loop
from ..loop.requests import Request
from ..text.tokenizer import Tokenizer

SEQ = 0  # the sequence of a generation
# No thread has this identifier.
_NO_THREAD = 0


def _is_live(steps: Generator[Any, None, None]) -> bool:
    """Return whether a generator has not ended."""
    return inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED


class Ownership:
    """Records which thread and which generation own an engine.

    Thread: the first one that calls after loading or after `hand_over`. Other threads are refused.

    Generation: a generator owns the engine from its first step until it ends. There is only a weak
    reference to it, so it never has to release the engine: a generator that returned, failed, was
    closed or was deleted owns nothing, even if an interrupt ended it.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._thread = _NO_THREAD
        self._generation: weakref.ref[Generator[Any, None, None]] | None = None

    def require_open(self) -> None:
        """Check that the engine is not closed."""
        if self.is_closed:
            raise RequestError("the engine is closed; load the model again")
        if os.getpid() != self._process:
            raise RequestError(
                "the engine was loaded before a fork; load the model in this process"
            )

    def enter(self) -> None:
        """Check that the calling thread owns the engine; make it the owner if no thread is."""
        self.require_open()
        if self._thread != threading.get_ident():
            self._adopt()

    def _adopt(self) -> None:
        with self._lock:
            if self._thread != _NO_THREAD:
                raise RequestError(
                    "the engine belongs to another thread; call hand_over() in that thread first"
                )
            self._thread = threading.get_ident()

    def enter_alone(self) -> None:
        """Check that the calling thread owns the engine and that no generation is running."""
        self.enter()
        if self._owner() is not None:
            raise EngineBusy("another generation is running; close it first")

    def claim(self, generation: Generator[Any, None, None]) -> None:
        """Make a generation the owner until it ends; no effect if it already is."""
        self.enter()
        if self._generation and self._generation() is generation:
            return
        owner = self._owner()
        if owner is None:
            self._generation = weakref.ref(generation)
        elif owner is not generation:
            raise EngineBusy("another generation is running; close it first")

    def holds(self, generation: Generator[Any, None, None]) -> bool:
        """Return whether this generation owns the engine, and the engine is open."""
        return not self.is_closed and self._owner() is generation

    @property
    def is_here(self) -> bool:
        """Whether the engine belongs to the calling thread."""
        return self._thread == threading.get_ident()

    def hand_over(self) -> None:
        """Release the engine from the calling thread; the next thread that calls owns it."""
        self.enter()
        self._thread = _NO_THREAD

    def _owner(self) -> Generator[Any, None, None] | None:
        owner = self._generation() if self._generation else None
        return owner if owner is not None and _is_live(owner) else None


class Events(Iterator[GenerationEvent]):
    """The events of one generation; it claims the engine when its first event is asked for.

    If a call is refused because the engine is busy or belongs to another thread, the generation
    does not change.
    """

    def __init__(self, steps: Generator[GenerationEvent, None, None], ownership: Ownership) -> None:
        self._steps = steps
        self._ownership = ownership

    def __next__(self) -> GenerationEvent:
        if _is_live(self._steps):  # an ended generation needs no engine
            self._ownership.claim(self._steps)
        return next(self._steps)

    def close(self) -> None:
        """End the generation and release the engine; a second call does nothing."""
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
        cancel: CancelToken | None, progress: Progress | None, keep_logits: bool = False,
    ) -> None:  # fmt: skip
        """vocabulary: None for no text. Others: as in `Engine.generate`."""
        self._core, self._ownership = core, ownership
        self._n_told = 0
        self._answer = Answer(request, core, vocabulary, None, cancel, progress, keep_logits)

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
                if answer.cancel.flag[0] and answer.generated.tokens:
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
                text = "" if answer.is_drawn else answer.generated.cancel(reason)
                yield self._event(None, text, answer.prompt_logits, reason)
        finally:
            if not answer.is_over or is_failed:
                self._give_up()

    def _give_up(self) -> None:
        """End early: after an error, or because the caller closed the generation."""
        passes, answer = self._core.passes, self._answer
        if answer.generated.tokens or (answer.decodes_last and answer.n_read == len(answer.ids)):
            passes.abandon(SEQ)
        else:  # what the sequence was before the prompt is right
            passes.prompts.abandon()  # the next call undoes them
        if self._core.devices[-1].compute.is_closed:
            return
        for device in self._core.devices:
            device.bind_cancel(None)
        if self._ownership.is_here:
            passes.clean_up()

    def _next_event(self) -> GenerationEvent:
        """Return the event of the next token that was drawn."""
        answer, generated = self._answer, self._answer.generated
        token, logits = answer.fresh.popleft()
        self._n_told += 1
        text = generated.tell()
        reason = generated.finish_reason if self._n_told == len(generated.tokens) else None
        return self._event(token, text, logits, reason)

    def _event(
        self, token: int | None, text: str, logits: npt.NDArray[np.float32] | None,
        reason: str | None,
    ) -> GenerationEvent:  # fmt: skip
        answer = self._answer
        if logits is not None and logits.ndim == 1:
            logits = logits[None]
        prefill_s, decode_s = answer.times()
        n_prompt, n_read, n_cached = answer.asked or (
            len(answer.ids), answer.n_read, answer.n_cached
        )  # fmt: skip
        return GenerationEvent(
            token, text, n_prompt, self._n_told, prefill_s, decode_s, reason, logits, n_cached,
            n_read,
        )  # fmt: skip
