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

from moegraph.cli.interrupt import cancel_on_interrupt


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


def test_without_ctrl_c_nothing_is_set_and_everything_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    threads = set(threading.enumerate())
    with cancel_on_interrupt() as token:
        assert not token.is_set()
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert set(threading.enumerate()) <= threads


def test_other_signals_do_not_cancel() -> None:
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with cancel_on_interrupt() as token:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            assert not token.is_set()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_outside_the_main_thread_it_only_makes_a_token() -> None:
    found: list[bool] = []

    def run() -> None:
        with cancel_on_interrupt() as token:
            found.append(token.is_set())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.parametrize("kept", [True, False])
def test_ctrl_c_inside_a_callback_from_native_code_is_not_lost(kept: bool) -> None:
    code = f"""
import ctypes, signal, sys, time
from moegraph.cli.interrupt import let_interrupts_pass_callbacks
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
