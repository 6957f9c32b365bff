"""Workers that are lost, slow or of another build, and clients that send anything."""

from __future__ import annotations

import random
import signal
import socket
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import numpy as np
import pytest
from helpers.patience import PATIENCE_S
from helpers.stages import Stages, batch_of, new_config
from helpers.workers import WorkerProcess, limit

from moegraph.arch import ModelFile
from moegraph.errors import DeviceLost, MoegraphError, NativeError
from moegraph.ggml import remote
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32
from moegraph.link.hello import question_of

TIMEOUT_S = 1
KINDS = ("prefill", "decode", "verify")


def split(worker: WorkerProcess, file: ModelFile, stack: ExitStack) -> Stages:
    """Return a model of which the second half is on a worker, after a pass of each kind."""
    config = new_config(device=f"{worker.url}?timeout={PATIENCE_S:g}")
    stages = Stages(file, [], config, stack)
    for kind in KINDS:
        stages.run(batch_of(kind))
    return stages


@pytest.mark.parametrize("kind", ["verify"])
def test_a_worker_that_is_killed(
    worker: WorkerProcess, mini35b: ModelFile, stack: ExitStack, kind: str
) -> None:
    """The error names it, the next client is served by another process, and nothing hangs."""
    with ExitStack() as inner:
        stages = split(worker, mini35b, inner)
        worker.signal(signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(NativeError, match=rf"worker {worker.url[6:]} is lost"):
            stages.run(batch_of(kind))
        with pytest.raises(NativeError, match="is lost"):
            stages.run(batch_of(kind))
    assert time.monotonic() - begin < PATIENCE_S / 2
    worker.await_line("ended with signal 9; another one serves the next client")
    again = split(worker, mini35b, stack)
    again.run(batch_of(kind))
    assert worker.end() == 0


@pytest.mark.parametrize("kind", ["decode"])
def test_a_worker_that_is_frozen(
    worker: WorkerProcess, mini35b: ModelFile, stack: ExitStack, kind: str
) -> None:
    with ExitStack() as inner:
        stages = split(worker, mini35b, inner)
        worker.signal(signal.SIGSTOP)
        limit(stages.runner.parts[-1].device, TIMEOUT_S)
        begin = time.monotonic()
        with pytest.raises(NativeError, match=rf"{worker.url[6:]} did not answer within 1 s"):
            stages.run(batch_of(kind))
        assert TIMEOUT_S <= time.monotonic() - begin < PATIENCE_S / 2
    assert time.monotonic() - begin < PATIENCE_S
    worker.signal(signal.SIGCONT)
    split(worker, mini35b, stack).run(batch_of(kind))


@pytest.mark.parametrize("kind", ["prefill"])
def test_a_slow_worker_is_waited_for(
    worker: WorkerProcess, mini35b: ModelFile, stack: ExitStack, kind: str
) -> None:
    """Some time without an answer is no error, if it is within the limit."""
    stages = split(worker, mini35b, stack)
    wanted = stages.run(batch_of(kind))
    worker.signal(signal.SIGSTOP)
    stages.runner.submit(batch_of(kind))
    time.sleep(0.5)
    worker.signal(signal.SIGCONT)
    assert type(stages.runner.collect()) is type(wanted)


def test_copies_from_a_lost_worker_are_no_copies(
    worker: WorkerProcess, mini35b: ModelFile, stack: ExitStack
) -> None:
    """What would be kept as a prefix is zeros then."""
    stages = split(worker, mini35b, stack)
    copies = stages.sequences.copies
    copies.take_states(0, 4)
    copies.take_rows(0, 0, 4)
    worker.signal(signal.SIGKILL)
    with pytest.raises(DeviceLost):
        copies.take_states(0, 4)
    with pytest.raises(DeviceLost):
        copies.take_rows(0, 0, 4)


def test_a_worker_that_freezes_while_weights_are_sent(
    worker: WorkerProcess, stack: ExitStack
) -> None:
    """More than the system keeps for it: the time limit is that of an answer."""
    n = 64 << 20
    device = stack.enter_context(closing(Device(f"{worker.url}?timeout={PATIENCE_S:g}", 1)))
    buffer = stack.enter_context(closing(device.buffer(n, "weights", "")))
    context = stack.enter_context(closing(Context(1)))
    tensor = C.ggml_new_tensor_1d(context.ptr, F32, n // 4)
    place(buffer, tensor, 0)
    worker.signal(signal.SIGSTOP)
    limit(device, TIMEOUT_S)
    begin = time.monotonic()
    data = np.zeros(n, np.uint8)
    C.ggml_backend_tensor_set_async(device.upload.ptr, tensor, ffi.from_buffer(data), 0, n)
    with pytest.raises(DeviceLost, match="did not answer within 1 s"):
        device.check_alive()
    assert TIMEOUT_S <= time.monotonic() - begin < PATIENCE_S / 2
    worker.signal(signal.SIGCONT)


def test_no_worker_there() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with pytest.raises(NativeError, match=rf"127.0.0.1:{port} cannot be reached.*refused"):
        Device(f"rpc://127.0.0.1:{port}", 1)


@pytest.mark.parametrize("change", [{"ggml": "9.9.9"}, {"patchset": "0123456789abcdef"}])
def test_another_build_is_refused(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    """The line on either side says what differs."""
    own = remote.this_build()
    with monkeypatch.context() as patched:
        patched.setattr(remote, "this_build", lambda: replace(own, **change))
        with pytest.raises(NativeError, match=f"refused: .*{next(iter(change.values()))}"):
            Device(worker.url, 1)
    worker.await_line(f"refused 127.*{next(iter(change.values()))} there")
    Device(worker.url, 1).close()


def test_a_second_client_is_told_that_another_one_is_served(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(worker.url, 1)
    monkeypatch.setattr(remote, "_open", {})  # as in another process
    with pytest.raises(NativeError, match=r"refused: it serves another client, 127.0.0.1:\d+"):
        Device(worker.url, 1)
    device.close()
    Device(worker.url, 1).close()


def talk(worker: WorkerProcess, said: bytes) -> bytes:
    """Send bytes to a worker, end, and return what it answers."""
    with closing(socket.create_connection(worker.address, 30)) as sock:
        try:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(4096), b""))
        except OSError:
            return b""


def test_bytes_before_the_hello_end_nothing(worker: WorkerProcess) -> None:
    child, rng = worker.children if worker.address else [], random.Random(8)
    hello = question_of(remote.this_build())
    cases = [b"", b"\n", b"x" * 100_000, b"\0" * 300, hello[:-1], hello.replace(b" 1 ", b" 2 ")]
    cases += [hello + b"\x0e" * 40, b"GET / HTTP/1.1\r\n\r\n", b"[" * 255 + b"\n"]
    cases += [rng.randbytes(rng.randrange(1, 400)) for _ in range(40)]
    for said in cases:
        answer = talk(worker, said)
        assert b"devices" not in answer
    assert worker.children == child
    Device(worker.url, 1).close()


def test_strangers_that_say_nothing_do_not_keep_a_client_out(worker: WorkerProcess) -> None:
    """Some may wait at a time; the oldest are told so, and a client comes in beside the others."""
    with ExitStack() as held:
        strangers = [
            held.enter_context(closing(socket.create_connection(worker.address))) for _ in range(40)
        ]
        held_open, end = strangers, time.monotonic() + PATIENCE_S
        while len(held_open) > 16 and time.monotonic() < end:
            time.sleep(0.1)
            held_open = [sock for sock in held_open if not is_closed(sock)]
        assert len(held_open) == 16
        assert strangers[24:] == held_open
        Device(worker.url, 1).close()


def is_closed(sock: socket.socket) -> bool:
    """Return whether the other side has ended a connection, after a line that says why."""
    sock.setblocking(False)
    try:
        said = sock.recv(1000)
        assert not said or b"16 connections that wait; try again" in said
        return not said
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_bytes_after_the_hello_end_the_process_at_most(worker: WorkerProcess) -> None:
    """Whatever a trusted client sends: the worker lives, and serves the next client.

    Commands below 19 are upstream's, and those from 20 on ours.
    """
    hello, rng = question_of(remote.this_build()), random.Random(9)
    begin = b"\x0e" + (24).to_bytes(8, "little") + b"\0" * 24
    for turn in range(16):
        with closing(socket.create_connection(worker.address, 60)) as sock:
            sock.sendall(hello)
            assert b"devices" in sock.recv(4096)
            command = bytes([rng.randrange(20) if turn < 6 else 14 + turn])
            size = rng.choice([0, 12, 16, 400, 1 << 62]).to_bytes(8, "little")
            with suppress(OSError):  # the process may end at any byte
                sock.sendall((begin if turn % 4 else b"") + command + size + rng.randbytes(400))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    device = Device(worker.url, 1)
    device.close()
    assert worker.process.poll() is None


@pytest.mark.parametrize("command", ["store", "optimize", "set", "get", "upstream's set"])
def test_a_size_that_no_tensor_has_takes_no_memory(worker: WorkerProcess, command: str) -> None:
    """The connection ends at once; the process neither waits for the bytes nor dies for memory."""
    ours = {"store": 21, "optimize": 24, "set": 26, "get": 27}
    number = {**ours, "upstream's set": 6}[command]
    n_bytes = 1 << (40 if command == "get" else 31)
    part = b"\0" * (4 + 296 + 8) + n_bytes.to_bytes(8, "little")  # its tensor has no buffer
    sent = part if command in ("set", "get") else b""
    size = {"set": len(part) + n_bytes, "get": len(part)}.get(command, n_bytes)
    with closing(socket.create_connection(worker.address, PATIENCE_S)) as sock:
        sock.sendall(question_of(remote.this_build()))
        assert b"devices" in sock.recv(4096)
        sock.sendall(b"\x0e" + (24).to_bytes(8, "little") + b"\0" * 24)  # upstream's hello
        assert sock.recv(4096)
        sock.sendall(bytes([number]) + size.to_bytes(8, "little") + sent)
        while sock.recv(4096):
            pass
    worker.await_line("has left")  # it ended by itself, not by a signal


def test_a_worker_needs_keys_for_other_machines() -> None:
    worker = WorkerProcess("--device", "cpu", "--listen", "0.0.0.0:0")
    assert worker.process.wait(60) == 2
    worker.await_line("TLS only.*--new-keys")
    with pytest.raises(MoegraphError, match="TLS only"):
        Device("rpc://192.0.2.1:50052", 1)
