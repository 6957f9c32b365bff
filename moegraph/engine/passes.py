"""Passes over the sequences of one model: checks before a pass, clean-up after a failed one.

An interrupt may come at any point. So a pass marks its sequences as unfinished before its first
graph is launched, and removes the mark when everything is recorded. The next call empties the
sequences that are still marked. If the clean-up is interrupted too, the call after it does that. A
pass that ended before its first graph has changed nothing: its sequences only give back pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ContextOverflow, ModelFileError, MoegraphError, RequestError
from ..events import CancelToken
from ..ggml.mapped import WatchedFiles
from ..kinds import Kind
from ..resident.hostcopies import RowsCopy, StatesCopy
from ..resident.snapshots import Snapshot
from ..runner import Batch, NotFinite, Output, Runner
from ..runner.inspect import first_bad_place, node_values
from .cputhreads import CpuThreads

# A sequence for each row of token ids, or the first of consecutive sequences.
Seqs = int | Sequence[int]
# One token for all sequences of a pass, or one for each of them; None cancels nothing.
Cancel = CancelToken | list[CancelToken | None] | tuple[CancelToken | None, ...] | None


def checked_ids(tokens: object, n_vocab: int) -> npt.NDArray[np.int32]:
    """Return token ids as I32, in the same numpy shape.

    Raises:
        RequestError: tokens are not integers, or an id is outside the vocabulary.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.size == 1:
        one: npt.NDArray[np.int32] = tokens  # one row of decode: the device waits for it
        if 0 <= one.item() < n_vocab:
            return one
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


def _is_cancelled(cancel: Cancel, batch: Batch) -> Callable[[], bool]:
    """Return whether all sequences of a pass are cancelled, as a function.

    Raises:
        RequestError: there is not one token for each sequence.
    """
    if cancel is None:
        return bool
    if not isinstance(cancel, (list, tuple)):
        return cancel.is_set
    n_seqs, tokens = len(batch.slots), [token for token in cancel if token is not None]
    if len(cancel) != n_seqs:
        raise RequestError(f"{len(cancel)} cancel tokens for {n_seqs} sequences")
    return (lambda: all(token.is_set() for token in tokens)) if len(tokens) == n_seqs else bool


