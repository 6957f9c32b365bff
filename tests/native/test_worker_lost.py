"""Workers that are lost, and connections that are cut, while a pass or a prompt is on its way."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
from helpers.cable import Cable
from helpers.patience import PATIENCE_S
from helpers.stages import Stages, batch_of, new_config
from helpers.workers import WorkerProcess

from moegraph.arch import ModelFile
from moegraph.engine import Engine
from moegraph.errors import NativeError
from moegraph.ggml import remote
from moegraph.ggml.device import Device
from moegraph.link import hello

TIMEOUT_S = 240
# Until an error that does not wait for the timeout, on a busy machine.
SOON_S = PATIENCE_S


@pytest.mark.parametrize("kind", ["prefill", "verify"])
def test_a_connection_that_is_cut_while_a_pass_waits(
    worker: WorkerProcess, mini35b: ModelFile, stack: ExitStack, kind: str
) -> None:
    """The error comes at once, without the timeout; the worker serves the next client."""
    with ExitStack() as inner:
        cable = Cable(worker.address, inner)
        url = f"{cable.url}?timeout={TIMEOUT_S}"
        stages = Stages(mini35b, [], new_config(device=url), inner)
        stages.run(batch_of(kind))
        worker.signal(signal.SIGSTOP)
        stages.runner.submit(batch_of(kind))
        cutting = threading.Timer(0.3, cable.cut)
        cutting.start()
        begin = time.monotonic()
        with pytest.raises(NativeError, match=r"worker 127.0.0.1:\d+ is lost"):
            stages.runner.collect()
        assert time.monotonic() - begin < SOON_S
        cutting.join()
        worker.signal(signal.SIGCONT)
    Stages(mini35b, [], new_config(device=worker.url), stack).run(batch_of(kind))


def test_a_worker_that_is_lost_before_a_commit(
    worker: WorkerProcess, mini35b: ModelFile, stack: ExitStack
) -> None:
    """A commit has no answer of its own: the next pass, or the copy of a state, says it."""
    with ExitStack() as inner:
        stages = Stages(mini35b, [], new_config(device=worker.url), inner)
        stages.run(batch_of("verify"))
        worker.signal(signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(NativeError, match=rf"worker {worker.url[6:]} is lost"):
            stages.runner.commit({0: [0, 1]})
            stages.run(batch_of("decode"))
        assert time.monotonic() - begin < SOON_S
    Stages(mini35b, [], new_config(device=worker.url), stack).run(batch_of("decode"))


@pytest.mark.parametrize("first", [True, False])
def test_a_worker_that_is_lost_while_a_prompt_is_read(
    worker: WorkerProcess, open_engine: Callable[..., Engine], first: bool
) -> None:
    """In a sweep, with the worker as the first stage or the last; the engine is of no more use."""
    url = f"{worker.url}?timeout={TIMEOUT_S}"
    engine = open_engine("mini35b", device=f"{url},cpu" if first else f"cpu,{url}")
    list(engine.generate(np.arange(300, dtype=np.int32), max_tokens=1, text=False))
    worker.signal(signal.SIGSTOP)
    killing = threading.Timer(0.3, worker.signal, (signal.SIGKILL,))
    killing.start()
    begin = time.monotonic()
    with pytest.raises(NativeError, match=rf"worker {worker.url[6:]} is lost"):
        list(engine.generate(np.arange(300, dtype=np.int32)[::-1], max_tokens=1, text=False))
    assert time.monotonic() - begin < SOON_S
    killing.join()


@pytest.mark.parametrize(
    ("answer", "together"),
    [(b"", True), (b"\0" * 8, False), (b"\xff" * 4096, True)],
    ids=["none", "short", "ones"],
)
def test_a_worker_that_answers_nonsense_is_refused(
    answer: bytes, together: bool, stack: ExitStack
) -> None:
    """Whatever comes after its hello: an error, not the end of this process."""
    before = dict(remote._open)
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def work() -> None:
        sock, _ = listening.accept()
        with sock:
            hello.read_line(sock, hello.MAX_QUESTION, hello.HELLO_S)
            sock.sendall(hello.answer_of([hello.RemoteDevice("cpu", "cpu", "a liar")]))
            if not together:
                sock.recv(4096)
            sock.sendall(answer)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass

    thread = threading.Thread(target=work)
    thread.start()
    stack.callback(thread.join)
    with pytest.raises(NativeError, match=r"127.0.0.1:\d+"):
        Device(f"rpc://127.0.0.1:{listening.getsockname()[1]}", 1)
    assert remote._open == before
