"""`moegraph serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Loading on a busy machine; a hang is what this finds.
PATIENCE_S = 120
_READY = re.compile(r"served at (http://\S+)$", re.M)


def heed_ctrl_c() -> None:
    """Undo what a shell does to jobs in the background: their children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class ServerProcess:
    """A running server; `url` is its address once it is ready."""

    def __init__(self, *args: object, **env: str) -> None:
        command = [sys.executable, "-m", "moegraph", "serve", *map(str, args)]
        given = {k: v for k, v in os.environ.items() if not k.startswith("MOEGRAPH_")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=ROOT, env={**given, "PYTHONPATH": str(ROOT), **env}, text=True,
            preexec_fn=heed_ctrl_c,  # noqa: PLW1509 - the tests start no threads before
        )  # fmt: skip
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def log(self) -> str:
        """What is on stderr so far."""
        return "".join(list(self._lines))

    @property
    def url(self) -> str:
        """Wait until the server is ready; return its address."""
        return self.await_line(_READY)[1]

    def await_line(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Wait until stderr matches."""
        for _ in range(PATIENCE_S * 20):
            found = pattern.search(self.log)
            if found:
                return found
            if self.process.poll() is not None:
                self._reader.join()
                assert pattern.search(self.log), self.log
            time.sleep(0.05)
        raise AssertionError(f"no {pattern.pattern!r} in: {self.log}")

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join()
        return code


@contextmanager
def serving(*args: object, target: object = "tiny", **env: str) -> Iterator[ServerProcess]:
    """Run a server with the shipped model on one thread and a free port; end it at the end."""
    server = ServerProcess(target, "--device", "cpu", "-t", 1, "--port", 0, *args, **env)
    try:
        yield server
    finally:
        server.process.kill()
        server.end()
