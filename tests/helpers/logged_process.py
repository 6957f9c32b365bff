"""A command of the program in a process of its own, whose stderr is read while it runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from .patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def heed_ctrl_c() -> None:
    """Undo what a shell does to jobs in the background: their children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class LoggedProcess:
    """`moegraph` with arguments, and no settings from the environment but those given."""

    def __init__(self, *args: object, **env: str) -> None:
        command = [sys.executable, "-m", "moegraph", *map(str, args)]
        given = {k: v for k, v in os.environ.items() if not k.startswith("MOEGRAPH_")}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=ROOT, env={**given, "PYTHONPATH": path, **env}, text=True,
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

    def await_line(self, pattern: re.Pattern[str] | str) -> re.Match[str]:
        """Wait until stderr matches."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            is_over = self.process.poll() is not None
            if is_over:
                self._reader.join(PATIENCE_S)
            found = re.search(pattern, self.log)
            if found:
                return found
            if is_over:
                break
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in: {self.log}")

    def ended(self) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code
