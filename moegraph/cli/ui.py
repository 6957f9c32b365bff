"""All terminal drawing: colours, progress bars, tables, notes.

Content goes to stdout, everything else to stderr. Progress bars and colours appear only on a
terminal, and colours only if NO_COLOR is not set.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..errors import Cancelled, MoegraphError, one_line
from ..units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STYLES: dict[str, dict[str, Any]] = {
    "error": {"fg": "red", "bold": True},
    "good": {"fg": "green"},
    "head": {"bold": True},
    "columns": {"bold": True, "underline": True},
    "muted": {"dim": True},
    "prompt": {"fg": "cyan", "bold": True},
}
_STAGES = {"load": "Loading", "prefill": "Reading the prompt", "check": "Checking",
    "download": "Downloading", "checksum": "Comparing the checksum",
}  # fmt: skip
# Seconds before a bar is drawn; a bar that vanishes at once would only flicker.
_BAR_DELAY_S = 0.25
# A cell of a column of numbers: a number, perhaps with grouped digits, and perhaps a unit.
_NUMBER = re.compile(
    r"[-+]?\d[\d,.]*( ?(%|[KMGT]?i?B|[KMBT]|[mun]?s|tok/s))?( (\u00b1|to) [\d.]+)?"
)
# A cell of such a column that has no value.
NONE = "-"
# A model can write any character, but a terminal must not obey control characters. Tab, newline,
# and a carriage return before a newline are harmless.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
} | {13: ""}


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can be drawn on."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def stdin_is_terminal() -> bool:
    """Return whether a person types the input."""
    return sys.stdin is not None and sys.stdin.isatty()


def styled(text: str, role: str, stream: TextIO) -> str:
    """Return text in the style of a role, or plain text if the stream shows no colour."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, **STYLES[role])


def write_text(text: str, role: str | None = None, stream: TextIO | None = None) -> None:
    """Write a piece of streamed text and flush; on a terminal, control characters are made visible.

    Other streams get the text unchanged.
    """
    stream = stream or sys.stdout
    if is_terminal(stream):
        text = text.translate(_CONTROLS)
    stream.write(styled(text, role, stream) if role and text else text)
    stream.flush()


def end_line(text: str, follows: bool = True) -> None:
    """Move the cursor to a new line after text; a pipe or a file gets only the text.

    Text that goes through a pipe, as in `| tee FILE`, may reach the same terminal as stderr.
    follows: whether lines on stderr come after it, which may go to the same file or pipe.
    """
    if text.endswith("\n"):
        return
    if is_terminal(sys.stdout):
        write_text("\n")
    elif (is_terminal(sys.stderr) and stat.S_ISFIFO(_mode(sys.stdout))) or (
        follows and _is_shared()
    ):
        write_text("\n", stream=sys.stderr)


@contextmanager
def errors_begin_lines(end: Callable[[], None]) -> Iterator[None]:
    """Call end, which ends the last line of streamed text, before an error is told."""
    try:
        yield
    except Cancelled:
        raise  # Ctrl-C has moved the cursor
    except MoegraphError:
        end()
        raise


def stdin_has_text() -> bool:
    """Return whether stdin is a pipe or a file, not a terminal or /dev/null."""
    if sys.stdin is None or sys.stdin.isatty():
        return False
    mode = _mode(sys.stdin)
    if mode == 0:  # an in-memory stream has no file descriptor
        return not sys.stdin.closed
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _is_shared() -> bool:
    """Return whether stdout and stderr go to one file or pipe."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def _mode(stream: TextIO) -> int:
    """Return the mode of a stream's file, 0 if it has none."""
    try:
        return os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return 0


def error(message: str) -> None:
    """Print one line to stderr."""
    head = styled("error:", "error", sys.stderr)
    sys.stderr.write(f"{head} {one_line(message)}\n")
    sys.stderr.flush()


def note(message: str) -> None:
    """Print one quiet line to stderr."""
    sys.stderr.write(styled(one_line(message), "muted", sys.stderr) + "\n")
    sys.stderr.flush()


def warn_once(warnings: Iterable[str], warned: set[str] | None = None) -> None:
    """Print the warnings that were not printed before, and add them to `warned`."""
    warned = set() if warned is None else warned
    for warning in warnings:
        if warning not in warned:
            note(f"warning: {warning}")
            warned.add(warning)