class Passes:
    """Runs passes, one in flight at a time, and records the tokens of every sequence."""

    def __init__(
        self, runner: Runner, files: WatchedFiles, n_ctx: int, threads: CpuThreads
    ) -> None:
        self._runner = runner
        self._threads = threads
        self._files = files
        self._n_ctx = n_ctx
        self._state = runner.stage.state
        self._n_vocab = runner.stage.hp.n_vocab
        self._held: list[list[int]] = [[] for _ in range(self._state.n_seq)]
        self._unfinished: set[int] = set()
        self._to_truncate: set[int] = set()  # after a pass that has failed but changed no sequence
        self._is_lost = False  # nobody will collect the pass in flight
        self._batch: Batch | None = None  # the last pass

    def held(self, seq: int) -> list[int]:
        """Return the token ids that a sequence holds.

        Raises:
            RequestError: there is no such sequence.
        """
        self._require_seq(seq)
        return [] if seq in self._unfinished else self._held[seq]

    def reset(self, seq: int) -> None:
        """Empty a sequence; others, and their results of a pass in flight, stay as they are.

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
        if self._is_lost:
            self._runner.give_up()
            self._is_lost = False
        if not self._unfinished and not self._to_truncate:
            return
        for seq in sorted(self._to_truncate - self._unfinished):
            self._state.truncate(seq, self._state.n_past[seq])
            self._runner.drop(seq)
        self._to_truncate.clear()
        for seq in sorted(self._unfinished):
            self._runner.drop(seq)
            self._state.reset(seq)
            self._held[seq] = []
            self._unfinished.discard(seq)

    def submit(
        self,
        tokens: object,
        seq: Seqs,
        all_rows: bool,
        greedy: bool,
        cancel: Cancel,
        kind: Kind | None = None,
        draws: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Start a pass without waiting.

        tokens: numpy shape [n_seq_tokens], or [n_seqs, n_seq_tokens]. seq: the sequence of each
        row of tokens, or the first of consecutive ones. kind: None for DECODE if each sequence has
        one row, else PREFILL. draws: the results are candidates instead of logits; what
        `RowSampler.draw` returns, numpy shape [n_out, DRAW_WORDS].

        A pass is cancelled once all its sequences are. Until then it runs to its end, for all of
        them; `reset` ends one sequence, also in flight. An error or a cancellation before the first
        graph is launched changes no sequence. After a later one the sequences of the pass are
        emptied, because some layers may have advanced and others not.

        Raises:
            RequestError: wrong ids, shape or sequences, too many rows, or a pass is in flight.
            ContextOverflow: the rows do not fit into the context.
            Cancelled: all sequences were cancelled while the pass was launched.
        """
        self._clean_up()
        self._runner.require_idle()
        rows = self._rows(tokens)
        kind = kind or (Kind.DECODE if rows.shape[1] == 1 else Kind.PREFILL)
        slots = self._slots(seq, rows)
        batch = self._checked(Batch(rows, slots, kind, all_rows, greedy, draws=draws))
        cancelled = _is_cancelled(cancel, batch)
        self._to_truncate.update(batch.slots)  # until everything is recorded
        try:
            self._run(batch, cancelled)
            for slot, row in zip(batch.slots, rows.tolist()):
                self._held[slot].extend(row)
        except BaseException:
            self._clean_up()
            self._files.check()  # a file that was cut short explains the failure: raise that
            raise
        self._to_truncate.clear()
        self._unfinished.difference_update(batch.slots)

    def build_next(self, seq: int, greedy: bool, draws: npt.NDArray[np.int32] | None) -> None:
        """Build the graphs for the next row of a sequence while the device computes its prompt.

        Without streams there is no such time, so this does nothing. Arguments as in `submit`.
        """
        if self._runner.device.can.streams:
            row = np.zeros((1, 1), dtype=np.int32)
            self._runner.build_ahead(Batch(row, (seq,), greedy=greedy, draws=draws))

    def verify(
        self,
        tokens: object,
        seq: Seqs,
        parents: npt.ArrayLike | None = None,
        lengths: Sequence[int] | None = None,
        greedy: bool = True,
        cancel: Cancel = None,
    ) -> None:
        """Start a pass over trees of drafted rows; `collect` returns results of all rows.

        It changes no sequence, whatever happens; `commit` takes rows of it. tokens, parents,
        lengths: as in `Batch.verify`; seq, cancel: as in `submit`.

        Raises:
            RequestError: as in `submit`, or the lengths do not fit the tokens.
            InternalError: a parent is neither an earlier row nor -1, or a tree has too many rows.
            ContextOverflow: the rows do not fit into the context.
            Cancelled: all sequences were cancelled while the pass was launched.
        """
        self._clean_up()
        self._runner.require_idle()
        rows = self._rows(tokens)
        batch = Batch.verify(rows, self._slots(seq, rows), parents, lengths, greedy)
        self._checked(batch)
        cancelled = _is_cancelled(cancel, batch)
        self._to_truncate.update(batch.slots)  # until the pass is launched
        try:
            self._run(batch, cancelled)
        except BaseException:
            self._clean_up()
            self._files.check()
            raise
        self._to_truncate.clear()

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Have sequences take rows of the last verify pass, as if they had been submitted.

        paths: by sequence, rows of its tree from a root on, each the child of the one before; none
        changes nothing. One call for all sequences is one launch; if that fails, those that it
        would have changed are emptied.

        Raises:
            RequestError: a pass is in flight, or some rows are not such a path; nothing changes.
        """
        for seq in paths:
            self._require_seq(seq)
        self._clean_up()
        wanted = {seq: list(path) for seq, path in paths.items()}
        changed = [seq for seq, path in wanted.items() if path]
        try:
            tokens = self._runner.commit(wanted, lambda: self.abandon(*changed))
            for seq, row in tokens.items():
                self._held[seq].extend(row)
        except BaseException:
            self._clean_up()
            raise
        self._unfinished.difference_update(changed)

    def snapshot(self, seq: int) -> Snapshot:
        """Return a snapshot of a sequence, to `restore`; close it when it is not needed.

        Raises:
            RequestError: there is no such sequence.
            OutOfDeviceMemory: there is no memory for it.
        """
        self._require_seq(seq)
        self._clean_up()
        return self._state.snapshot(seq)

    def restore(self, snapshot: Snapshot) -> None:
        """Have a sequence be again as it was when a snapshot was taken; no other one waits.

        Raises:
            RequestError: the snapshot is closed, or the sequence has lost positions that it had.
        """
        self._clean_up()
        slot = snapshot.slot
        snapshot.copy_of_states()  # an error here changes nothing
        self.abandon(slot)
        self._runner.drop(slot)
        self._state.restore(snapshot)
        del self._held[slot][snapshot.n_past :]
        self._unfinished.discard(slot)

    def put_back(
        self,
        seq: int,
        ids: Sequence[int],
        n_kept: int,
        rows: Sequence[tuple[int, RowsCopy]],
        states: StatesCopy,
    ) -> None:
        """Have a sequence hold ids, from copies in host memory; see `State.put_back`.

        Raises:
            RequestError: there is no such sequence, or a pass is in flight.
        """
        self._require_seq(seq)
        self._clean_up()
        self._runner.require_idle()
        self.abandon(seq)
        self._runner.drop(seq)
        self._state.put_back(seq, n_kept, rows, states)
        self._held[seq] = list(ids)
        self._unfinished.discard(seq)

    def _run(self, batch: Batch, cancelled: Callable[[], bool]) -> None:
        """Submit a pass to the runner, with the threads for it."""
        self._batch = batch
        n_built = self._runner.graphs.n_built
        self._threads.begin(batch.tokens.size)
        # a verify pass changes no sequence; the others are marked until everything is recorded
        begins: Callable[[], object] = (
            bool if batch.tree else partial(self._unfinished.update, batch.slots)
        )
        self._runner.submit(batch, cancelled, begins)
        if self._runner.graphs.n_built == n_built:  # building a graph says nothing of threads
            self._threads.end()

    def run(
        self, tokens: object, seq: Seqs, all_rows: bool, greedy: bool, cancel: Cancel
    ) -> Output:
        """Do `submit` and `collect`. An interrupt leaves no pass in flight.

        If it comes after the rows were submitted, the sequences may hold them.
        """
        self._clean_up()
        self._runner.require_idle()
        try:
            self.submit(tokens, seq, all_rows, greedy, cancel)
            return self.collect()
        except MoegraphError:
            raise  # there is no pass in flight
        except BaseException:
            self._is_lost = True
            self._clean_up()
            raise

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results.

        Raises:
            RequestError: no pass is in flight.
            NotFinite: results of some sequences are not finite; the message names the first such
                layer. Those sequences are emptied, or left as they were by a verify pass. The
                others keep what they hold, and their results are in the error's `output`.
            ModelFileError: the model file was cut short; the engine is unusable from then on.
        """
        try:
            output = self._runner.collect()
            self._require_files()
            return output
        except NotFinite as error:
            self._require_files()
            bad = error.sequences[0]
            of = f" of sequence {bad}" if self._state.n_seq > 1 else ""
            n_held = len(self._held[bad])
            if self._batch and self._batch.tree:
                self._to_truncate.update(error.sequences)  # what they hold is good
            else:
                self.abandon(*error.sequences)
            try:
                where = "in a drafted row" if self._to_truncate else self._trace_fault(bad)
            finally:
                self._clean_up()
            raise NotFinite(
                f"{self._runner.device.name} computed logits{of} that are not finite after "
                f"{n_held} positions, {where}",
                error.sequences,
                error.output,
            ) from error

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a row of the last pass; see `Runner.logits`."""
        return self._runner.logits(row)

    def nodes(self, tokens: object, seq: int) -> dict[tuple[str, int], npt.NDArray[Any]]:
        """Run tokens as one pass; return named nodes by (name, il), as `node_values`.

        Raises:
            RequestError, ContextOverflow: as in `submit`.
            ConfigError: not every expert is resident.
        """
        self._clean_up()
        self._runner.require_idle()
        rows = self._rows(tokens)
        batch = self._checked(Batch(rows, self._slots(seq, rows), Kind.PREFILL, all_rows=True))
        self.abandon(*batch.slots)
        for slot in batch.slots:
            self._runner.drop(slot)  # verified rows cannot be committed after these
        try:
            self._threads.begin(rows.size)
            values = node_values(self._runner, batch)
            self._files.check()
            for slot, row in zip(batch.slots, rows.tolist()):
                self._held[slot].extend(row)
        except BaseException:
            self._clean_up()
            raise
        self._unfinished.difference_update(batch.slots)
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

    def _rows(self, tokens: object) -> npt.NDArray[np.int32]:
        """Return checked token ids, I32 numpy [n_seqs, n_seq_tokens]."""
        self._files.check()
        rows = np.ascontiguousarray(checked_ids(tokens, self._n_vocab))
        if rows.ndim < 2:
            rows = rows.reshape(1, -1)
        if rows.ndim > 2:
            raise RequestError(f"token ids have shape {rows.shape}; allowed: [n_seqs, n_tokens]")
        n_tokens, n_ubatch = rows.shape[1], self._runner.n_ubatch
        if not 1 <= n_tokens <= n_ubatch:
            raise RequestError(f"{n_tokens} rows in a pass; allowed: 1 to {n_ubatch} (-ub)")
        return rows

    def _slots(self, seq: Seqs, rows: npt.NDArray[np.int32]) -> tuple[int, ...]:
        """Return the sequence of each row of token ids."""
        if not isinstance(seq, int):
            for slot in seq:
                self._require_seq(slot)
            return tuple(seq)
        last, n_seq = seq + len(rows) - 1, self._state.n_seq
        if not 0 <= seq <= last < n_seq:
            raise RequestError(
                f"the pass needs sequences {seq} to {last}; the engine has 0 to {n_seq - 1}"
            )
        return tuple(range(seq, last + 1))

    def _checked(self, batch: Batch) -> Batch:
        """Return a batch whose rows fit into the context.

        Raises:
            ContextOverflow: they do not.
        """
        for seq, slot in enumerate(batch.slots):
            last = self._state.n_past[slot] + batch.n_rows(seq)
            if last > self._n_ctx:
                raise ContextOverflow(
                    f"{last} positions, the context holds {self._n_ctx}; raise -c"
                )
        return batch

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
        if self._batch is not None:
            self.abandon(*self._batch.slots)
        self._clean_up()
