"""What a generation tells its caller, and how the caller ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Called with (stage, units done, units in total).
Progress = Callable[[str, int, int], None]


class Stopwatch:
    """Measures phases that follow one another, such as those of a start.

    seconds: the length of each phase that has ended, by name, in order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase; it began when the last one ended, or with the stopwatch."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


class CancelToken:
    """Ask a running generation to end; safe from other threads and from signal handlers."""

    # Not a threading.Event: a signal handler that interrupts Event.set() in its own thread would
    # deadlock on the event's lock. The CPU kernels read the same word.
    def __init__(self) -> None:
        self.flag = np.zeros(1, dtype=np.int32)

    def set(self) -> None:
        """Request the end: of a prompt between layers (CPU: nodes), of an answer between steps."""
        self.flag[0] = 1

    def is_set(self) -> bool:
        """Return whether the end was requested."""
        return bool(self.flag[0])


@dataclass(frozen=True)
class GenerationEvent:
    """One step of a generation, for the command line, benchmarks and servers.

    token: the id drawn in this step; None in a last event without a token.
    text: text that this step completed; may be empty while a character or a possible stop
        string is incomplete.
    prefill_s, decode_s: seconds from the start to the first token, and from there to now.
    finish_reason: None, or in the last event "stop", "length" or "cancelled".
    logits: ``[n_rows, n_vocab]`` F32, the rows computed since the previous event, if requested.
    n_reused: prompt tokens that an earlier request had computed.
    n_read: prompt tokens in the sequence, n_reused included; fewer than n_prompt if the prompt
        was cancelled. None: all.
    """

    token: int | None
    text: str
    n_prompt: int
    n_generated: int
    prefill_s: float
    decode_s: float
    finish_reason: str | None = None
    logits: npt.NDArray[np.float32] | None = None
    n_reused: int = 0
    n_read: int | None = None

    @property
    def n_computed(self) -> int:
        """Return how many prompt tokens were computed."""
        return (self.n_prompt if self.n_read is None else self.n_read) - self.n_reused

    @property
    def prefill_tps(self) -> float:
        """Return prompt tokens computed per second."""
        return self.n_computed / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Return decode steps per second; the first token belongs to the prefill."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s > 0 else 0.0
