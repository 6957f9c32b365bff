"""`moegraph serve` in a process of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from .logged_process import LoggedProcess

_READY = re.compile(r"served at (http://\S+)$", re.M)


class ServerProcess(LoggedProcess):
    """A running server; `url` is its address once it is ready."""

    def __init__(self, *args: object, **env: str) -> None:
        super().__init__("serve", *args, **env)

    @property
    def url(self) -> str:
        """Wait until the server is ready; return its address."""
        return self.await_line(_READY)[1]

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        return self.ended()


@contextmanager
def serving(*args: object, target: object = "tiny", **env: str) -> Iterator[ServerProcess]:
    """Run a server with the shipped model on one thread and a free port; end it at the end."""
    server = ServerProcess(target, "--device", "cpu", "-t", 1, "--port", 0, *args, **env)
    try:
        yield server
    finally:
        server.process.kill()
        server.end()
