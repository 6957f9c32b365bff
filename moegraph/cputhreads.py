"""The CPU threads of an engine: those that suit each pass, and what is measured about them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .config import EngineConfig
from .ggml.device import Device
from .runner import Batch, Runner
from .runner.base import NotFinite
from .threads import SLEEP, Threads, Tuner, usable_cpus, waiting, ways

# What measuring at load may take; the rest is measured with the first tokens of an answer.
_MEASURE_S = 1.0


class CpuThreads:
    """Sets the threads of each pass; does nothing where the device is not the CPU."""

    def __init__(self, device: Device, config: EngineConfig) -> None:
        self._device = device
        n_batch = config.n_threads_batch or device.n_threads
        self._batch = Threads(n_batch, waiting(n_batch) if config.poll is None else config.poll)
        choices = [Threads(device.n_threads, 0)]  # of a GPU: only experts on the CPU take them
        if device.is_cpu:
            choices = ways(device.n_threads, config.n_threads, config.poll)
        self._is_measured = len(choices) > 1
        self.tuner = Tuner(choices)
        self._started: float | None = None

    def begin(self, n_rows: int) -> None:
        """Have the device compute the next pass, of n_rows, with the threads that suit it."""
        self._started = None
        if self._device.is_cpu:
            self._device.use_threads(self.tuner.current if n_rows == 1 else self._batch)
            if n_rows == 1:
                self._started = time.perf_counter()

    def end(self) -> None:
        """Take note of the time since `begin`: the pass has been computed."""
        if self._started is not None:
            self.tuner.took(time.perf_counter() - self._started)

    def measure(self, runner: Runner) -> None:
        """Measure passes of one row, for not much longer than a second; leaves no trace of them.

        Where experts can be missing, the cache would learn from such passes: there, all is measured
        with the first tokens of an answer.
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
            pass  # the weights are damaged: the first request says where
        finally:
            runner.model.state.reset(0)

    def _run(self, runner: Runner, batch: Batch) -> None:
        runner.model.state.reset(0)
        runner.submit(batch)
        self.end()
        runner.collect()

    @property
    def warning(self) -> str:
        """What a user should know about the number of threads; usually nothing."""
        n, usable = self._device.n_threads, usable_cpus()
        if n <= usable:
            return ""
        return f"{n} threads take turns on {usable} usable CPUs; use -t {usable} or less"

    def tried(self) -> list[dict[str, Any]]:
        """Return what the last trial found: threads, poll, tokens a second; nothing if given."""
        return [
            {"n_threads": way.n, "poll": way.poll, "tokens_per_s": round(1 / took, 1)}
            for way, took in self.tuner.measured.items()
        ]

    def report(self) -> dict[str, Any]:
        """Return what is used now, for --json: threads and poll of a token, threads of prompts."""
        n, poll = self.tuner.current
        return {
            "n_threads": n,
            "n_threads_batch": self._batch.n,
            "poll": poll if self._device.is_cpu else None,
            "threads_chosen": "measured" if self._is_measured else "given",
        }
