"""Ctrl-C at a chosen line: an interrupt may come between any two lines of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt once, before the n-th line that runs in files of some folders.

    n_lines: how many such lines ran so far. came: whether it was raised.
    """

    def __init__(self, line: int, *folders: str) -> None:
        self._line = line
        self._folders = folders
        self.n_lines = 0
        self.came = False

    def begin(self) -> None:
        """Count from here on, in the calling frames too."""
        frame: FrameType | None = sys._getframe(1)
        while frame:
            if self._is_meant(frame):
                frame.f_trace = self._trace
            frame = frame.f_back
        sys.settrace(lambda frame, *_: self._trace if self._is_meant(frame) else None)

    def end(self) -> None:
        """Count no more."""
        sys.settrace(None)

    def _is_meant(self, frame: FrameType) -> bool:
        return any(folder in frame.f_code.co_filename for folder in self._folders)

    def _trace(self, _: FrameType, event: str, __: object) -> Any:
        self.n_lines += event == "line"
        if self.n_lines > self._line:
            self.came = True
            raise KeyboardInterrupt  # Python ends the tracing then
        return self._trace


def interrupted(line: int, call: Callable[[], Any], *folders: str) -> bool:
    """Call something with an interrupt before its n-th line; return whether it came."""
    interrupt = Interrupt(line, *folders)
    interrupt.begin()
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        interrupt.end()
    return False
