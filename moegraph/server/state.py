"""What the handlers of requests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from ..engine.chat import ChatModel, ChatRequest, Prepared
from ..errors import MoegraphError
from ..units import KiB
from .answers import Answers
from .errors import from_failure
from .guards import cache_owner
from .host import LoadedModel, ModelHost
from .metrics import EngineMetrics, Meter, Metrics
from .responsestore import ResponseStore
from .schemas import LIMITS, Defaults, Limits

T = TypeVar("T")
# Size of the body of the request that a task serves; its work grows with it.
BODY_BYTES: ContextVar[int] = ContextVar("BODY_BYTES", default=0)
# Largest body of each lane, and its threads: so small requests do not wait for large ones. More
# threads would only wait for the interpreter.
SMALL = 16 * KiB
_LANES = ((SMALL, 4), (256 * KiB, 2), (1 << 60, 1))


class Workers:
    """A few threads for each size of requests; used on the event loop only."""

    def __init__(self) -> None:
        self._lanes = [(most, ThreadPoolExecutor(n, "prepare")) for most, n in _LANES]
        self._at_work: set[Future[Any]] = set()

    async def run(self, call: Callable[[], T]) -> T:
        """Return what a call returns, made on one of the threads for the task's request."""
        n_bytes = BODY_BYTES.get()
        begun = next(lane for most, lane in self._lanes if n_bytes <= most).submit(call)
        # a client that leaves ends our waiting, but not the call
        self._at_work = {one for one in self._at_work if not one.done()} | {begun}
        return await asyncio.wrap_future(begun)

    async def end(self, grace_s: float) -> bool:
        """Take no more calls; return whether those that run end in time."""
        for _, lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
        ended = await asyncio.to_thread(wait, self._at_work, grace_s)
        return not ended.not_done


@dataclass
class ServerState(Defaults):
    """The model, the settings of the server, and its statistics.

    cache_by_key: whether clients with different keys share no beginnings of prompts.
    responses: that later ones of the same client go on from.
    started: seconds since the epoch.
    """

    backend: ModelHost
    cache_by_key: bool = False
    limits: Limits = LIMITS
    metrics: Metrics = field(default_factory=Metrics)
    responses: ResponseStore = field(default_factory=ResponseStore)
    started: int = field(default_factory=lambda: int(time.time()))
    workers: Workers = field(default_factory=Workers)

    async def work(self, call: Callable[[], T]) -> T:
        """Return what a call returns that takes long; it runs on a thread of ours."""
        try:
            return await self.workers.run(call)
        except (MoegraphError, MemoryError) as error:
            raise from_failure(error) from error

    def __post_init__(self) -> None:
        self.metrics.registry.register(EngineMetrics(self.backend))

    @asynccontextmanager
    async def model(self) -> AsyncIterator[LoadedModel]:
        """Yield the model, which stays in memory meanwhile; it is woken if it sleeps."""
        self.backend.enter()
        try:
            yield await self.backend.loaded()
        finally:
            self.backend.leave()

    async def open_answers(
        self, prepare: Callable[[ChatModel], Sequence[Prepared]], owner: str
    ) -> tuple[LoadedModel, Answers]:
        """Submit what `prepare` makes of the model, on a thread of ours; close the answers later.

        owner: the client, as `guards.owner_of` returns it.
        """
        self.backend.enter()
        meter = Meter(self.metrics, on_close=self.backend.leave)
        try:
            loaded = await self.backend.loaded()
            prepared = await self.work(partial(self._prepared, prepare, loaded.chat, owner))
            return loaded, Answers(loaded.service, prepared, meter)
        except BaseException:
            meter.closed()
            raise

    async def count(self, chat: ChatRequest) -> int:
        """Return how many tokens the prompt of a conversation would have."""
        async with self.model() as loaded:
            found = await self.work(partial(loaded.chat.prompt, chat))
        return len(found.encoded.ids)

    def _prepared(
        self,
        prepare: Callable[[ChatModel], Sequence[Prepared]],
        chat: ChatModel,
        owner: str,
    ) -> Sequence[Prepared]:
        name = cache_owner(owner) if self.cache_by_key else ""
        return [
            replace(one, request=replace(one.request, client=owner, owner=name))
            for one in prepare(chat)
        ]


def state_of(request: HttpRequest) -> ServerState:
    """Return the state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state
