"""Passes over the sequences of one model: what is checked before, and cleaned up after a failure.

Books are kept so that an interrupt at any point is made good. A sequence is marked as unfinished
before anything about it changes, and the mark goes when all is done. The next call empties the
sequences that are still marked, so a clean-up that was itself interrupted is only late.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .cputhreads import CpuThreads
from .errors import ContextOverflow, ModelFileError, MoegraphError, NativeError, RequestError
from .ggml.mapped import WatchedFiles
from .runner import Batch, Output, Runner
from .runner.base import NotFinite
from .runner.inspect import first_bad_place, node_values
from .sequence import CancelToken


def checked_ids(tokens: object, n_vocab: int) -> npt.NDArray[np.int32]:
    """Return token ids as I32 of the same numpy shape.

    Raises:
        RequestError: not integers, or an id is out of range.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError as error:  # rows of different lengths
        raise RequestError(f"token ids must be a list of integers: {error}") from error
    if ids.size == 0:
        return ids.astype(np.int32)
    is_large = ids.dtype.kind == "O" and all(isinstance(i, int) for i in ids.reshape(-1))
    if ids.dtype.kind not in "iu" and not is_large:
        got = {"f": "floats", "U": "text", "b": "booleans"}.get(ids.dtype.kind, "other values")
        raise RequestError(f"token ids must be integers, got {got}")
    if ids.min() < 0 or ids.max() >= n_vocab:
        at = int(np.flatnonzero((ids < 0) | (ids >= n_vocab))[0])
        raise RequestError(
            f"token id {ids.reshape(-1)[at]} at position {at} is out of range; "
            f"the vocabulary has ids 0 to {n_vocab - 1}"
        )
    return ids.astype(np.int32, copy=False)


