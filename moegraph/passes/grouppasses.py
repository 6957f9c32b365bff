"""Passes over a model in several stages: besides single ones, passes of several groups at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..ggml.mapped import WatchedFiles
from ..kinds import Kind
from ..runner import Batch, NotFinite, Output, StagedRunner
from .checks import Cancel, cancelled_of
from .cputhreads import CpuThreads
from .passes import Passes


class GroupPasses(Passes):
    """Runs passes, one in flight, or one of each of several groups of sequences.

    While groups are in flight, only their methods and `reset` may be called. most: how many passes
    may be in flight. pipeline: the passes, as the runner sees them.
    """

    def __init__(
        self, runner: StagedRunner, files: WatchedFiles, n_ctx: int, threads: CpuThreads
    ) -> None:
        super().__init__(runner, files, n_ctx, threads)
        self.pipeline = runner.pipeline
        self.most = len(runner.parts)
        self._groups: deque[Batch] = deque()  # in flight, the oldest first

    def submit_group(
        self, tokens: npt.NDArray[np.int32], seqs: Sequence[int], greedy: bool, cancel: Cancel,
        draws: npt.NDArray[np.int32] | None = None, keeps_logits: bool = False,
    ) -> None:  # fmt: skip
        """Start a pass of one row of each sequence, I32 numpy [n_seqs, 1], beside other groups.

        keeps_logits: see `Pipeline.submit`; the rest, and errors, are as in `submit`. An interrupt
        empties all sequences in flight.
        """
        rows, slots = self._given(self.pipeline, tokens, tuple(seqs))
        taken = {slot for batch in self._groups for slot in batch.slots}
        if not taken.isdisjoint(slots):
            raise RequestError("a sequence has a row in flight; collect its group first")
        batch = Batch(rows, slots, Kind.DECODE, False, greedy, draws=draws)
        self.room.require_pass(batch)
        try:
            cancelled = cancelled_of(cancel, len(slots))
            with self._recording(batch) as begins:
                self.pipeline.submit(batch, cancelled, begins, keeps_logits=keeps_logits)
        except Exception:
            raise
        except BaseException:
            self.give_up_groups()
            raise
        self._groups.append(batch)

    def collect_group(self) -> Output:
        """Wait for the oldest pass and return its results.

        After an error its sequences are emptied, and those of other groups stay as they are. An
        interrupt empties all sequences in flight.
        """
        if not self._groups:
            raise RequestError("no group is in flight; submit one first")
        self._batch = batch = self._groups.popleft()
        try:
            return self.collect(False, self.pipeline.collect)
        except NotFinite:
            raise
        except Exception:
            self.abandon(*batch.slots)
            self.clean_up()
            raise
        except BaseException:
            self.abandon(*batch.slots)
            self.give_up_groups()
            raise

    def give_up_groups(self) -> None:
        """Forget the passes in flight; their sequences are emptied."""
        for batch in self._groups:
            self.abandon(*batch.slots)
        self._groups.clear()
        self.runner.give_up()
        self.clean_up()
