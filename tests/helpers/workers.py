"""`moegraph worker` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moegraph.ggml.device import Device

from .logged_process import LoggedProcess

_READY = re.compile(r"listening on (\S+), with(out)? TLS$", re.M)


class WorkerProcess(LoggedProcess):
    """A running worker; `url` is the spelling of its first device once it is ready."""

    def __init__(self, *args: object) -> None:
        super().__init__("worker", *args)

    @property
    def address(self) -> tuple[str, int]:
        """Wait until the worker listens; return where."""
        host, _, port = self.await_line(_READY)[1].rpartition(":")
        return host, int(port)

    @property
    def url(self) -> str:
        """Wait until the worker listens; return the spelling of its first device."""
        host, port = self.address
        return f"rpc://{host}:{port}"

    @property
    def children(self) -> list[int]:
        """The processes that serve clients, or wait for one."""
        tasks = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(tasks).read_text().split()]

    def signal(self, number: int) -> None:
        """Send a signal to the process that serves the client."""
        (child,) = self.children
        os.kill(child, number)

    def end(self) -> int:
        """End the worker; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()


def limit(device: Device, seconds: float) -> None:
    """Have a worker that does not answer be taken for lost after a time.

    A busy machine may stop a worker for some seconds: a test that freezes one asks for a short time
    only then.
    """
    link = device.link
    assert link is not None
    link._timeout_s = seconds
    span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link._connection.sock.setsockopt(socket.SOL_SOCKET, option, span)


@contextmanager
def working(*args: object) -> Iterator[WorkerProcess]:
    """Run a worker that lends the CPU with one thread on a free port; end it at the end."""
    base = ("--device", "cpu", "-t", 1, "--listen", "127.0.0.1:0")
    worker = WorkerProcess(*base, *args)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.end()
