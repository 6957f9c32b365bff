"""Connections to workers without native code: addresses, the hello, the relay."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.patience import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from moegraph.cli.worker import _split, worker
from moegraph.config import EngineConfig
from moegraph.errors import ConfigError
from moegraph.link.address import Address, is_loopback, listen_on, parse_address
from moegraph.link.hello import (
    MAX_ANSWER,
    MAX_QUESTION,
    Build,
    HelloRefused,
    RemoteDevice,
    answer_of,
    difference,
    question_of,
    read_answer,
    read_line,
    read_question,
    refusal,
)
from moegraph.link.tls import relay

BUILD = Build("0.25.3", "0123456789abcdef")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("rpc://127.0.0.1:50052", Address("127.0.0.1", 50052)),
        ("rpc://localhost:1/2", Address("localhost", 1, 2)),
        ("rpc://[::1]:7?timeout=0.5", Address("::1", 7, timeout_s=0.5)),
        ("rpc://box:7/1?keys=/a/b&timeout=9", Address("box", 7, 1, "/a/b", 9.0)),
    ],
)
def test_an_address_is_read(name: str, wanted: Address) -> None:
    assert parse_address(name) == wanted
    EngineConfig(device=f"cpu,{name}").validate()
    assert wanted.worker == name[6:].partition("?")[0].partition("/")[0]


@pytest.mark.parametrize(
    "name",
    [
        "rpc://", "rpc://127.0.0.1", "rpc://127.0.0.1:0", "rpc://127.0.0.1:99999", "rpc://:50052",
        "rpc://127.0.0.1:1/x", "rpc://127.0.0.1:1/-1", "rpc://127.0.0.1:1?key=a", "rpc://[::1:7",
        "rpc://127.0.0.1:1?timeout=0", "rpc://127.0.0.1:1?timeout=nan", "rpc://u@127.0.0.1:1",
        "rpc://127.0.0.1:1#x", "rpc://127.0.0.1:1?keys",
    ],
)  # fmt: skip
def test_a_malformed_address_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form rpc://HOST:PORT"):
        parse_address(name)


@given(st.text(max_size=60))
def test_any_address_is_read_or_refused(text: str) -> None:
    with suppress(ConfigError):
        assert parse_address("rpc://" + text).port


def test_another_machine_needs_keys_on_both_sides() -> None:
    for host in ("10.0.0.1", "box", "localhost.example", "0.0.0.0", "::"):
        assert not is_loopback(host)
        shown = f"[{host}]" if ":" in host else host
        with pytest.raises(ConfigError, match="TLS only"):
            parse_address(f"rpc://{shown}:1")
        with pytest.raises(ConfigError, match="TLS only"):
            listen_on(host, 0, has_keys=False)
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))


def test_a_hello_says_what_both_sides_are_built_from() -> None:
    line = question_of(BUILD)
    assert read_question(line) == BUILD and len(line) <= MAX_QUESTION
    assert difference(BUILD, BUILD) == ""
    assert "9.9.9 there and 0.25.3 here" in difference(BUILD, Build("9.9.9", BUILD.patchset))
    assert "there and 0123" in difference(BUILD, Build(BUILD.ggml, "f" * 16))
    devices = [RemoteDevice("cuda:0", "other", "a card")]
    assert read_answer(answer_of(devices), "w") == devices
    with pytest.raises(HelloRefused, match="worker w refused: busy"):
        read_answer(refusal("busy"), "w")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_hello_or_none(said: bytes) -> None:
    assert read_question(said) is None or question_of(read_question(said) or BUILD) == said
    with pytest.raises(HelloRefused):
        read_answer(said, "w")


@pytest.mark.parametrize(
    "said", [b"[" * 5000, b'{"devices": []}', b'{"devices": [{}]}', b"null", b'{"devices": 3}']
)
def test_a_malformed_answer_is_refused(said: bytes) -> None:
    with pytest.raises(HelloRefused):
        read_answer(said, "w")
    assert len(said) <= MAX_ANSWER


def test_a_line_is_bounded_in_bytes_and_time() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"hello\n")
        assert read_line(other, 6, PATIENCE_S) == b"hello\n"
        one.sendall(b"hello!\n")
        with pytest.raises(HelloRefused):
            read_line(other, 6, PATIENCE_S)
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"a\nb")
        with pytest.raises(HelloRefused):
            read_line(other, 100, PATIENCE_S)
    one, other = socket.socketpair()
    with one, other:
        stop, begin = threading.Event(), time.monotonic()

        def drip() -> None:
            while not stop.wait(0.05):
                one.send(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(TimeoutError):
            read_line(other, 1 << 20, 0.5)
        assert time.monotonic() - begin < PATIENCE_S
        stop.set()
        dripping.join()


def piped(use: Callable[[socket.socket, socket.socket], None]) -> None:
    """Call `use` with two sockets that a relay joins, and wait for the relay's end."""
    a, left = socket.socketpair()
    right, b = socket.socketpair()
    joining = threading.Thread(target=relay, args=(left, right))
    joining.start()
    with a, b:
        use(a, b)
    joining.join(PATIENCE_S)
    assert not joining.is_alive()


def test_a_relay_copies_both_ways_at_once() -> None:
    data = os.urandom(3 << 20)

    def use(a: socket.socket, b: socket.socket) -> None:
        def read(sock: socket.socket) -> bytes:
            found = bytearray()
            while len(found) < len(data):
                found += sock.recv(1 << 16)
            return bytes(found)

        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(sock.sendall, data) for sock in (a, b)]
            found = [pool.submit(read, sock) for sock in (a, b)]
            assert [one.result(20) for one in found] == [data, data]
            assert [one.result(20) for one in sent] == [None, None]

    piped(use)


@pytest.mark.parametrize("side", [0, 1])
def test_a_relay_ends_when_either_side_does(side: int) -> None:
    def use(*ends: socket.socket) -> None:
        ends[side].close()
        assert ends[1 - side].recv(1) == b""

    piped(use)


@pytest.mark.parametrize(
    ("listen", "wanted"),
    [
        ("127.0.0.1:5", ("127.0.0.1", 5)), (":7", ("127.0.0.1", 7)), ("box", ("box", 50052)),
        ("[::1]:7", ("::1", 7)), ("[::1]", ("::1", 50052)), ("::1", ("::1", 50052)),
    ],
)  # fmt: skip
def test_an_address_to_listen_on_is_read(listen: str, wanted: tuple[str, int]) -> None:
    assert _split(listen) == wanted


def test_a_worker_keeps_no_weights_where_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    given: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    found = CliRunner().invoke(worker, ["--cache-dir", str(tmp_path)], **given)
    assert isinstance(found.exception, ConfigError) and "(mode 777)" in str(found.exception)


_DROPPED = """
import os, signal, time
from moegraph.cli import worker
worker._AGAIN_S = 0.1
signal.signal(signal.SIGTERM, worker._stop)
class Leaving:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        print("dropped", flush=True)
Leaving()
print("goes on", flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_signal_to_end_that_python_drops_comes_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DROPPED],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout == "goes on\n" and "SystemExit" in done.stderr
