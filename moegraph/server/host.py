"""The life of the model that is served: load, sleep when idle, wake, close."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..engine.chat import ChatModel
from ..errors import MoegraphError
from ..units import MiB
from .errors import RETRY_S, ApiError

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


def settle() -> None:
    """Free what only cycles hold, and have Python not look for cycles among what is left.

    That is the modules and the model. To look at all of them takes a tenth of a second, and so
    Python would also seldom do it for the objects of requests.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


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


def unavailable(condition: str, reason: str) -> ApiError:
    """Return the error of a request that comes while nothing is served."""
    retry = None if condition == "failed" else RETRY_S
    return ApiError(503, reason, code=condition, retry_after_s=retry)


class ModelHost:
    """Where requests find the model, which it loads on a thread of its own.

    load: returns the model with its service started; it is called again after each sleep.
    facts: what is known before it is loaded. sleep_s: idle seconds after which the model leaves
    the memory; None: never. n_users: requests that use the model.
    """

    def __init__(
        self, load: Callable[[], LoadedModel], facts: ModelFacts, sleep_s: float | None = None
    ) -> None:
        self._load = load
        self._sleep_s = sleep_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._turn = asyncio.Lock()
        self._loaded: LoadedModel | None = None
        self._state = "loading"
        self.n_users = 0
        self._is_tidy = True
        self._idle_since = time.monotonic()
        self.facts = facts

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

    def enter(self) -> None:
        """A request uses the model from now on."""
        self.n_users += 1
        self._is_tidy = False

    def leave(self) -> None:
        """A request uses it no more."""
        self.n_users -= 1
        self._idle_since = time.monotonic()

    def peek(self) -> LoadedModel | None:
        """Return the model if it is in memory."""
        return self._loaded

    async def loaded(self) -> LoadedModel:
        """Return the model, after waking it if it sleeps."""
        if self._state == "sleeping":
            await self._wake()
        condition = self.condition
        if condition != "ready" or self._loaded is None:
            raise unavailable(condition, self.reason)
        return self._loaded

    async def start(self) -> None:
        """Load the model."""
        async with self._turn:
            await self._bring()

    async def _bring(self) -> None:
        def load_and_settle() -> LoadedModel:
            loaded = self._load()
            settle()
            return loaded

        loop = asyncio.get_running_loop()
        self._loaded = await loop.run_in_executor(self._thread, load_and_settle)
        self.facts = self._loaded.facts
        self._idle_since = time.monotonic()
        if self._state != "closing":
            self._state = "ready"

    async def _wake(self) -> None:
        async with self._turn:
            if self._state != "sleeping":
                return
            began = time.monotonic()
            try:
                await self._bring()
            except MoegraphError as error:
                # it still sleeps: the next request tries again
                log.error("the model could not be loaded again: %s", error)
                raise unavailable("sleeping", f"the model could not be loaded: {error}") from error
            log.info("model loaded again", extra={"s": round(time.monotonic() - began, 3)})

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
            if self._is_idle():
                await self._sleep()
            elif not self._is_tidy and self._rests_for(_QUIET_S):
                await self._tidy(give_back)

    def _is_idle(self) -> bool:
        if self._sleep_s is None or self._state != "ready":
            return False
        return self._rests_for(self._sleep_s)

    def _rests_for(self, seconds: float) -> bool:
        return not self.n_users and time.monotonic() - self._idle_since >= seconds

    async def _tidy(self, *steps: Callable[[], None]) -> None:
        self._is_tidy = True
        for step in steps:
            await asyncio.get_running_loop().run_in_executor(self._thread, step)

    async def _sleep(self) -> None:
        async with self._turn:
            if self._is_idle():
                self._state = "sleeping"
                await self._unload()
                await self._tidy(settle, give_back)
                log.info("model unloaded after %s idle seconds", self._sleep_s)

    async def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, loaded.close)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests; return whether those that run have ended in time."""
        self._state = "closing"
        until = time.monotonic() + timeout_s
        while self.n_users and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return not self.n_users

    async def close(self) -> None:
        """End what runs and free the model; a model that is being loaded is not waited for."""
        self._state = "closing"
        if not self._turn.locked():
            async with self._turn:
                await self._unload()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def is_loading(self) -> bool:
        """Whether a thread is still loading the model."""
        return self._turn.locked()
