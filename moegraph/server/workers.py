"""Threads that prepare requests: they render, tokenize and compile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
# More threads would only wait for the interpreter.
_N_THREADS = 4


class Workers:
    """A few threads; used on the event loop only."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="prepare")
        self._at_work: set[Future[Any]] = set()

    async def run(self, call: Callable[[], T]) -> T:
        """Return what a call returns, made on one of the threads."""
        begun = self._threads.submit(call)
        # a client that leaves ends our waiting, but not the call
        self._at_work = {one for one in self._at_work if not one.done()} | {begun}
        return await asyncio.wrap_future(begun)

    async def end(self, grace_s: float) -> bool:
        """Take no more calls; return whether those that run end in time."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        ended = await asyncio.to_thread(wait, self._at_work, grace_s)
        return not ended.not_done
