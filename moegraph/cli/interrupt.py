"""Ctrl-C: during a generation it sets the cancel token, elsewhere it is KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..sequence import CancelToken


@contextmanager
def cancel_on_interrupt() -> Iterator[CancelToken]:
    """Yield a token that the first Ctrl-C sets; a second one raises KeyboardInterrupt.

    Python runs its signal handlers between two bytecodes, so not while native code computes a
    long pass. The interpreter's own C handler writes to a pipe at once, and a thread that waits
    there sets the token, which the native code reads.
    """
    token = CancelToken()
    if threading.current_thread() is not threading.main_thread():
        yield token
        return
    presses = 0

    def handle(_: int, __: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        token.set()
        if presses > 1:
            raise KeyboardInterrupt

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=_watch, args=(reader, token), daemon=True)
    watcher.start()
    old_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    old_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield token
    finally:
        signal.signal(signal.SIGINT, old_handler)
        signal.set_wakeup_fd(old_fd)
        os.close(writer)
        watcher.join()
        os.close(reader)


def _watch(reader: int, token: CancelToken) -> None:
    while data := os.read(reader, 64):
        if signal.SIGINT in data:
            token.set()


def let_interrupts_pass_callbacks() -> None:
    """Keep a Ctrl-C that arrives inside a callback from native code.

    Python would print a traceback there, drop the exception and go on: raise the signal again,
    so that it is handled as soon as the callback has returned.
    """
    default = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        else:
            default(unraisable)

    sys.unraisablehook = hook
