"""The life of the models that are served: which one is in memory, loading, sleep, the end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from .. import __version__
from ..engine.chat import ChatModel
from ..errors import ModelFileError, QueueFull
from ..units import MiB
from .errors import RETRY_S, ApiError, from_failure
from .schemas import Defaults

if TYPE_CHECKING:
    from ..engine.service import Service

# glibc's names are M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
# Blocks of this size come from the system and go back to it. Without a fixed size, glibc takes up
# to 32 MiB from the heap of the thread that asks, once such a block was freed; and smaller blocks
# that live longer keep the gaps in use. Arrays of a pass, which come again and again, are smaller.
_BLOCK_BYTES = 8 * MiB


def keep_small() -> None:
    """Keep large blocks out of the heaps, from now on; does nothing without glibc."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _BLOCK_BYTES)


def give_back() -> None:
    """Free what only cycles hold, and return the free pages of all heaps to the system.

    Takes milliseconds; any thread may call it.
    """
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
        bytearray(MiB)  # what ends a thread's heap goes back when a large block is freed


def settle() -> None:
    """Free what only cycles hold, and have Python not look for cycles among what is left.

    That is the modules and the model. To look at all of them takes a tenth of a second, and so
    Python would also seldom do it for the objects of requests.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


T = TypeVar("T")
log = logging.getLogger("moegraph.server")
# Seconds between two looks at the engine's thread and at the idle time.
_LOOK_S = 0.5
# Idle seconds after which free memory goes back to the system.
_QUIET_S = 5.0
_REASONS = {
    "loading": "the model is being loaded",
    "closing": "the server is ending; it takes no more requests",
}


@dataclass(frozen=True)
class ModelFacts:
    """What clients may know of a model; zeros are not known.

    n_ctx: tokens that one request may hold. n_bytes: of the file. template: the chat template.
    family: the architecture. reads_pictures: whether it has an encoder. fills_gaps: whether its
    vocabulary has tokens for them.
    """

    name: str
    n_ctx: int = 0
    n_ctx_train: int = 0
    n_vocab: int = 0
    n_embd: int = 0
    n_params: int = 0
    n_bytes: int = 0
    n_slots: int = 1
    created: int = 0
    device: str = ""
    bos_token: str = ""
    eos_token: str = ""
    template: str = ""
    family: str = ""
    reads_pictures: bool = False
    fills_gaps: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """A name for what may change answers: this program, the model and its settings."""
        parts = [self.n_bytes, self.created, self.device, self.template, self.settings]
        found = hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode())
        return f"b{__version__}-{found.hexdigest()[:8]}"


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready, the service that computes with it, and its facts.

    close: ends the service and frees the model.
    """

    service: Service
    chat: ChatModel
    facts: ModelFacts
    close: Callable[[], None] = lambda: None


@dataclass(eq=False)
class Model:
    """A model that can be served.

    load: returns it with its service started; it is called again each time it is wanted in memory.
    facts, defaults: what is known before. check: looks at its file, before another model leaves the
    memory for it. path: of the file, which clients do not see.
    """

    load: Callable[[], LoadedModel]
    facts: ModelFacts
    defaults: Defaults = field(default_factory=Defaults)
    check: Callable[[], None] = lambda: None
    path: str = ""


@dataclass(eq=False)
class Use:
    """A request's use of a model, from `Line.enter` to `Line.leave`.

    ready: becomes the model, for a request that waits. is_held: the model must stay in memory.
    """

    model: Model
    ready: asyncio.Future[LoadedModel] | None = None
    is_held: bool = False


