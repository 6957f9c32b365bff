"""Run a long build command: show progress, log all output, print its end on failure."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from _tools import BuildError

# "[12/345] Building ..." of Ninja, "[ 12%] Building ..." of make
_STEP = re.compile(r"\[\s*(\d+)(?:/(\d+)|%)\]\s*(.*)")
_TAIL = 25


class _Line:
    """Draws progress: one line that is rewritten on a terminal, elsewhere ten lines in all."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.start = time.monotonic()
        self.tty = sys.stderr.isatty()
        self.shown = -1

    def step(self, done: int, total: int, what: str) -> None:
        if self.tty:
            name = what.rsplit("/", 1)[-1][:40]
            print(f"\r\033[K{self._text(done, total)}  {name}", end="", file=sys.stderr, flush=True)
        elif done * 10 // total > self.shown:
            self.shown = done * 10 // total
            print(self._text(done, total), file=sys.stderr, flush=True)

    def _text(self, done: int, total: int) -> str:
        spent = time.monotonic() - self.start
        return f"moegraph: {self.title} {done * 100 // total:3d} %  {spent:4.0f} s"

    def end(self, word: str) -> None:
        spent = time.monotonic() - self.start
        lead = "\r\033[K" if self.tty else ""
        print(f"{lead}moegraph: {self.title} {word} in {spent:.0f} s", file=sys.stderr, flush=True)


def run(
    title: str, command: list[str], log: Path, env: dict[str, str], cwd: Path | None = None
) -> None:
    """Run `command` and write its output to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    line, tail = _Line(title), deque[str](maxlen=_TAIL)
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            for text in process.stdout:
                out.write(text)
                tail.append(text)
                if match := _STEP.search(text):
                    line.step(int(match[1]), int(match[2] or 100), match[3])
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if code == 0:
        line.end("done")
        return
    line.end("failed")
    sys.stderr.write("".join(tail))
    raise BuildError(f"{title}: {command[0]} ended with {code}; the whole output is in {log}")
