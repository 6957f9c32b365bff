"""Calls from the engine's thread to the event loop: one wake-up for all that come together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref


class Mailbox:
    """Takes calls on any thread, and makes them on the event loop in their order.

    To wake the loop costs a system call; a pass of the engine has a step for each of its rows.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # else it would never leave `_MAILBOXES`
        self._calls: deque[Callable[[], None]] = deque()
        self._is_due = False

    def put(self, call: Callable[[], None]) -> None:
        """Have the loop make a call soon; drop it if the loop has ended."""
        self._calls.append(call)
        if self._is_due:
            return
        self._is_due = True
        try:
            if loop := self._loop():
                loop.call_soon_threadsafe(self._empty)
                return
        except RuntimeError:
            pass  # it is closed
        self._calls.clear()
        self._is_due = False

    def _empty(self) -> None:
        # before the calls are taken: what comes from now on wakes the loop again
        self._is_due = False
        while self._calls:
            self._calls.popleft()()


_MAILBOXES: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()


def mailbox() -> Mailbox:
    """Return the mailbox of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _MAILBOXES:
        _MAILBOXES[loop] = Mailbox(loop)
    return _MAILBOXES[loop]
