"""What a loop has done, and how long its work took."""

from __future__ import annotations

import time

from ..kinds import SweepStep
from ..runner import AnyRunner
from .answer import Answer
from .costs import Costs
from .status import ServiceCounts


class Tally:
    """Counts passes and measures rounds.

    A round lasts from one moment when the device has no work to the next. It has some steps of a
    sweep, a decode pass, or both. One that builds graphs is a poor measure of others.
    """

    def __init__(self, costs: Costs, runner: AnyRunner) -> None:
        """runner: says how many graphs were built."""
        self.costs, self._runner = costs, runner
        self._prompt_s = self._decode_s = 0.0
        self._n_passes = self._n_rows = self._n_preempted = 0
        self.begin_round()

    @property
    def counts(self) -> ServiceCounts:
        """The sums so far."""
        return ServiceCounts(
            prompt_s=self._prompt_s,
            decode_s=self._decode_s,
            passes=self._n_passes,
            pass_rows=self._n_rows,
            preempted=self._n_preempted,
        )

    def begin_round(self) -> None:
        """Note that the device has no work, and that the time until now does not count."""
        self._since, self._steps = time.perf_counter(), list[SweepStep]()
        self._built = self._runner.n_built

    def pause(self) -> None:
        """Note that the time until now does not count, unless steps are under way."""
        if not self._steps:
            self.begin_round()

    def stepped(self, step: SweepStep) -> None:
        """Note that a step of a sweep was enqueued."""
        self._steps.append(step)

    def end_round(self, n_rows: int = 0) -> float | None:
        """Note that the device has done all its work, a pass of n_rows rows last; 0: no pass.

        Return what the pass took in seconds; None: not known.
        """
        now, n_built, steps = time.perf_counter(), self._runner.n_built, self._steps
        seconds, has_built, prompt_s = now - self._since, n_built != self._built, 0.0
        if steps:
            self.costs.note_round(steps, n_rows, seconds, has_built)
            pass_s = min(seconds, self.costs.pass_s(n_rows) or 0.0) if n_rows else 0.0
            prompt_s = seconds - pass_s
            self._steps = []
        elif n_rows:
            self.costs.note_pass(n_rows, seconds, has_built)
        self._prompt_s += prompt_s
        self._decode_s += seconds - prompt_s
        if n_rows:
            self._n_passes += 1
            self._n_rows += n_rows
        self._since, self._built = now, n_built
        return None if steps or has_built else seconds

    def end_piece(self, n_rows: int) -> float:
        """Note that the device has read a piece of a prompt; return what it took in seconds."""
        seconds = time.perf_counter() - self._since
        if not self._steps:
            self.costs.note_piece(n_rows, seconds, self._built != self._runner.n_built)
        self._prompt_s += seconds
        self.begin_round()
        return seconds

    def ended(self, answer: Answer, reason: str) -> None:
        """Note what a request took that has ended."""
        if reason in ("stop", "length"):
            usage = answer.usage()
            self.costs.note_request(usage.prefill_s + usage.decode_s)

    def preempted(self) -> None:
        """Count a sequence that went to host memory for others."""
        self._n_preempted += 1
