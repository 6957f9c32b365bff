"""Chooses the CPU threads of each pass of an engine by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..cpuload import LOAD
from ..events import Progress
from ..ggml.device import Device
from ..runner import AnyRunner, Batch, NotFinite
from ..threads import SLEEP, Threads, Tuner, usable_cpus, waiting, ways

# Time limit of measuring at load; the first tokens of an answer are measured for the rest.
_MEASURE_S = 1.0
# After so many seconds without a token, the load may be another one.
_GAP_S = 1.0
# Rows of a pass that waits for its threads nearly as often, for the work in it, as one of one row.
_FEW_ROWS = 8


class CpuThreads:
    """Sets the threads of each pass; does nothing if no device is the CPU."""

    def __init__(self, devices: Sequence[Device], config: EngineConfig) -> None:
        self._cpus = [device for device in devices if device.can.cpu_threads]
        device = self._device = (self._cpus or devices)[0]
        n_batch = config.n_threads_batch or device.n_threads
        self._batch = Threads(n_batch, waiting(n_batch) if config.poll is None else config.poll)
        self._may_sleep = config.poll is None
        self._may_be_fewer = self._may_sleep and config.n_threads_batch is None
        choices = [Threads(device.n_threads, 0)]  # with a GPU: for CPU experts
        if device.can.cpu_threads:
            choices = ways(device.n_threads, config.n_threads, config.poll)
        self._is_measured = len(choices) > 1
        self.tuner = Tuner(choices, LOAD.free)
        self._started: float | None = None
        self._ended = math.inf  # time of the last token

    def begin(self, n_rows: int) -> None:
        """Set the threads for the next pass, of n_rows rows."""
        self._started = None
        if not self._device.can.cpu_threads:
            return
        if n_rows > 1:
            self._use(self._for_rows(n_rows))
            return
        if self._is_measured:
            if time.perf_counter() - self._ended > _GAP_S:
                self.tuner.resume()
            self._started = time.perf_counter()
        self._use(self.tuner.current)

    def _use(self, threads: Threads) -> None:
        for device in self._cpus:
            device.use_threads(threads)

    def _for_rows(self, n_rows: int) -> Threads:
        """Return the batch threads; while they would share a core with another program, they sleep.

        Few rows then have the threads of a single one: to wake sleepers at each node takes longer
        than what these compute.
        """
        free = LOAD.free() if self._may_sleep else None
        if free is None or self._batch.n <= free:
            return self._batch
        if n_rows <= _FEW_ROWS and self._may_be_fewer:
            return self.tuner.current
        return self._batch._replace(poll=SLEEP)

    def end(self) -> None:
        """Record the time since `begin`; call it when the pass has been computed."""
        if self._started is not None:
            self._ended = time.perf_counter()
            self.tuner.took(self._ended - self._started)

    def measure(self, runner: AnyRunner, progress: Progress | None) -> None:
        """Measure one-row passes for about a second, then reset sequence 0.

        The first pass also reads its part of a large file that is not in memory: seconds.

        Does nothing where experts may be missing, because the cache would learn from these passes.
        There the first tokens of an answer are measured.
        """
        if not self._is_measured or runner.mode != "whole":
            return
        report = progress or (lambda stage, done, total: None)
        report("threads", 0, 1)
        batch = Batch(np.zeros((1, 1), dtype=np.int32), greedy=True)
        end = time.perf_counter() + _MEASURE_S
        try:
            # builds the graph; threads that sleep are never slow by much, other programs or not
            self._use(Threads(self._device.n_threads, SLEEP))
            self._run(runner, batch)
            while not self.tuner.is_settled and time.perf_counter() < end:
                self.begin(1)
                self._run(runner, batch)
        except NotFinite:
            pass  # the weights are damaged: the first request will say where
        finally:
            report("threads", 1, 1)
            runner.sequences.reset(0)

    def _run(self, runner: AnyRunner, batch: Batch) -> None:
        runner.sequences.reset(0)
        runner.submit(batch)
        self.end()
        runner.collect()

    @property
    def warning(self) -> str:
        """One line if there are more threads than usable CPUs; otherwise empty."""
        n, usable = self._device.n_threads, usable_cpus()
        if n <= usable:
            return ""
        return f"{n} threads take turns on {usable} usable CPUs; use -t {usable} or less"

    def tried(self) -> list[dict[str, Any]]:
        """Return the results of the last trial: threads, poll, tokens/s; empty without a trial."""
        return [
            {"n_threads": way.n, "poll": way.poll, "tokens_per_s": round(1 / took, 1)}
            for way, took in self.tuner.measured.items()
        ]

    def report(self) -> dict[str, Any]:
        """Return what --json shows: threads and poll in decode, prompt threads, CPUs taken."""
        (n, poll), taken = self.tuner.current, LOAD.taken()
        return {
            "n_threads": n,
            "n_threads_batch": self._batch.n,
            "poll": poll if self._device.can.cpu_threads else None,
            "threads_chosen": "measured" if self._is_measured else "given",
            "cpus_taken": None if taken is None else round(taken, 1),
        }
