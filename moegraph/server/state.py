"""What the handlers of requests share: the server's state, routes, and bodies of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pydantic
import pydantic_core
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..engine.chat import ChatRequest
from ..errors import MoegraphError
from ..units import KiB, format_bytes
from .answers import ClientLeft
from .errors import OPENAI_ERROR, ApiError, from_failure, openai_body
from .host import LoadedModel, Model, ModelHost
from .metrics import Metrics
from .responsestore import ResponseStore
from .schemas import LIMITS, Defaults, Limits

Handler = Callable[[HttpRequest], Awaitable[Response]]
Schema = TypeVar("Schema", bound=pydantic.BaseModel)
T = TypeVar("T")
# Size of the body of the request that a task serves; its work grows with it. That of a body with
# pictures, whose work does not, is PICTURES.
PICTURES = 1 << 60
BODY_BYTES: ContextVar[int] = ContextVar("BODY_BYTES", default=0)
# Largest body of each lane, and its threads: so small requests do not wait for large ones. More
# threads would only wait for the interpreter.
SMALL = 16 * KiB
_LANES = ((SMALL, 4), (256 * KiB, 2), (PICTURES - 1, 1), (PICTURES, 1))


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
        # a call that was taken from the queue is done, but `wait` would wait for it all the same
        begun = {one for one in self._at_work if not one.done()}
        ended = await asyncio.to_thread(wait, begun, grace_s)
        return not ended.not_done


@dataclass
class ServerState:
    """The models, the settings of the server, and its statistics.

    cache_by_key: whether clients with different keys share no beginnings of prompts.
    responses: that later ones of the same client go on from.
    started: seconds since the epoch.
    """

    backend: ModelHost
    cache_by_key: bool = False
    limits: Limits = LIMITS
    metrics: Metrics = field(init=False)
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
        self.metrics = Metrics(self.backend)

    def find(self, name: str | None, exactly: bool = False) -> Model:
        """Return the model that a request names; without a name, the first.

        exactly: the only model has no other name either.
        """
        models = self.backend.models
        if not exactly and (self.backend.any_name or not name):
            return models[0]
        for model in models:
            if model.facts.name == name:
                return model
        known = ", ".join(ascii(model.facts.name) for model in models)
        message = f"there is no such model; this server has {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    @asynccontextmanager
    async def using(self, model: Model) -> AsyncIterator[LoadedModel]:
        """Yield a model, which stays in memory meanwhile; it is loaded if it is not there."""
        use = self.backend.line.enter(model)
        try:
            yield await self.backend.loaded(use)
        finally:
            self.backend.line.leave(use)

    async def count(self, name: str | None, asked: Callable[[Defaults], ChatRequest]) -> int:
        """Return how many tokens the prompt of a conversation would have; name: of the model."""
        model = self.find(name)
        chat = asked(model.defaults)
        async with self.using(model) as loaded:
            found = await self.work(partial(loaded.chat.prompt, chat))
        return len(found.encoded.ids)


def state_of(request: HttpRequest) -> ServerState:
    """Return the state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state


class Operation(Route):
    """A route that the OpenAPI document describes, in the words of its handler's docstring.

    bodies: schemas of a request; a request with a body is a POST. answer: the
    content type of what succeeds. streams: that of a stream which it may also be.
    """

    def __init__(
        self, path: str, handler: Handler, *bodies: type[pydantic.BaseModel], method: str = "",
        answer: str = "application/json", streams: str = "",
    ) -> None:  # fmt: skip
        self.method = method or ("POST" if bodies else "GET")
        super().__init__(path, handler, methods=[self.method])
        self.bodies, self.answer, self.streams = bodies, answer, streams


def operations(path: str, *given: Any, **more: Any) -> list[Operation]:
    """Return the same operation at a path that begins with /v1, and at that path without it."""
    return [Operation(one, *given, **more) for one in (path, path.removeprefix("/v1"))]


@dataclass(frozen=True)
class RouteTable:
    """The routes of one interface, and how it writes errors.

    error_schema: what error_body returns. prefixes: paths whose errors have this form, also where
    no route fits; none for OpenAI's form. public: paths that need no key.
    """

    routes: Sequence[BaseRoute]
    error_body: Callable[[ApiError], Mapping[str, Any]] = openai_body
    error_schema: Mapping[str, Any] = field(default_factory=lambda: OPENAI_ERROR)
    prefixes: tuple[str, ...] = ()
    public: tuple[str, ...] = ()


async def read_schema(request: HttpRequest, schema: type[Schema]) -> Schema:
    """Return the body of a request as an object of the schema; unknown fields are ignored."""
    value = await read_object(request)
    return await _aside(request, lambda: schema.model_validate(value))


async def _aside(request: HttpRequest, call: Callable[[], T]) -> T:
    """Return what a call returns; it delays other requests little, however large the body is."""
    return call() if BODY_BYTES.get() <= SMALL else await state_of(request).work(call)


async def read_object(request: HttpRequest) -> dict[str, Any]:
    """Return the JSON object of a body; raises as `read_schema`, which checks its fields too."""
    limits = state_of(request).limits
    body = await read_body(request, limits)
    if body.count(b",") > limits.commas:
        message = f"the body has more than {limits.commas:,} values, or commas in its texts"
        raise ApiError(413, message, code="body_too_large")
    try:  # it refuses NaN, Infinity and deep nesting
        value = await _aside(request, lambda: pydantic_core.from_json(body, allow_inf_nan=False))
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


async def read_body(request: HttpRequest, limits: Limits) -> bytes:
    """Return the bytes of a body; refuse a large one before it has arrived."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:18]) > limits.body_bytes:
        raise _too_large(limits)
    try:
        body = await asyncio.wait_for(_gather(request, limits), limits.body_s)
    except ClientDisconnect:
        raise ClientLeft from None
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {limits.body_s:.0f} s"
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    # fields of pictures are image, images, image_url and input_image; texts that name them wait too
    BODY_BYTES.set(PICTURES if b'"image' in body or b'"input_image' in body else len(body))
    return body


async def _gather(request: HttpRequest, limits: Limits) -> bytes:
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > limits.body_bytes:
            raise _too_large(limits)
    return bytes(found)


def _too_large(limits: Limits) -> ApiError:
    message = f"the body is larger than {format_bytes(limits.body_bytes)}"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
