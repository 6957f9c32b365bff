"""Run a long build command: show progress, log all output, print its end on failure."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import _tools
from _tools import BuildError

# "[12/345] Building ..." of Ninja, "[ 12%] Building ..." of make
_STEP = re.compile(r"\[\s*(\d+)(?:/(\d+)|%)\]")
_TAIL = 25


def run(
    title: str, command: list[str], log: Path, env: dict[str, str], cwd: Path | None = None
) -> None:
    """Run `command` and write its output to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start, shown, tail = time.monotonic(), -1, deque[str](maxlen=_TAIL)
    is_terminal = sys.stderr.isatty()

    def tell(what: str, end: str = "\n") -> None:
        text = f"moegraph: {title} {what} {time.monotonic() - start:.0f} s"
        print(text.ljust(79 if is_terminal else 0), end=end, file=sys.stderr, flush=True)

    with log.open("w", encoding="utf-8") as out, subprocess.Popen(
        command, env=env, cwd=cwd, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for text in process.stdout:
                out.write(text)
                tail.append(text)
                if match := _STEP.search(text):
                    percent = int(match[1]) * 100 // int(match[2] or 100)
                    if is_terminal or percent // 10 > shown:  # one line, or ten in all
                        shown = percent // 10
                        tell(f"{percent:3d} % ", "\r" if is_terminal else "\n")
        except KeyboardInterrupt:
            process.terminate()
            raise
    if process.returncode == 0:
        tell("done in")
        return
    tell("failed after")
    sys.stderr.write("".join(tail))
    raise BuildError(
        f"{title}: {command[0]} ended with {process.returncode}; the whole output is in {log}"
    )


def cmake(
    title: str, source: Path, folder: Path, options: list[str], targets: Iterable[str], jobs: int,
    **more: str,
) -> None:  # fmt: skip
    """Configure a source for a release, and build targets of it. more: of the environment."""
    program, env = _tools.find_cmake(), {**_tools.environment(), **more}
    command = [program, "-S", str(source), "-B", str(folder), *_tools.generator(), *options]
    command += ["-DCMAKE_BUILD_TYPE=Release"]
    run(f"configure {title}", command, folder / "configure.log", env)
    command = [program, "--build", str(folder), "--parallel", str(jobs), "--target", *targets]
    run(f"compile {title} ({jobs} at a time)", command, folder / "build.log", env)
