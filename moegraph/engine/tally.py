"""What a service has done, and how long its work took."""

from __future__ import annotations

import time
from collections import Counter

from .answer import Answer
from .costs import Costs
from .servicestatus import ServiceCounts


class Tally:
    """Counts requests and measures rounds.

    A round lasts from one moment when the device has no work to the next. It has some steps of a
    sweep, a decode pass, or both.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._ended = Counter[str]()
        self._sums = Counter[str]()
        self._prompt_s = self._decode_s = 0.0
        self._since, self._n_steps = time.perf_counter(), 0

    @property
    def counts(self) -> ServiceCounts:
        """The sums so far."""
        return ServiceCounts(
            dict(self._ended), prompt_s=self._prompt_s, decode_s=self._decode_s, **self._sums
        )

    def begin_round(self) -> None:
        """Note that the device has no work, and that the time until now does not count."""
        self._since, self._n_steps = time.perf_counter(), 0

    def stepped(self) -> None:
        """Note that a step of a sweep was enqueued."""
        self._n_steps += 1

    def end_round(self, n_rows: int = 0) -> None:
        """Note that the device has done all its work, a pass of n_rows rows last; 0: no pass."""
        now = time.perf_counter()
        seconds, n_steps = now - self._since, self._n_steps
        self.costs.note_round(n_steps, n_rows, seconds)
        pass_s = min(seconds, self.costs.pass_s(n_rows) or 0.0) if n_rows else 0.0
        prompt_s = seconds - pass_s if n_steps else 0.0
        self._prompt_s += prompt_s
        self._decode_s += seconds - prompt_s
        if n_rows:
            self._sums["passes"] += 1
            self._sums["pass_rows"] += n_rows
        self._since, self._n_steps = now, 0

    def end_short(self) -> None:
        """Note that the device has read a short prompt."""
        seconds = time.perf_counter() - self._since
        if not self._n_steps:
            self.costs.note_short(seconds)
        self._prompt_s += seconds
        self.begin_round()

    def ended(self, answer: Answer, reason: str) -> None:
        """Count a request that has ended."""
        usage = answer.usage()
        self._ended[reason] += 1
        self._sums.update(
            prompt_tokens=usage.n_read,
            cached_tokens=usage.n_cached,
            generated_tokens=usage.n_generated,
            drafted_tokens=usage.n_drafted,
            accepted_tokens=usage.n_accepted,
        )
        if reason in ("stop", "length"):
            self.costs.note_request(usage.prefill_s + usage.decode_s)

    def preempted(self) -> None:
        """Count a sequence that went to host memory for others."""
        self._sums["preempted"] += 1