class Line:
    """The requests that use a model: those that run hold it, and others wait, in order.

    n_users: all of them. n_most: of those that wait. idle_since: when the last one ended. unheld:
    set while no request holds the model in memory.
    """

    def __init__(self, n_most: int = 128) -> None:
        self.n_users = self._n_held = 0
        self._n_most = n_most
        self.waiting: list[Use] = []
        self.unheld = asyncio.Event()
        self.unheld.set()
        self.idle_since = time.monotonic()

    def enter(self, model: Model) -> Use:
        """A request is for this model from now on."""
        self.n_users += 1
        return Use(model)

    def leave(self, use: Use) -> None:
        """A request needs its model no more."""
        self.n_users -= 1
        self.idle_since = time.monotonic()
        if use in self.waiting:
            self.waiting.remove(use)
        if use.is_held:
            self._n_held -= 1
        if not self._n_held:
            self.unheld.set()

    def hold(self, use: Use) -> None:
        """The model in memory is that of a request, and stays until it leaves."""
        use.is_held = True
        self._n_held += 1
        self.unheld.clear()

    def append(self, use: Use) -> asyncio.Future[LoadedModel]:
        """Let a request wait; return what becomes its model.

        Raises:
            QueueFull: as many requests as may do so wait already.
        """
        n = len(self.waiting)
        if n >= self._n_most:
            raise QueueFull(f"{n} requests wait for a model already, as many as may", RETRY_S)
        use.ready = asyncio.get_running_loop().create_future()
        self.waiting.append(use)
        return use.ready

    def admit(self, model: Model | None, found: LoadedModel | Callable[[], ApiError]) -> None:
        """Let all that wait for a model go on, with it or with an error; None: for any model."""
        for use in [one for one in self.waiting if model in (one.model, None)]:
            self.waiting.remove(use)
            if use.ready is None or use.ready.done():
                continue  # its client has left
            if isinstance(found, LoadedModel):
                self.hold(use)
                use.ready.set_result(found)
            else:
                use.ready.set_exception(found())


def unavailable(condition: str, reason: str) -> ApiError:
    """Return the error of a request that comes while nothing is served."""
    retry = None if condition == "failed" else RETRY_S
    return ApiError(503, reason, code=condition, retry_after_s=retry)


