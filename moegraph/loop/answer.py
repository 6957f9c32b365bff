"""The answer to one request of a service: what was drawn, and what its caller was told."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..errors import MoegraphError
from ..events import CancelToken
from ..passes.sequencecopies import SwappedSequence
from ..runner.sweep import Sweep
from ..runner.sweep_batch import SweepBatch, SweptPrompt
from .drawing import Drawing
from .logprobs import token_logprobs
from .requests import Request, Step, Usage

Ids = npt.NDArray[np.int32]

# Seconds between two steps that only say how much of the prompt is read.
_PROGRESS_S = 0.25


class Answer:
    """A request from its submission to its last step. Only the engine's thread changes it.

    ids: the prompt. slot: the sequence that computes it; -1 without. number: counts requests that
    have had a slot, from 1 on; 0 before. sweep: of its prompt, perhaps together with others, while
    that is under way; swept: its part of that; rest: what comes after it, or, without one, is read
    in pieces; marks: where beginnings of the prompt are to be kept. swapped: its sequence, while
    that is in host memory.
    n_cached, n_read: as in `Usage`.
    n_rest: how much of the prompt is left to compute, as far as is known; None: not known.
    late: a row that was computed before the grammar knew what may follow it: its logits F32
    [n_vocab], and which row of the tree it was.
    may_draft: whether the next step may draft. is_over: its last step was delivered. problem: why
    its caller could not be told of a step.
    """

    def __init__(
        self, request: Request, ids: Ids, drawing: Drawing, deliver: Callable[[Step], None]
    ) -> None:
        self.request = request
        self.ids = ids
        self.drawing = drawing
        self.sequence = drawing.sequence
        self.cancel = CancelToken()
        self.slot, self.number = -1, 0
        self.sweep: Sweep | None = None
        self.swept: SweptPrompt | None = None
        self.rest: SweepBatch | None = None
        self.marks: list[int] = []
        self.swapped: SwappedSequence | None = None
        self.n_cached = self.n_read = 0
        self.n_drafted = self.n_accepted = 0
        self.n_rest: int | None = None
        self.late: tuple[npt.NDArray[np.float32], int] | None = None
        self.may_draft = True
        self.is_over = False
        self.problem: Exception | None = None
        self.submitted = self._told = time.perf_counter()
        self.began = self._first = self._last = 0.0
        self._deliver = deliver
        self._fresh: list[tuple[int, npt.NDArray[np.float32] | None]] = []

    @property
    def deadline(self) -> float | None:
        """Return the time of the performance counter when the request ends; None: never."""
        seconds = self.request.deadline_s
        return None if seconds is None else self.submitted + seconds

    @property
    def is_late(self) -> bool:
        """Whether its deadline is over."""
        return self.deadline is not None and time.perf_counter() >= self.deadline

    @property
    def is_drawn(self) -> bool:
        """Whether the last token was drawn."""
        return self.sequence.finish_reason is not None

    @property
    def wants_logits(self) -> bool:
        """Whether the logits of each row are needed besides the token."""
        return self.request.n_logprobs is not None

    def begin(self, n_cached: int) -> None:
        """Note that the prompt begins in a slot that holds its first n_cached tokens."""
        self.n_cached = self.n_read = n_cached
        self.began = time.perf_counter()

    def drew(self, token: int, logits: npt.NDArray[np.float32] | None = None) -> None:
        """Note a token; `tell` delivers it. logits: F32 [n_vocab], if they are wanted."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._fresh.append((token, logits))

    def usage(self) -> Usage:
        """Return what the request has cost so far."""
        now = time.perf_counter()
        began, first = self.began or now, self._first or now
        return Usage(
            len(self.ids),
            self.n_read,
            self.n_cached,
            self.sequence.n_generated,
            self.n_drafted,
            self.n_accepted,
            queued_s=began - self.submitted,
            prefill_s=first - began,
            decode_s=max(0.0, self._last - first),
        )

    def tell(self) -> None:
        """Deliver the tokens that were drawn; the last step if these end the text."""
        reason = self.sequence.finish_reason
        if self.is_over or not (self._fresh or reason):
            return
        self.is_over = reason is not None
        self._send(self._step(reason))

    def tell_progress(self) -> None:
        """Deliver a step that says how much of the prompt is read, now and then."""
        now = time.perf_counter()
        if now - self._told >= _PROGRESS_S and not self.is_over:
            self._send(Step(self.usage()))

    def end(self, reason: str, error: MoegraphError | None = None) -> None:
        """Deliver the last step, unless that was done or the text has ended by itself."""
        if self.is_over:
            return
        if self.is_drawn:
            self.tell()
            return
        self.is_over = True
        self._send(self._step(reason, error))

    def _step(self, reason: str | None, error: MoegraphError | None = None) -> Step:
        fresh, self._fresh = self._fresh, []
        text = "".join([self.sequence.tell() for _ in fresh])
        if reason is not None and not self.is_drawn:
            text += self.sequence.cancel(reason)
        n_top, found = self.request.n_logprobs, []
        if n_top is not None:
            found = [token_logprobs(row, t, n_top) for t, row in fresh if row is not None]
        stop = self.sequence.stop if reason == "stop" else None
        tokens = tuple(token for token, _ in fresh)
        return Step(self.usage(), tokens, text, tuple(found), reason, stop, error)

    def _send(self, step: Step) -> None:
        self._told = time.perf_counter()
        try:
            self._deliver(step)
        except Exception as error:  # noqa: BLE001 - one caller's mistake ends its own request
            self.problem = error
