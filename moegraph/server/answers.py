"""The answers to one client: steps from the engine's thread, in order, on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request as HttpRequest

from ..engine.chat import Prepared
from ..errors import MoegraphError
from ..loop.requests import Step, Usage
from ..text.chat.answer import AnswerParser
from ..text.chat.parts import ContentPart, Part, ReasoningPart
from .errors import RETRY_S, ApiError, from_failure
from .metrics import Meter
from .replies import gone, until_first

if TYPE_CHECKING:
    from ..engine.service import Service, Ticket


T = TypeVar("T")


@dataclass(frozen=True)
class Update:
    """What came of one choice: a step, and the parts of the answer that it completes.

    index: which of the requests it belongs to. is_last: no more comes of this choice.
    """

    index: int
    step: Step
    parts: tuple[Part, ...] = ()

    @property
    def is_reading(self) -> bool:
        """Return whether the step only tells how far the prompt is read."""
        return not self.step.tokens and not self.is_last

    @property
    def is_last(self) -> bool:
        """Return whether the choice is complete."""
        return self.step.finish_reason is not None


class Answers:
    """Submit requests of one client and iterate over what becomes of them.

    Close it at the end, which cancels what still runs. Steps that a slow client has not taken are
    merged, so it holds no more than the answers. n_reasoning: tokens of reasoning.
    warnings: lines for the client.

    If the service refuses one of the requests, none of them runs, and making it raises ApiError.
    """

    def __init__(
        self, service: Service, prepared: Sequence[Prepared], meter: Meter | None = None
    ) -> None:
        if len(prepared) > service.capacity:  # to try again would never help
            raise ApiError(
                400, f"{len(prepared)} answers at a time; this server takes {service.capacity} "
                "requests (-np and --queue together): ask for fewer", param="n",
            )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._steps: deque[tuple[int, Step]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._meter = meter
        self._parsers: list[AnswerParser] = [p.parser for p in prepared]
        self._clock = [time.monotonic()] * len(prepared)
        self._tickets: list[Ticket] = []
        self._running = set(range(len(prepared)))
        self.usages = [Usage(n_prompt=len(p.request.prompt)) for p in prepared]
        self.n_reasoning = 0
        self._n_held = [0] * len(prepared)  # tokens whose text is held back
        self.warnings = list(dict.fromkeys(line for one in prepared for line in one.warnings))
        try:
            for index, one in enumerate(prepared):
                deliver = partial(self._deliver, index)
                self._tickets.append(service.submit(one.request, deliver))
        except BaseException as error:
            self._cancel()
            if isinstance(error, MoegraphError | MemoryError):
                raise from_failure(error) from error
            raise
        if meter is not None:
            meter.opened([one.request for one in prepared])

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Update:
        """Wait for the next step of any of the requests."""
        while not self._steps:
            if not self._running:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        index, step = self._next()
        before, self.usages[index] = self.usages[index], step.usage
        now = time.monotonic()
        if self._meter is not None:
            self._meter.heard(step, now - self._clock[index], before)
        self._clock[index] = now
        if step.finish_reason in ("error", "cancelled"):
            self.close()
            raise _failure(step)
        parser = self._parsers[index]
        parts = parser.push(step.text, step.tokens)
        if parser.is_done and step.finish_reason is None:
            self._tickets[index].cancel()
            step = replace(step, finish_reason=parser.end)
        if step.finish_reason is not None:
            self._running.discard(index)
            parts = [*parts, *parser.flush(is_cut=step.finish_reason != "stop")]
        self._count_reasoning(index, parts, len(step.tokens))
        return Update(index, step, tuple(parts))

    def _count_reasoning(self, index: int, parts: Sequence[Part], n_tokens: int) -> None:
        """Count tokens of reasoning: by length of texts, once there is text of the tokens."""
        if len(parts) == 1 and type(parts[0]) is ContentPart:  # as of nearly every token
            self._n_held[index] = 0
            return
        self._n_held[index] += n_tokens
        lengths = [(part, len(getattr(part, "text", ""))) for part in parts]
        n_reasoning = sum(n for part, n in lengths if isinstance(part, ReasoningPart))
        if n_all := sum(n for _, n in lengths):
            self.n_reasoning += self._n_held[index] * n_reasoning // n_all
            self._n_held[index] = 0

    def _next(self) -> tuple[int, Step]:
        index, step = self._steps.popleft()
        while self._steps and self._steps[0][0] == index:
            step = _merged(step, self._steps.popleft()[1])
        return index, step

    def close(self) -> None:
        """Cancel what still runs; may be called again."""
        if self._running:
            self._cancel()
        self._tickets.clear()  # they know us, and the prompts
        if self._meter is not None:
            self._meter.closed()
            self._meter = None

    def _cancel(self) -> None:
        self._running.clear()
        self._steps.clear()
        self._wake()
        for ticket in self._tickets:
            ticket.cancel()

    @property
    def is_over(self) -> bool:
        """Return whether nothing more comes."""
        return not self._running

    def _deliver(self, index: int, step: Step) -> None:
        """Take a step on the engine's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._take, index, step)

    def _take(self, index: int, step: Step) -> None:
        if index in self._running:
            self._steps.append((index, step))
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def total(usages: Sequence[Usage]) -> Usage:
    """Return what several choices for one prompt have cost together; times are the longest.

    The prompt counts once.
    """
    first = usages[0]
    if len(usages) == 1:  # as for nearly every token that is told
        return first
    return replace(
        first,
        n_generated=sum(u.n_generated for u in usages),
        n_drafted=sum(u.n_drafted for u in usages),
        n_accepted=sum(u.n_accepted for u in usages),
        queued_s=max(u.queued_s for u in usages),
        prefill_s=max(u.prefill_s for u in usages),
        decode_s=max(u.decode_s for u in usages),
    )


def _merged(first: Step, second: Step) -> Step:
    return replace(
        second,
        tokens=first.tokens + second.tokens,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )


def _failure(step: Step) -> ApiError:
    if step.error is not None:
        return from_failure(step.error)
    if step.finish_reason == "cancelled":
        return ApiError(503, "the server is ending", code="closing", retry_after_s=RETRY_S)
    return ApiError(500, "the request failed")


class ClientLeft(Exception):
    """The client has closed its connection; no answer is needed."""


async def unless_left(request: HttpRequest, work: Awaitable[T]) -> T:
    """Return what work returns; cancel it when the client leaves. The body has been read."""
    done = await until_first(work, gone(request.receive))
    if done.cancelled():
        raise ClientLeft
    return done.result()
