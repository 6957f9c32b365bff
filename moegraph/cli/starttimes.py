"""How long a command took until its first token, from the start of the process on."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..events import Stopwatch


def process_age(stat: Path = Path("/proc/self/stat")) -> float | None:
    """Return the seconds since this process started, to 10 ms; None if the system does not tell."""
    try:
        # the name in parentheses may hold spaces; the 20th field after it is the start
        ticks = int(stat.read_text(errors="replace").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class StartTimes:
    """Measures from the start of the process to the first token.

    process_s: until this object was made. first_token_s: until the first token. Both are None if
    the system does not tell when the process started.
    """

    def __init__(self) -> None:
        self.process_s = process_age()
        self._watch = Stopwatch()  # after it, so that no time counts twice
        self.first_token_s: float | None = None

    def lap(self, phase: str) -> None:
        """End a phase; it began when the last one ended."""
        self._watch.lap(phase)

    def token(self) -> None:
        """Note that a token is there; only the first call counts."""
        if self.first_token_s is None:
            self.first_token_s = process_age()

    def report(self) -> dict[str, float | None]:
        """Return the phases for JSON: their names with _s, and seconds."""
        found = {"process": self.process_s, **self._watch.seconds}
        found["first_token"] = self.first_token_s
        return {f"{name}_s": None if s is None else round(s, 6) for name, s in found.items()}