class Passes:
    """Runs passes, one in flight at a time, and knows what every sequence holds."""

    def __init__(
        self, runner: Runner, files: WatchedFiles, n_ctx: int, threads: CpuThreads
    ) -> None:
        self._runner = runner
        self._threads = threads
        self._files = files
        self._n_ctx = n_ctx
        self._state = runner.model.state
        self._n_vocab = runner.model.hp.n_vocab
        self._held: list[list[int]] = [[] for _ in range(self._state.n_seq)]
        self._unfinished: set[int] = set()
        self._batch = (0, 1, 1)  # of the last pass: first sequence, how many, results of each

    def held(self, seq: int) -> list[int]:
        """Return the token ids that a sequence holds.

        Raises:
            RequestError: there is no such sequence.
        """
        self._require_seq(seq)
        return [] if seq in self._unfinished else self._held[seq]

    def reset(self, seq: int) -> None:
        """Forget a sequence, and the results of a pass in flight over it.

        Raises:
            RequestError: there is no such sequence.
        """
        self._require_seq(seq)
        self.abandon(seq)
        self._clean_up()

    def _require_seq(self, seq: int) -> None:
        if not 0 <= seq < len(self._held):
            raise RequestError(f"sequence {seq}; there are 0 to {len(self._held) - 1}")

    def abandon(self, *seqs: int) -> None:
        """Mark sequences as unfinished: the next call empties them. Any thread may do this."""
        self._unfinished.update(seqs)

    def _clean_up(self) -> None:
        """Empty the sequences that are marked as unfinished."""
        if not self._unfinished:
            return
        self._runner.device.synchronize()
        for seq in sorted(self._unfinished):
            self._runner.drop(seq)
            self._state.reset(seq)
            self._held[seq] = []
            self._unfinished.discard(seq)

    def submit(
        self, tokens: object, seq: int, all_rows: bool, greedy: bool, cancel: CancelToken | None
    ) -> None:
        """Start a pass without waiting.

        tokens: numpy shape [n_tokens], or [n_seqs, n_tokens] for neighbouring sequences from seq.

        When it fails or is cancelled, its sequences are empty afterwards.

        Raises:
            RequestError: ids or rows are wrong, or a pass is in flight.
            ContextOverflow: no room left.
        """
        self._clean_up()
        self._runner.require_idle()
        rows = self._checked(tokens, seq)
        n_seqs, n_tokens = rows.shape
        self._batch = (seq, n_seqs, n_tokens if all_rows else 1)
        self.abandon(*range(seq, seq + n_seqs))  # until all books of the pass are kept
        try:
            batch = Batch(rows, seq, all_rows, greedy)
            n_built = self._runner.graphs.n_built
            self._threads.begin(rows.size)
            self._runner.submit(batch, cancel.is_set if cancel else bool)
            if self._runner.graphs.n_built == n_built:  # building a graph says nothing of threads
                self._threads.end()
            for i, row in enumerate(rows.tolist()):
                self._held[seq + i].extend(row)
        except BaseException:
            self._clean_up()  # states are somewhere between two positions
            self._files.check()  # of two reasons, the one that explains the other
            raise
        self._unfinished.difference_update(range(seq, seq + n_seqs))

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results.

        Raises:
            RequestError: no pass is in flight.
            NativeError: a result is not finite; names the first layer whose output is not.
            ModelFileError: the model file was cut short; nothing can be computed any more.
        """
        try:
            output = self._runner.collect()
            self._require_files()
            return output
        except NotFinite as error:
            self._require_files()
            first, _, n_rows = self._batch
            bad = first + error.row // n_rows
            n_held = len(self._held[bad])
            try:
                where = self._trace_fault(bad)
            finally:
                self._reset_batch()
            raise NativeError(f"{error} after {n_held} positions, {where}") from error

    def nodes(self, tokens: object, seq: int) -> dict[tuple[str, int], npt.NDArray[Any]]:
        """Run tokens as one pass and return every named node by (name, il); numpy shapes."""
        self._clean_up()
        self._runner.require_idle()
        rows = self._checked(tokens, seq)
        self.abandon(seq)
        try:
            self._threads.begin(rows.size)
            values = node_values(self._runner, Batch(rows, seq, all_rows=True))
            self._files.check()
            self._held[seq].extend(rows[0].tolist())
        except BaseException:
            self._clean_up()
            raise
        self._unfinished.discard(seq)
        return values

    def expect_position(self, seq: int, pos0: int) -> None:
        """Check where the next row of a sequence goes.

        Raises:
            RequestError: there is no such sequence, or it holds another number of positions.
        """
        self._require_seq(seq)
        self._clean_up()
        if pos0 != self._state.n_past[seq]:
            raise RequestError(
                f"sequence {seq} holds {self._state.n_past[seq]} positions, "
                f"the pass starts at {pos0}"
            )

    def _checked(self, tokens: object, seq: int) -> npt.NDArray[np.int32]:
        self._files.check()
        rows = np.ascontiguousarray(checked_ids(tokens, self._n_vocab))
        if rows.ndim < 2:
            rows = rows.reshape(1, -1)
        if rows.ndim > 2:
            raise RequestError(f"token ids have shape {rows.shape}; allowed: [n_seqs, n_tokens]")
        n_seqs, n_tokens = rows.shape
        n_seq, n_ubatch = self._state.n_seq, self._runner.n_ubatch
        if not 0 <= seq < seq + n_seqs <= n_seq:
            raise RequestError(f"sequences {seq} to {seq + n_seqs - 1}; there are 0 to {n_seq - 1}")
        if not 1 <= n_tokens <= n_ubatch:
            raise RequestError(f"{n_tokens} rows in a pass; allowed: 1 to {n_ubatch}")
        last = max(self._state.n_past[seq : seq + n_seqs]) + n_tokens
        if last > self._n_ctx:
            raise ContextOverflow(f"{last} positions, the context holds {self._n_ctx}; raise -c")
        return rows

    def _require_files(self) -> None:
        """Refuse a pass that read zeros in place of weights."""
        try:
            self._files.check()
        except ModelFileError:
            self._reset_batch()
            raise

    def _trace_fault(self, seq: int) -> str:
        """Compute a sequence again to say where it first went wrong."""
        try:
            place = first_bad_place(self._runner, self._held[seq], seq)
        except MoegraphError as error:
            return f"and the layer is not known ({error})"
        if place is None:
            return "but not when computed again; the device may be unstable"
        return f"first in {place}; the model file may be damaged"

    def _reset_batch(self) -> None:
        first, n_seqs, _ = self._batch
        self.abandon(*range(first, first + n_seqs))
        self._clean_up()
