"""Passes over the sequences of one model: checks before a pass, clean-up after a failed one.

An interrupt may come at any point. So a pass first marks its sequences as unfinished and removes
the mark when everything is recorded. The next call empties the sequences that are still marked. If
the clean-up is interrupted too, the call after it does that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ContextOverflow, ModelFileError, MoegraphError, NativeError, RequestError
from ..events import CancelToken
from ..ggml.mapped import WatchedFiles
from ..runner import Batch, Output, Runner
from ..runner.base import NotFinite
from ..runner.inspect import first_bad_place, node_values
from .cputhreads import CpuThreads


def checked_ids(tokens: object, n_vocab: int) -> npt.NDArray[np.int32]:
    """Return token ids as I32, in the same numpy shape.

    Raises:
        RequestError: tokens are not integers, or an id is outside the vocabulary.
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
    """Runs passes, one in flight at a time, and records the tokens of every sequence."""

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
        self._batch = (0, 1, 1)  # last pass: first sequence, sequences, results of each

    def held(self, seq: int) -> list[int]:
        """Return the token ids that a sequence holds.

        Raises:
            RequestError: there is no such sequence.
        """
        self._require_seq(seq)
        return [] if seq in self._unfinished else self._held[seq]

    def reset(self, seq: int) -> None:
        """Empty a sequence and drop the results of a pass in flight that includes it.

        Raises:
            RequestError: there is no such sequence.
        """
        self._require_seq(seq)
        self.abandon(seq)
        self._clean_up()

    def _require_seq(self, seq: int) -> None:
        if not 0 <= seq < len(self._held):
            raise RequestError(
                f"there is no sequence {seq}; the engine has 0 to {len(self._held) - 1}"
            )

    def abandon(self, *seqs: int) -> None:
        """Mark sequences as unfinished; the next call empties them. Safe from any thread."""
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
        """Start a pass without waiting. If it fails or is cancelled, its sequences are emptied.

        tokens: numpy shape [n_seq_tokens], or [n_seqs, n_seq_tokens] for consecutive sequences from
        seq.

        Raises:
            RequestError: wrong ids, shape or sequences, too many rows, or a pass is in flight.
            ContextOverflow: the rows do not fit into the context.
            Cancelled: cancel was set while the pass was launched.
        """
        self._clean_up()
        self._runner.require_idle()
        rows = self._checked(tokens, seq)
        n_seqs, n_tokens = rows.shape
        self._batch = (seq, n_seqs, n_tokens if all_rows else 1)
        self.abandon(*range(seq, seq + n_seqs))  # until everything is recorded
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
            self._clean_up()  # some layers may have advanced and others not
            self._files.check()  # a file that was cut short explains the failure: raise that
            raise
        self._unfinished.difference_update(range(seq, seq + n_seqs))

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results.

        Raises:
            RequestError: no pass is in flight.
            NativeError: a result is not finite; the message names the first such layer.
            ModelFileError: the model file was cut short; the engine is unusable from then on.
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
        """Run tokens as one pass; return named nodes by (name, il), as `node_values`.

        Raises:
            RequestError, ContextOverflow: as in `submit`.
            ConfigError: not every expert is resident.
        """
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
        """Check that a sequence holds pos0 positions.

        Raises:
            RequestError: it holds another number, or there is no such sequence.
        """
        self._require_seq(seq)
        self._clean_up()
        if pos0 != self._state.n_past[seq]:
            raise RequestError(
                f"sequence {seq} holds {self._state.n_past[seq]} positions, "
                f"but the pass starts at {pos0}; reset the sequence or change pos0"
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
            raise RequestError(
                f"the pass needs sequences {seq} to {seq + n_seqs - 1}; "
                f"the engine has 0 to {n_seq - 1}"
            )
        if not 1 <= n_tokens <= n_ubatch:
            raise RequestError(f"{n_tokens} rows in a pass; allowed: 1 to {n_ubatch} (-ub)")
        last = max(self._state.n_past[seq : seq + n_seqs]) + n_tokens
        if last > self._n_ctx:
            raise ContextOverflow(f"{last} positions, the context holds {self._n_ctx}; raise -c")
        return rows

    def _require_files(self) -> None:
        """Empty the sequences of a pass that read zeros, because the model file was cut short."""
        try:
            self._files.check()
        except ModelFileError:
            self._reset_batch()
            raise

    def _trace_fault(self, seq: int) -> str:
        """Compute a sequence again; return a phrase that says where values stop being finite."""
        try:
            place = first_bad_place(self._runner, self._held[seq], seq)
        except MoegraphError as error:
            return f"in an unknown layer ({error})"
        if place is None:
            return "but not when computed again; the device may be unstable"
        return f"first in {place}; the model file may be damaged"

    def _reset_batch(self) -> None:
        first, n_seqs, _ = self._batch
        self.abandon(*range(first, first + n_seqs))
        self._clean_up()
