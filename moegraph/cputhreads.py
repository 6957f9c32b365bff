"""Chooses the CPU threads of each pass of an engine by measurement."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .config import EngineConfig
from .ggml.device import Device
from .runner import Batch, NotFinite, Runner
from .threads import SLEEP, Threads, Tuner, usable_cpus, waiting, ways

# Time limit of measuring at load; the first tokens of an answer are measured for the rest.
_MEASURE_S = 1.0


class CpuThreads:
    """Sets the threads of each pass; does nothing if the device is not the CPU."""

    def __init__(self, device: Device, config: EngineConfig) -> None:
        self._device = device
        n_batch = config.n_threads_batch or device.n_threads
        self._batch = Threads(n_batch, waiting(n_batch) if config.poll is None else config.poll)
        choices = [Threads(device.n_threads, 0)]  # with a GPU: for CPU experts
        if device.is_cpu:
            choices = ways(device.n_threads, config.n_threads, config.poll)
        self._is_measured = len(choices) > 1
        self.tuner = Tuner(choices)
        self._started: float | None = None

    def begin(self, n_rows: int) -> None:
        """Set the threads for the next pass, of n_rows rows."""
        self._started = None
        if self._device.is_cpu:
            self._device.use_threads(self.tuner.current if n_rows == 1 else self._batch)
            if n_rows == 1:
                self._started = time.perf_counter()

    def end(self) -> None:
        """Record the time since `begin`; call it when the pass has been computed."""
        if self._started is not None:
            self.tuner.took(time.perf_counter() - self._started)

    def measure(self, runner: Runner) -> None:
        """Measure one-row passes for about a second, then reset sequence 0.

        Does nothing where experts may be missing, because the cache would learn from these passes.
        There the first tokens of an answer are measured.
        """
        if not self._is_measured or runner.mode != "whole":
            return
        batch = Batch(np.zeros((1, 1), dtype=np.int32), greedy=True)
        end = time.perf_counter() + _MEASURE_S
        try:
            # builds the graph; threads that sleep are never slow by much, other programs or not
            self._device.use_threads(Threads(self._device.n_threads, SLEEP))
            self._run(runner, batch)
            while not self.tuner.is_settled and time.perf_counter() < end:
                self.begin(1)
                self._run(runner, batch)
        except NotFinite:
            pass  # the weights are damaged: the first request will say where
        finally:
            runner.model.state.reset(0)

    def _run(self, runner: Runner, batch: Batch) -> None:
        runner.model.state.reset(0)
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
        """Return the settings in use, for --json: threads and poll in decode, prompt threads."""
        n, poll = self.tuner.current
        return {
            "n_threads": n,
            "n_threads_batch": self._batch.n,
            "poll": poll if self._device.is_cpu else None,
            "threads_chosen": "measured" if self._is_measured else "given",
        }
