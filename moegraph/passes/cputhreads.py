"""Chooses the CPU threads of each pass of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import EngineConfig
from ..cpuload import LOAD
from ..ggml.device import Device
from ..threads import SLEEP, Threads, usable_cpus, waiting

# Rows of a pass that waits for its threads nearly as often, for the work in it, as one of one row.
_FEW_ROWS = 8


class CpuThreads:
    """Sets the threads of each pass; does nothing if no device is the CPU.

    one, many: of a pass of one row and of one of more, while enough cores are free. current: of
    the last pass of one row.
    """

    def __init__(self, devices: Sequence[Device], config: EngineConfig) -> None:
        self._cpus = [device for device in devices if device.can.cpu_threads]
        n = (self._cpus or devices)[0].n_threads  # with a GPU: for CPU experts
        n_batch = config.n_threads_batch or n
        given = config.poll if self._cpus else 0
        self.one = Threads(n, waiting(n) if given is None else given)
        self.many = Threads(n_batch, waiting(n_batch) if given is None else given)
        self.current = self.one
        self._may_sleep = config.poll is None
        # rows of passes that fewer threads may compute
        self._n_few = _FEW_ROWS if config.n_threads_batch is None else 1
        self._n_few = self._n_few if config.n_threads is None else 0

    def begin(self, n_rows: int) -> None:
        """Set the threads for the next pass, of n_rows rows.

        Threads that share a core with another program are waited for whenever they meet, for its
        time slices. So few rows are left to as many threads as cores are free, and many rows, or
        threads whose number is given, sleep while they wait.
        """
        if not self._cpus:
            return
        threads = self.one if n_rows == 1 else self.many
        free = LOAD.free() if self._may_sleep else None
        if free is not None and threads.n > free:
            is_few = n_rows <= self._n_few
            threads = threads._replace(n=free) if is_few else threads._replace(poll=SLEEP)
        if n_rows == 1:
            self.current = threads
        for device in self._cpus:
            device.use_threads(threads)

    @property
    def warning(self) -> str:
        """One line if there are more threads than usable CPUs; otherwise empty."""
        n, usable = self.one.n, usable_cpus()
        if n <= usable:
            return ""
        return f"{n} threads take turns on {usable} usable CPUs; use -t {usable} or less"

    def report(self) -> dict[str, Any]:
        """Return what --json shows: threads and poll in decode, prompt threads, CPUs taken."""
        (n, poll), taken = self.current, LOAD.taken()
        return {
            "n_threads": n,
            "n_threads_batch": self.many.n,
            "poll": poll if self._cpus else None,
            "cpus_taken": None if taken is None else round(taken, 1),
        }
