"""The hello before RPC: client and worker compare what they are built from.

The client sends one line, the worker answers with one line of JSON. What either reads is bounded in
bytes and time, because nothing is known of the other side yet without TLS.
"""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import NativeError

# A stranger gets so long, and may send so much.
HELLO_S = 10.0
MAX_QUESTION, MAX_ANSWER = 256, 16384
# Part of the line, so that a later form can differ.
_QUESTION = "moegraph worker 1 {} {}\n"
_EXPECTED = re.compile(rb"moegraph worker 1 ([0-9A-Za-z.+-]{1,40}) ([0-9a-f]{16})\n")
_MAX_DEVICES = 64


class HelloRefused(NativeError):
    """The other side is no worker, or is built from something else; the message says what."""


class HelloClosed(HelloRefused):
    """The other side closes the connection before it has said anything."""


@dataclass(frozen=True)
class Build:
    """What both sides must have in common: ggml's version and the patch set."""

    ggml: str
    patchset: str


@dataclass(frozen=True)
class RemoteDevice:
    """A device of a worker: spelling there, kind ('cpu', 'cuda', 'other') and description."""

    device: str
    kind: str
    description: str


def question_of(build: Build) -> bytes:
    """Return the client's line."""
    return _QUESTION.format(build.ggml, build.patchset).encode("ascii")


def read_question(line: bytes) -> Build | None:
    """Return the build that a client's line names; None if it is malformed."""
    found = _EXPECTED.fullmatch(line)
    return Build(found[1].decode("ascii"), found[2].decode("ascii")) if found else None


def answer_of(devices: list[RemoteDevice]) -> bytes:
    """Return the worker's line for a client that is served."""
    return json.dumps({"devices": [asdict(device) for device in devices]}).encode() + b"\n"


def refusal(reason: str) -> bytes:
    """Return the worker's line for a client that is not served."""
    return json.dumps({"error": reason}).encode() + b"\n"


def difference(own: Build, other: Build) -> str:
    """Return how the other side differs; "" if it does not."""
    if own.ggml != other.ggml:
        return f"ggml {other.ggml} there and {own.ggml} here"
    if own.patchset != other.patchset:
        return f"patch set {other.patchset} there and {own.patchset} here"
    return ""


def read_line(sock: socket.socket, most: int, within_s: float) -> bytes:
    """Read up to and with the first newline, `most` bytes at most.

    The other side sends nothing after it until it has an answer.
    """
    end, line = time.monotonic() + within_s, b""
    while not line.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        part = sock.recv(most + 1 - len(line))
        if not (part or line):
            raise HelloClosed("it closes the connection without a word")
        line += part
        if not part or len(line) > most or b"\n" in line[:-1]:
            raise HelloRefused("what it sends is no hello")
    return line


def read_answer(line: bytes, worker: str) -> list[RemoteDevice]:
    """Return the devices that a worker offers."""
    try:
        answer: Any = json.loads(line)
        if "error" in answer:
            raise HelloRefused(f"worker {worker} refused: {str(answer['error'])[:400]}")
        found = [
            RemoteDevice(str(d["device"]), str(d["kind"]), str(d["description"]))
            for d in answer["devices"]
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise HelloRefused(f"{worker} is no moegraph worker: its answer is malformed") from None
    if not 0 < len(found) <= _MAX_DEVICES:
        raise HelloRefused(f"worker {worker} has {len(found)} devices")
    return found


def greet(sock: socket.socket, build: Build, worker: str) -> list[RemoteDevice]:
    """Say hello as a client; return the worker's devices."""
    sock.settimeout(HELLO_S)
    sock.sendall(question_of(build))
    # the worker may have to start the process that serves us
    try:
        line = read_line(sock, MAX_ANSWER, 6 * HELLO_S)
    except HelloClosed as refused:
        raise HelloRefused(
            f"worker {worker} may be busy, or want other keys: {refused}; try again"
        ) from None
    except HelloRefused as refused:
        raise HelloRefused(f"{worker} is no moegraph worker: {refused}") from None
    return read_answer(line, worker)
