"""`moegraph worker` in a process of its own."""

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
PATIENCE_S = 60
_READY = re.compile(r"listening on (\S+), with(out)? TLS$", re.M)


class WorkerProcess:
    """A running worker; `url` is the spelling of its first device once it is ready."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-m", "moegraph", "worker", *map(str, args)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
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

    def await_line(self, pattern: re.Pattern[str] | str) -> re.Match[str]:
        """Wait until stderr matches."""
        for _ in range(PATIENCE_S * 20):
            found = re.search(pattern, self.log)
            if found:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in: {self.log}")

    def signal(self, number: int) -> None:
        """Send a signal to the process that serves the client."""
        (child,) = self.children
        os.kill(child, number)

    def end(self) -> int:
        """End the worker; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


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
