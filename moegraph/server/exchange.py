"""A request and its answer, at once or as a stream: what the interfaces have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import Prepared
from ..loop.requests import Usage
from .backend import Loaded
from .choices import timings_object
from .contract import ChatModel
from .errors import ApiError, told
from .guards import owner_of
from .reply import reply
from .requestlog import WARNING, note_usage, note_warnings
from .sse import EventStream, comment
from .state import state_of
from .statistics import Statistics
from .talk import Said, Talk, unless_left


@dataclass(frozen=True)
class Opened:
    """A request that the service has accepted, and the model that answers it."""

    http: HttpRequest
    talk: Talk
    statistics: Statistics
    loaded: Loaded


@dataclass(frozen=True)
class Exchange(ABC):
    """A request that is being answered; each interface writes the answer in its own words."""

    opened: Opened

    @property
    def http(self) -> HttpRequest:
        """The request."""
        return self.opened.http

    @property
    def talk(self) -> Talk:
        """What comes of it."""
        return self.opened.talk

    @property
    def usage(self) -> Usage:
        """Return what all choices have cost so far."""
        return self.talk.usage

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """Return the answer when it is complete."""

    @abstractmethod
    def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer."""

    @abstractmethod
    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the events that end an answer which fails."""

    def costs(self) -> dict[str, Any]:
        """Return the fields, beyond those of the interface, that tell what the answer has cost."""
        return {"timings": self.timings(), **self.report()}

    def report(self) -> dict[str, Any]:
        """Return the field that tells what the engine has done."""
        return {"moegraph": self.opened.statistics.report(self.usage)}

    def timings(self) -> dict[str, Any]:
        """Return llama-server's timings of the answer so far."""
        return timings_object(self.usage, len(self.talk.usages))

    def reading(self, index: int, found: dict[str, Any], is_timed: bool | None) -> dict[str, Any]:
        """Return the fields that tell how far a prompt is read, and if wanted how fast."""
        if not is_timed:
            return {"prompt_progress": found}
        seconds = self.talk.usages[index].prefill_s if found["processed"] > found["cache"] else 0.0
        usage = Usage(found["total"], found["processed"], found["cache"], prefill_s=seconds)
        return {"prompt_progress": found, "timings": timings_object(usage)}

    async def respond(
        self, is_stream: bool | None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return the response to the request; a header has what the client should be warned of."""
        if self.talk.warnings:
            headers = {**(headers or {}), WARNING: note_warnings(self.http, self.talk.warnings)}
        if is_stream:
            return EventStream(self._told(), close=self.talk.close, headers=headers)
        with self.talk:
            return reply(await unless_left(self.http, self.whole()), headers=headers)

    async def _told(self) -> AsyncGenerator[bytes, None]:
        """Yield the events; whatever fails, the client is told."""
        with self.talk as talk:
            try:
                async with aclosing(self.frames()) as frames:
                    async for frame in frames:
                        yield frame
            except Exception as failure:  # noqa: BLE001 - see above
                note_usage(self.http, self.usage, "error")
                for frame in self.failed(told(failure, self.http.url.path)):
                    yield frame
            except (GeneratorExit, asyncio.CancelledError):
                if not talk.is_over:
                    note_usage(self.http, self.usage, "left")
                raise


Kind = TypeVar("Kind", bound=Exchange)


async def begin(
    request: HttpRequest,
    prepare: Callable[[ChatModel], Sequence[Prepared]],
    make: Callable[[Opened], Kind],
) -> Kind:
    """Submit a request, unless the client leaves meanwhile. prepare: runs on a thread of ours.

    Raises:
        ApiError: the model is not there, or the request cannot be answered.
        ClientLeft: the client left.
    """

    async def opened() -> Kind:
        state = state_of(request)
        statistics = Statistics(state.backend)
        talk = await state.open_talk(prepare, owner_of(request))
        try:
            return make(Opened(request, talk, statistics, state.in_use()))
        except BaseException:
            talk.close()
            raise

    return await unless_left(request, opened())


class PromptProgress:
    """Says how far prompts are read: in llama-server's form if asked for, or as comments.

    In that form, the first report is of what was cached, and the last of the whole prompt.

    write: makes the event of a report about a choice; None: comments. n_choices: of each prompt;
    the first one reports.
    """

    def __init__(
        self, write: Callable[[int, dict[str, Any]], bytes] | None = None, n_choices: int = 1
    ) -> None:
        self._write, self._n_choices = write, n_choices
        self._n_told: dict[int, int] = {}

    def frames(self, said: Said) -> list[bytes]:
        """Return the events of a step."""
        usage, n_told = said.step.usage, self._n_told.get(said.index, -1)
        if self._write is None:
            if not said.is_reading:
                return []
            return [comment(f"read {usage.n_read} of {usage.n_prompt} tokens of the prompt")]
        if n_told == usage.n_prompt or said.index % self._n_choices:
            return []
        n_read = max(usage.n_cached, usage.n_read if said.is_reading else usage.n_prompt)
        due = [n for n in dict.fromkeys((usage.n_cached, n_read)) if n > n_told]
        self._n_told[said.index] = max(n_told, n_read)
        time_ms = round(usage.prefill_s * 1e3)
        common = {"total": usage.n_prompt, "cache": usage.n_cached, "time_ms": time_ms}
        return [self._write(said.index, {**common, "processed": n}) for n in due]
