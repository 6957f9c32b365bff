"""Ctrl-C: during a generation it sets the cancel token, elsewhere it is KeyboardInterrupt."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .events import CancelToken

_AGAIN_S = 0.01


@contextmanager
def cancel_on_interrupt() -> Iterator[CancelToken]:
    """Yield a token that the first Ctrl-C sets; a second one raises KeyboardInterrupt.

    Python cannot run its signal handlers while native code computes a long pass. But the
    interpreter's C handler writes to a pipe at once, and a thread that reads the pipe sets the
    token, which the native code checks.
    """
    from .events import CancelToken

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
    """Keep a Ctrl-C that arrives inside a callback from native code or inside a finalizer.

    Python would print a traceback there, drop the exception and continue. Instead, another thread
    sends the interrupt again a moment later: raised here, it would be dropped as well.
    """
    default, main_thread = sys.unraisablehook, _thread.get_ident()

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            _thread.start_new_thread(_interrupt_soon, (main_thread,))
        else:
            default(unraisable)

    sys.unraisablehook = hook


def _interrupt_soon(thread: int) -> None:
    """Send the signal itself: unlike interrupt_main, it also ends a system call that waits."""
    time.sleep(_AGAIN_S)
    signal.pthread_kill(thread, signal.SIGINT)