def heading(text: str) -> None:
    """Print a heading of a report to stdout."""
    click.echo(styled(text, "head", sys.stdout))


def section(title: str) -> None:
    """Print an empty line and the heading of the next part of a report."""
    click.echo()
    heading(title)


def table(
    rows: Iterable[Sequence[object]], header: Sequence[str] = (), is_text: bool = False
) -> None:
    """Print aligned columns to stdout; text is made printable. An empty row is an empty line.

    A column is aligned to the right if all its cells are numbers, empty, or NONE. is_text: align
    all columns to the left.
    """
    lines = [[one_line(str(cell)) for cell in row] for row in rows]
    cells = [list(header), *lines] if header else lines
    widths = [max(map(len, column)) for column in zip(*filter(None, cells), strict=True)]
    columns = zip(*filter(None, lines), strict=True)
    right = [not is_text and _is_numeric(column) for column in columns] or [False] * len(widths)
    for at, row in enumerate(cells):
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right)
        )
        line = "  ".join(padded).rstrip()
        if header and at == 0:
            line = styled(line, "columns", sys.stdout)
        click.echo(f"  {line}" if row else "")


def _is_numeric(column: Sequence[str]) -> bool:
    """Return whether a column holds numbers, apart from empty cells and NONE."""
    found = [cell for cell in column if cell]
    return bool(found) and all(cell == NONE or _NUMBER.fullmatch(cell) for cell in found)


def ask(prompt: str) -> str:
    """Return a line typed at the terminal."""
    if not is_terminal(sys.stdout):  # it is redirected: the prompt goes to stderr
        write_text(prompt, "prompt", sys.stderr)
        return input()
    # readline counts columns; these marks tell it which characters take none.
    return input(re.sub(r"(\x1b\[[0-9;]*m)", "\x01\\1\x02", styled(prompt, "prompt", sys.stdout)))


class Bars:
    """Progress bars on stderr: call it with (stage, done, total), as the engine does.

    Draws only on a terminal, and only for work that takes some time.
    """

    def __init__(self) -> None:
        self._enabled = is_terminal(sys.stderr)
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._stage = ""
        self._began, self._first, self._done, self._total = 0.0, 0, 0, 0
        self._bar: tuple[Progress, TaskID] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of a stage are finished."""
        if not self._enabled:
            return
        if stage != self._stage:
            self.expect(stage, total, done)
        with self._lock:
            self._done, self._total = done, total
            if self._bar is not None:
                progress, task = self._bar
                progress.update(task, completed=done, total=total, rate=self._rate())
        if done >= total:
            self.clear()

    def expect(self, stage: str, total: int, done: int = 0) -> None:
        """Show a stage that begins, after a while, even if its first report comes late."""
        if not self._enabled:
            return
        self.clear()
        self._stage, self._began, self._first = stage, time.monotonic(), done
        self._done, self._total = done, total
        self._timer = threading.Timer(_BAR_DELAY_S, self._draw)
        self._timer.daemon = True
        self._timer.start()

    def clear(self) -> None:
        """Remove the bar, so that text can follow."""
        with self._lock:
            timer, self._timer = self._timer, None
            bar, self._bar = self._bar, None
            self._stage = ""
        if timer is not None:
            timer.cancel()
        if bar is not None:
            bar[0].stop()

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _rate(self) -> str:
        """Return the speed of a prompt or a download so far; empty for other stages."""
        seconds, n = time.monotonic() - self._began, self._done - self._first
        if self._stage not in ("prefill", "download") or not (n and seconds):
            return ""
        rate = n / seconds
        return f"{rate:.0f} tok/s" if self._stage == "prefill" else f"{format_bytes(int(rate))}/s"

    def _draw(self) -> None:
        # rich takes a tenth of a second to import, so it is imported only here.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        with self._lock:
            if self._timer is not threading.current_thread():
                return  # the stage has ended
            progress = Progress(
                TextColumn("{task.description}"), BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(), console=Console(file=sys.stderr), transient=True,
            )  # fmt: skip
            name = _STAGES.get(self._stage, self._stage)
            self._bar = (
                progress,
                progress.add_task(name, completed=self._done, total=self._total, rate=self._rate()),
            )
            progress.start()
