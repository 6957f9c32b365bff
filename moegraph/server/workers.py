"""Threads that prepare requests: they render, tokenize and compile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any, TypeVar

from ..units import KiB

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
