"""Ctrl-C where Python cannot run its handlers: inside native calls and inside callbacks."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers.patience import PATIENCE_S

from moegraph.interrupt import cancel_on_interrupt


def test_the_token_is_set_while_native_code_runs() -> None:
    library, gate = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    with cancel_on_interrupt() as token:
        seen: list[bool] = []

        def watch() -> None:
            end = time.monotonic() + PATIENCE_S
            while not token.is_set() and time.monotonic() < end:
                time.sleep(0.005)
            seen.append(token.is_set())
            library.pthread_mutex_unlock(gate)

        library.pthread_mutex_lock(gate)
        watcher = threading.Thread(target=watch)
        watcher.start()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        library.pthread_mutex_lock(gate)  # a signal does not end this call; only the watcher does
        watcher.join()
    assert seen == [True]


def test_a_second_ctrl_c_is_an_exception() -> None:
    with cancel_on_interrupt() as token:
        signal.raise_signal(signal.SIGINT)
        assert token.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("kept", [True, False])
def test_ctrl_c_inside_a_callback_from_native_code_is_not_lost(kept: bool) -> None:
    code = f"""
import ctypes, signal, sys, time
from moegraph.interrupt import let_interrupts_pass_callbacks
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
if {kept}:
    let_interrupts_pass_callbacks()
compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

def callback(a, b):
    if not fired:
        fired.append(1)
        signal.raise_signal(signal.SIGINT)
    return 0

fired = []
array = (ctypes.c_int * 4)()
try:
    ctypes.CDLL(None).qsort(array, 4, 4, compare(callback))
    time.sleep(1)
    print("lost")
except KeyboardInterrupt:
    print("caught")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if kept:
        assert (done.stdout, done.stderr) == ("caught\n", "")
    else:
        assert done.stdout == "lost\n"
