"""What the handlers of requests share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from ..engine.chat import ChatRequest, Prepared
from ..errors import MoegraphError
from ..sampling import SamplingParams
from .backend import Backend, Loaded, unavailable
from .contract import ChatModel
from .enginemetrics import EngineMetrics
from .errors import from_failure
from .guards import cache_owner
from .limits import LIMITS, Limits
from .metrics import Metrics
from .responses.store import ResponseStores
from .talk import Talk
from .workers import Workers

T = TypeVar("T")


@dataclass
class ServerState:
    """The model, the settings of the server, and its statistics.

    sampling: what a request gets where it says nothing. max_tokens: of an answer, if a request
    says nothing; None: until the context is full. deadline_s: of every request; None: none.
    cache_by_key: whether clients with different keys share no beginnings of prompts.
    variables: of the chat template. responses: that later ones of the same client go on from.
    started: seconds since the epoch.
    """

    backend: Backend
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    deadline_s: float | None = None
    cache_by_key: bool = False
    ignore_eos: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = LIMITS
    metrics: Metrics = field(default_factory=Metrics)
    responses: ResponseStores = field(default_factory=ResponseStores)
    started: int = field(default_factory=lambda: int(time.time()))
    workers: Workers = field(default_factory=Workers)

    async def work(self, call: Callable[[], T]) -> T:
        """Return what a call returns that takes long; it runs on a thread of ours.

        Raises:
            ApiError: in place of the package's errors.
        """
        try:
            return await self.workers.run(call)
        except (MoegraphError, MemoryError) as error:
            raise from_failure(error) from error

    def __post_init__(self) -> None:
        self.metrics.registry.register(EngineMetrics(self.backend))

    @asynccontextmanager
    async def model(self) -> AsyncIterator[Loaded]:
        """Yield the model, which stays in memory meanwhile; it is woken if it sleeps.

        Raises:
            ApiError: the model is not there.
        """
        self.backend.enter()
        try:
            yield await self.backend.loaded()
        finally:
            self.backend.leave()

    def in_use(self) -> Loaded:
        """Return the model that an open talk uses.

        Raises:
            ApiError: the server has ended.
        """
        loaded = self.backend.peek()
        if loaded is None:
            raise unavailable(self.backend.condition, self.backend.reason)
        return loaded

    async def open_talk(
        self, prepare: Callable[[ChatModel], Sequence[Prepared]], owner: str
    ) -> Talk:
        """Submit what `prepare` makes of the model, on a thread of ours; close the talk afterwards.

        owner: the client, as `guards.owner_of` returns it.

        Raises:
            ApiError: the model is not there, or what `prepare` raises.
        """
        self.backend.enter()
        meter = self.metrics.meter(on_close=self.backend.leave)
        try:
            loaded = await self.backend.loaded()
            prepared = await self.work(partial(self._prepared, prepare, loaded.chat, owner))
            return Talk(loaded.service, prepared, meter)
        except BaseException:
            meter.closed()
            raise

    async def count(self, chat: ChatRequest) -> int:
        """Return how many tokens the prompt of a conversation would have."""
        async with self.model() as loaded:
            found = await self.work(partial(loaded.chat.prompt, chat))
        return len(found.encoded.ids)

    def _prepared(
        self, prepare: Callable[[ChatModel], Sequence[Prepared]], chat: ChatModel, owner: str
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