class ModelHost:
    """Where requests find the models, one of which is in memory; it alone loads and unloads them.

    A request for another model waits until those that run have ended, and who comes later waits
    behind it, whatever the model. Once a model is there, all that wait for it go on. A thread of
    its own loads.

    models: what can be served. any_name: there is one, whatever requests call it, and it is loaded
    at the start. sleep_s: idle seconds after which a model leaves the memory; None: never. n_most:
    of the requests that wait.
    """

    def __init__(
        self, models: Sequence[Model], sleep_s: float | None = None, any_name: bool = True,
        n_most: int = 128,
    ) -> None:  # fmt: skip
        self.models, self.any_name, self.line = models, any_name, Line(n_most)
        self._sleep_s = sleep_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._turn = asyncio.Lock()
        self._model = models[0]
        self._loaded: LoadedModel | None = None
        self._state = "loading"
        self._serving: asyncio.Task[None] | None = None
        self._tidied_at = time.monotonic()

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model that is in memory, or was there last."""
        return self._model.facts

    @property
    def condition(self) -> str:
        """One of "loading", "ready", "sleeping", "closing" and "failed"."""
        return "failed" if self._state == "ready" and self._stopped() else self._state

    @property
    def reason(self) -> str:
        """Why nothing is served."""
        return self._stopped() or _REASONS.get(self._state, "")

    def _stopped(self) -> str:
        """Return why the engine's thread does not work, or an empty string."""
        return "" if self._loaded is None else self._loaded.service.failure or ""

    def status(self, model: Model) -> str:
        """Return llama-server's word for where a model is: loaded, loading or unloaded."""
        if model is not self._model or not (self._loaded or self.is_loading):
            return "unloaded"
        return "loaded" if self._loaded else "loading"

    def peek(self) -> LoadedModel | None:
        """Return the model that is in memory."""
        return self._loaded

    async def loaded(self, use: Use) -> LoadedModel:
        """Return the model of a use, in its turn; it stays until the use ends.

        Raises:
            ApiError: the model cannot be loaded, or nothing is served now.
            QueueFull: too many requests wait.
        """
        if self.condition not in ("ready", "sleeping"):
            raise unavailable(self.condition, self.reason)
        if self._loaded is not None and self._model is use.model and not self.line.waiting:
            self.line.hold(use)
            return self._loaded
        ready = self.line.append(use)
        if self._serving is None or self._serving.done():
            # no task of a request: a client that leaves must not cut a load
            self._serving = asyncio.ensure_future(self._serve_line())
        return await ready

    async def _serve_line(self) -> None:
        while waiting := self.line.waiting:
            model = waiting[0].model
            if self._loaded is None or self._model is not model:
                await self.line.unheld.wait()
                if not waiting or waiting[0].model is not model:
                    continue  # its client has left meanwhile
                await self._switch(model)
            if self._loaded is not None and self._model is model:
                self.line.admit(model, self._loaded)

    async def _switch(self, model: Model) -> None:
        """Bring a model into memory in place of the one there; if that fails, tell who waits."""
        name, began = model.facts.name, time.monotonic()
        async with self._turn:
            try:
                await _run(self._thread, model.check)
                if not self.line.unheld.is_set():
                    return  # who waited has left, and the model that is there has a new user
                await self._free()
                await self._bring(model)
            except Exception as error:  # noqa: BLE001 - whatever fails, the server lives on
                log.error("model %s could not be loaded: %s", name, error)
                self.line.admit(model, partial(_not_loaded, model, error))
                return
        words = "model loaded again" if self.any_name else f"model {name} loaded"
        log.info(words, extra={"s": round(time.monotonic() - began, 3)})

    async def start(self) -> None:
        """Load the model; one of several waits for its first request."""
        if not self.any_name:
            self._state = "sleeping"
            return
        async with self._turn:
            await self._bring(self._model)

    async def _bring(self, model: Model) -> None:
        def load_and_settle() -> LoadedModel:
            loaded = model.load()
            settle()
            return loaded

        self._model = model
        self._loaded = await _run(self._thread, load_and_settle)
        model.facts = self._loaded.facts
        self.line.idle_since = self._tidied_at = time.monotonic()
        if self._state != "closing":
            self._state = "ready"

    async def watch(self) -> str:
        """Put an idle model to sleep, and log when the engine is stuck.

        Return, when the engine's thread has ended, why.
        """
        failure = ""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self._stopped()
            if now and self._loaded is not None:
                status = self._loaded.service.status()
                if status.failure and not status.busy_s:  # it has failed, and is not only slow
                    return now
            if now != failure:
                log.error("no answers: %s", now) if now else log.info("the engine works again")
                failure = now
            if self._rests_for(self._sleep_s):
                async with self._turn:
                    if self._rests_for(self._sleep_s):
                        await self._free()
                        log.info("model unloaded after %s idle seconds", self._sleep_s)
            elif self.line.idle_since > self._tidied_at and self._rests_for(_QUIET_S):
                self._tidied_at = time.monotonic()
                await _run(self._thread, give_back)

    def _rests_for(self, seconds: float | None) -> bool:
        if seconds is None or self._state != "ready" or self.line.n_users:
            return False
        return time.monotonic() - self.line.idle_since >= seconds

    async def _free(self) -> None:
        """Unload the model, if one is there, and give its memory back."""
        if self._loaded is not None:
            self._state = "sleeping" if self._state == "ready" else self._state
            await self._unload()
            for step in (settle, give_back):
                await _run(self._thread, step)

    async def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await _run(self._thread, loaded.close)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests; return whether those that run have ended in time."""
        self._state = "closing"
        self.line.admit(None, partial(unavailable, "closing", self.reason))
        until = time.monotonic() + timeout_s
        while self.line.n_users and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return not self.line.n_users

    async def close(self) -> None:
        """End what runs and free the model; a model that is being loaded is not waited for."""
        self._state = "closing"
        if not self._turn.locked():
            async with self._turn:
                await self._unload()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def is_loading(self) -> bool:
        """Whether a thread is still loading a model."""
        return self._turn.locked()


async def _run(thread: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, call)


def _not_loaded(model: Model, failure: Exception) -> ApiError:
    """Return the error of a request whose model cannot be loaded."""
    cause, name = from_failure(failure).message, model.facts.name
    if model.path:
        cause = cause.replace(model.path, name)
    message = f"the model {name} could not be loaded: {cause}"
    # a file that is wrong stays so: OpenAI's and Anthropic's clients do not try again then
    headers = {"X-Should-Retry": "false"} if isinstance(failure, ModelFileError) else {}
    return ApiError(503, message, code="model_not_loaded", headers=headers)
