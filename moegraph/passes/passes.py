"""Passes over the sequences of one model: checks before a pass, clean-up after a failed one.

An interrupt may come at any point. So a pass marks its sequences as unfinished before its first
graph is launched, and removes the mark when everything is recorded. The next call empties the
sequences that are still marked. If the clean-up is interrupted too, the call after it does that. A
pass that ended before its first graph has changed nothing: its sequences only give back pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled, InternalError, ModelFileError, MoegraphError, RequestError
from ..events import CancelToken
from ..ggml.mapped import WatchedFiles
from ..kinds import SHORT_PROMPT, Kind
from ..pictures import positions_saved
from ..resident.hostcopies import Snapshot, StatesCopy
from ..runner import AnyRunner, Batch, NotFinite, Output
from ..runner.batch import Callback, Once, Predicate
from ..runner.inspect import first_bad_place, node_values
from ..runner.staged import Pipeline
from ..runner.sweep import Sweep
from ..runner.sweep_batch import SweepBatch, SweptPrompt
from .checks import (
    Cancel,
    Room,
    Seqs,
    cancelled_of,
    checked_ids,
    checked_rows,
    require_seq,
    slots_of,
)
from .cputhreads import CpuThreads


def is_short(batch: SweepBatch, n_ubatch: int) -> bool:
    """Return whether a prompt is computed as one pass; otherwise a sweep computes it."""
    if batch.as_pass or batch.pictures:
        return batch.as_pass
    return len(batch.tokens) <= min(SHORT_PROMPT, n_ubatch) and not batch.cuts


class Prompts:
    """The prompts under way, which one sweep reads, if there are any, and what undoes them.

    A prompt is computed by steps, so that other sequences can be computed in between. Until its
    last step its sequence is what it was; a failed or cancelled prompt leaves it so.

    held: the token ids of every sequence; a finished prompt extends its list. sweep: reads the
    prompts; None without any. keep: called with every sweep that is cancelled, before it is undone.
    """

    def __init__(
        self, runner: AnyRunner, files: WatchedFiles, threads: CpuThreads, held: list[list[int]]
    ) -> None:
        self._runner, self._files, self._threads = runner, files, threads
        self._held = held
        self.sweep: Sweep | None = None
        self._is_stepping = False  # it failed, or was interrupted, unless a step is under way
        self.keep: Callable[[Sweep], None] | None = None

    def abandon(self) -> None:
        """Give up the prompts under way; the next call undoes them. Safe from any thread."""
        self._is_stepping = self.sweep is not None

    def require_read(self, *slots: int) -> None:
        """Check that the prompt of none of these sequences is under way."""
        found = self.sweep.slots.intersection(slots) if self.sweep else ()
        for slot in found:
            raise RequestError(f"the prompt of sequence {slot} is under way; finish it first")

    def clean_up(self, slots: set[int]) -> None:
        """Undo the prompts if a step failed, or if a sequence of theirs is one of slots."""
        sweep = self.sweep
        if sweep and (self._is_stepping or not sweep.slots.isdisjoint(slots)):
            for slot in sweep.slots:
                self._runner.drop(slot)
            sweep.cancel()
            if not sweep.is_undone:  # it had ended, and an interrupt came before that was noted
                self._note_ended(sweep)
                for prompt in sweep.prompts:
                    prompt.close(True)  # nobody else will
            self.sweep, self._is_stepping = None, False

    def _note_ended(self, sweep: Sweep) -> None:
        """Note what the sequences of a sweep that has ended hold; a second call changes nothing."""
        for prompt in sweep.prompts:
            if prompt.output and prompt.is_kept:
                held = self._held[prompt.slot]
                held[prompt.n_past :] = prompt.batch.tokens.tolist()
                if prompt.batch.pictures:
                    self._runner.sequences.saved[prompt.slot] = positions_saved(held)

    def leave(self, sweep: Sweep, slot: int) -> bool:
        """Note that nobody wants a prompt of several; return whether that undid them all.

        Its sequence is what it was once the sweep has ended.
        """
        for prompt in sweep.prompts:
            prompt.has_left = prompt.has_left or prompt.slot == slot
        if sweep is self.sweep and all(prompt.has_left for prompt in sweep.prompts):
            self.clean_up({slot})
        return not sweep.is_open

    def begin(self, batches: Sequence[SweepBatch], runs: bool = False) -> Sweep:
        """Begin prompts that one sweep reads; the caller has checked its arguments.

        runs: `run` follows at once; if it does not come to that, the prompt is undone.
        """
        if self.sweep:
            slot = self.sweep.prompts[0].slot
            raise RequestError(
                f"the prompt of sequence {slot} is under way; finish or cancel it first"
            )
        for batch in batches:
            self._runner.drop(batch.slot)  # verified rows cannot be committed after these
        sweep = self._runner.sweep(*batches)
        self.sweep, self._is_stepping = sweep, True
        try:
            sweep.begin()
        except BaseException:
            self.clean_up(set())
            raise
        self._is_stepping = runs
        return sweep

    def step(self, sweep: Sweep, cancel: CancelToken | None) -> bool:
        """Enqueue the next step; return whether there are more.

        An error undoes the prompt, now or, after an interrupt, later.
        """
        if sweep is not self.sweep:
            raise RequestError("the prompt has been computed or cancelled; begin another one")
        self._is_stepping = True
        try:
            self._runner.give_up()
            self._threads.begin(sum(len(prompt.batch.tokens) for prompt in sweep.prompts))
            more = sweep.step(cancel.is_set if cancel else bool)
            if not more:
                self._end(sweep)
        except NotFinite as error:
            self.clean_up(set())
            self._files.check()
            raise self._located(error, sweep.prompts[0]) from error
        except BaseException as error:
            if isinstance(error, Cancelled):
                self._files.check()
                if self.keep:
                    self.keep(sweep)
            self.clean_up(set())
            self._files.check()  # a file that was cut short explains the failure: raise that
            raise
        self._is_stepping = False
        return more

    def run(
        self, sweep: Sweep, cancel: CancelToken | None, after_step: Callable[[], None]
    ) -> Output:
        """Enqueue all steps and return the results; errors as in `step`, from after_step too."""
        try:
            while self.step(sweep, cancel):
                after_step()
        except BaseException:
            self.abandon()
            self.clean_up(set())
            raise
        if sweep.prompts[0].output is None:
            raise InternalError("the results of a prompt were asked for before its last step")
        return sweep.prompts[0].output

    def _end(self, sweep: Sweep) -> None:
        """Note that the last step has been done."""
        self._files.check()
        self._note_ended(sweep)
        for prompt in sweep.prompts:
            if prompt.error and not prompt.has_left:
                prompt.error = self._located(prompt.error, prompt)
        self.sweep = None

    def _located(self, error: NotFinite, prompt: SweptPrompt) -> NotFinite:
        """Return an error that names the layer, as far as the sequence may be computed again."""
        tokens, slot, name = prompt.batch.tokens, prompt.slot, self._runner.device.name
        n_held, n = len(self._held[slot]), len(tokens)
        where = f"in one of the last {n}"
        if not n_held:
            where = where_not_finite(self._runner, tokens.tolist(), slot)
            self._runner.sequences.reset(slot)
        message = (
            f"{name} computed logits that are not finite after {n_held + n} positions, {where}"
        )
        return NotFinite(message, error.sequences, error.output)


def where_not_finite(runner: AnyRunner, tokens: list[int], slot: int) -> str:
    """Compute a sequence again; return a phrase that says where values stop being finite."""
    if min(tokens) < 0:
        return "in a prompt with pictures"
    try:
        place = first_bad_place(runner, tokens, slot)
    except MoegraphError as error:
        return f"in an unknown layer ({error})"
    if place is None:
        return "but not when computed again; the device may be unstable"
    return f"first in {place}; the model file may be damaged"


_never = bool  # called without an argument, it returns False: the pass is not cancelled


class Passes:
    """Runs passes, one in flight at a time, and records what sequences hold.

    room: what fits. prompts: those that are under way.
    """

    def __init__(
        self, runner: AnyRunner, files: WatchedFiles, n_ctx: int, threads: CpuThreads
    ) -> None:
        self.runner = runner
        self._threads = threads
        self._files = files
        self.room = Room(runner, n_ctx)
        self._state = runner.sequences
        self._n_vocab = runner.hp.n_vocab
        self.n_seq = self._state.n_seq
        self._held: list[list[int]] = [[] for _ in range(self.n_seq)]
        self._unfinished: set[int] = set()
        self._to_truncate: set[int] = set()  # after a pass that has failed but changed no sequence
        self._is_lost = False  # nobody will collect the pass in flight
        self._batch: Batch | None = None  # the last pass
        self.prompts = Prompts(runner, files, threads, self._held)
        self._before: dict[int, Snapshot] = {}  # sequences that a failed pass does not empty

    def held(self, seq: int) -> list[int]:
        """Return the token ids that a sequence holds."""
        require_seq(seq, self.n_seq)
        return [] if seq in self._unfinished else self._held[seq]

    def reset(self, seq: int) -> None:
        """Empty a sequence; others, and their results of a pass in flight, stay as they are."""
        require_seq(seq, self.n_seq)
        self._forget_before(seq)
        self.abandon(seq)
        self.clean_up()

    def _forget_before(self, seq: int) -> None:
        if seq in self._before:
            self._before.pop(seq).close()

    def abandon(self, *seqs: int) -> None:
        """Mark sequences as unfinished; the next call empties them. Safe from any thread."""
        self._unfinished.update(seqs)

    def clean_up(self) -> None:
        """Empty the sequences that are marked as unfinished."""
        if self._is_lost:
            self.runner.give_up()
            self._is_lost = False
        if self.prompts.sweep:
            self.prompts.clean_up(self._unfinished)
        if not self._unfinished and not self._to_truncate:
            return
        for seq in sorted(self._to_truncate | self._unfinished):
            self.runner.drop(seq)
            before = self._before.get(seq)
            if seq not in self._unfinished:
                self._state.truncate(seq, self._state.n_past[seq])
            elif before and before.is_valid:
                self._state.restore(before)
                del self._held[seq][before.n_past :]
            else:
                self._state.reset(seq)
                self._held[seq] = []
            self._unfinished.discard(seq)
            self._to_truncate.discard(seq)
            self._forget_before(seq)

    def submit(
        self, tokens: object, seq: Seqs, all_rows: bool, greedy: bool, cancel: Cancel,
        kind: Kind | None = None, draws: npt.NDArray[np.int32] | None = None,
    ) -> None:  # fmt: skip
        """Start a pass without waiting for its results.

        tokens: numpy shape [n_seq_tokens], or [n_seqs, n_seq_tokens]. seq: the sequence of each
        row of tokens, or the first of consecutive ones. kind: None for DECODE if each sequence has
        one row, else PREFILL. draws: the results are candidates instead of logits; what
        `RowSampler.draw` returns, numpy shape [n_out, DRAW_WORDS].

        A pass is cancelled once all its sequences are. Until then it runs to its end, for all of
        them; `reset` ends one sequence, also in flight. An error or a cancellation before the first
        graph is launched changes no sequence. After a later one the sequences of the pass are
        emptied, because some layers may have advanced and others not.
        """
        rows, slots = self._given(self.runner, tokens, seq)
        kind = kind or (Kind.DECODE if rows.shape[1] == 1 else Kind.PREFILL)
        batch = Batch(rows, slots, kind, all_rows, greedy, draws=draws)
        self.room.require_pass(batch)
        self.launch(batch, None, cancelled_of(cancel, len(slots)))

    @contextmanager
    def _recording(self, batch: Batch) -> Iterator[Callable[[], object]]:
        """Have sequences hold the rows of a pass that is submitted meanwhile; undo a failure.

        Yields what is to be called before its first graph is launched.
        """
        slots = batch.slots
        self._to_truncate.update(slots)  # until everything is recorded
        try:
            self._batch = batch
            self._threads.begin(batch.tokens.size)
            # a verify pass changes no sequence, and `bool` does nothing; in other passes, sequences
            # are marked until everything is recorded
            yield bool if batch.tree else partial(self._unfinished.update, slots)
            taken = () if batch.tree else batch.tokens.tolist()  # verified rows come with `commit`
            for slot, row in zip(slots, taken):
                self._held[slot].extend(row)
        except BaseException:
            self.clean_up()
            self._files.check()  # a file that was cut short explains the failure: raise that
            raise
        self._to_truncate.clear()
        self._unfinished.difference_update(slots)

    def launch(
        self, batch: Batch, meanwhile: Callback | None, cancelled: Predicate = _never
    ) -> None:
        """Start a pass whose rows the caller knows to fit, without waiting for its results.

        meanwhile: called once while the device computes; with missing experts this call returns
        shortly before the results are there. It must not use the device, and errors in it are
        errors of the pass. Failures are as in `submit`; only pages may be lacking.
        """
        self.clean_up()
        once = Once(meanwhile) if meanwhile else None
        with self._recording(batch) as begins:
            self.runner.submit(batch, cancelled, begins, once)
        if once:
            once()

    def begin_prompts(self, batches: Sequence[SweepBatch], runs: bool = False) -> Sweep:
        """Begin prompts of different sequences, which one sweep reads; `step_prompt` computes them.

        Passes over other sequences may run between steps. A step that fails or is cancelled undoes
        the prompts. `Prompts.leave` gives up one of several, and if its results are not finite, the
        error is in `Sweep.prompts` at the end. runs: all steps follow at once, or all is undone.
        """
        self.clean_up()
        self.runner.require_idle()
        self._files.check()
        for batch in batches:
            require_seq(batch.slot, self.n_seq)
            ids = np.maximum(batch.tokens, 0) if batch.pictures else batch.tokens
            if not checked_ids(ids, self._n_vocab).size:
                raise RequestError("the prompt is empty; give it at least one token")
        self.room.require({batch.slot: batch.tokens.size for batch in batches})
        return self.prompts.begin(batches, runs)

    def step_prompt(self, sweep: Sweep, cancel: CancelToken | None = None) -> bool:
        """Enqueue the next step of a prompt; return whether there are more."""
        self.clean_up()
        self.runner.require_idle()
        return self.prompts.step(sweep, cancel)

    def read(
        self,
        batch: SweepBatch,
        cancel: CancelToken | None,
        progress: Callable[[int], None] = lambda n_rows: None,
    ) -> tuple[Output, list[StatesCopy]]:
        """Compute a prompt of any length and wait; errors as in `begin_prompts` and `submit`.

        Returns its results, and the states at the cuts, which the caller closes. progress:
        called with how many rows the work that is enqueued amounts to.
        """
        n, seq = len(batch.tokens), batch.slot
        if not is_short(batch, self.runner.n_ubatch):
            sweep = self.begin_prompts([batch], True)
            output = self.prompts.run(
                sweep, cancel, lambda: progress(n * sweep.n_done // sweep.n_steps)
            )
            progress(n)
            return output, sweep.prompts[0].saved
        self.clean_up()
        self.runner.require_idle()
        require_seq(seq, self.n_seq)
        self.room.require({seq: n})
        self._forget_before(seq)
        if self._held[seq]:  # it becomes again what it is if the pass fails
            self._before[seq] = self._state.snapshot(seq)
        tokens, kind = batch.tokens[None, :], Kind.PREFILL
        self.submit(tokens, seq, batch.all_rows, batch.greedy, cancel, kind, batch.draws)
        try:
            output = self.collect()
        except (NotFinite, ModelFileError):
            raise  # the sequence is what it was already
        except BaseException:
            self._is_lost = True
            self.abandon(seq)
            self.clean_up()
            raise
        self._forget_before(seq)
        progress(n)
        return output, []

    def verify(
        self,
        tokens: object,
        seq: Seqs,
        parents: npt.ArrayLike | None = None,
        lengths: Sequence[int] | None = None,
        greedy: bool = True,
        cancel: Cancel = None,
        draws: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Start a pass over trees of drafted rows; `collect` returns results of all rows.

        It changes no sequence, whatever happens; `commit` takes rows of it. tokens, parents,
        lengths: as in `Batch.verify`; others: as in `submit`, but greedy wins over draws.
        """
        rows, slots = self._given(self.runner, tokens, seq)
        batch = Batch.verify(rows, slots, parents, lengths, greedy, draws)
        self.room.require_pass(batch)
        self.launch(batch, None, cancelled_of(cancel, len(slots)))

    def commit(self, paths: Mapping[int, list[int]]) -> None:
        """Have sequences take rows of the last verify pass, as if they had been submitted.

        paths: by sequence, rows of its tree from a root on, each the child of the one before; none
        changes nothing. One call for all sequences is one launch; if that fails, those that it
        would have changed are emptied.
        """
        self.clean_up()
        changed = [seq for seq, path in paths.items() if path]
        try:
            tokens = self.runner.commit(paths, partial(self._unfinished.update, changed))
            for seq, row in tokens.items():
                self._held[seq].extend(row)
        except BaseException:
            self.clean_up()
            raise
        self._unfinished.difference_update(changed)

    def replace(self, seq: int, ids: list[int], change: Callable[[], None]) -> None:
        """Have a sequence hold other ids, as `change` makes its state; no other one waits."""
        self.abandon(seq)
        self.prompts.clean_up({seq})
        self.runner.drop(seq)
        change()
        self._held[seq] = ids
        self._state.saved[seq] = positions_saved(ids)
        self._unfinished.discard(seq)

    def run(
        self, tokens: object, seq: Seqs, all_rows: bool, greedy: bool, cancel: Cancel
    ) -> Output:
        """Do `submit` and `collect`. An interrupt leaves no pass in flight.

        If it comes after the rows were submitted, the sequences may hold them.
        """
        self.clean_up()
        self.runner.require_idle()
        try:
            self.submit(tokens, seq, all_rows, greedy, cancel)
            return self.collect()
        except MoegraphError:
            raise  # there is no pass in flight
        except BaseException:
            self._is_lost = True
            self.clean_up()
            raise

    def collect(self, locates: bool = True, of: Callable[[], Output] | None = None) -> Output:
        """Wait for the pass in flight and return its results.

        locates: compute a sequence whose results are not finite again, to name the layer; then
        `Runner.logits` has nothing of the others. of: returns the results, if not the runner does.
        """
        try:
            output = of() if of else self.runner.collect()
        except NotFinite as error:
            self._require_files()
            bad = error.sequences[0]
            which = f" of sequence {bad}" if self.n_seq > 1 else ""
            n_held = len(self._held[bad])
            if self._batch and self._batch.tree:
                self._to_truncate.update(error.sequences)  # what they hold is good
            else:
                self.abandon(*error.sequences)
            try:
                where = "in a pass of several sequences"
                if self._to_truncate or bad in self._before:
                    where = "in a drafted row"
                elif locates:
                    where = where_not_finite(self.runner, self._held[bad], bad)
            finally:
                self.clean_up()
            raise NotFinite(
                f"{self.runner.device.name} computed logits{which} that are not finite after "
                f"{n_held} positions, {where}",
                error.sequences,
                error.output,
            ) from error
        self._require_files()
        return output

    def _require_files(self) -> None:
        """Empty the sequences of a pass that read zeros, because the model file was cut short."""
        try:
            self._files.check()
        except ModelFileError:
            if self._batch is not None:
                self.abandon(*self._batch.slots)
            self.clean_up()
            raise

    def nodes(self, tokens: object, seq: int) -> dict[tuple[str, int], npt.NDArray[Any]]:
        """Run tokens as one pass; return named nodes by (name, il), as `node_values`."""
        rows, slots = self._given(self.runner, tokens, seq)
        batch = Batch(rows, slots, Kind.PREFILL, all_rows=True)
        self.room.require_pass(batch)
        with self._recording(batch) as begins:
            begins()
            for slot in slots:
                self.runner.drop(slot)  # verified rows cannot be committed after these
            values = node_values(self.runner, batch)
            self._files.check()
        return values

    def _given(
        self, runner: AnyRunner | Pipeline, tokens: object, seq: Seqs
    ) -> tuple[npt.NDArray[np.int32], tuple[int, ...]]:
        """Return checked token ids, I32 numpy [n_seqs, n_seq_tokens], and their sequences.

        runner: of the pass, which must be idle.
        """
        self.clean_up()
        runner.require_idle()
        self._files.check()
        rows = checked_rows(tokens, self._n_vocab, self.runner.n_ubatch)
        slots = slots_of(seq, len(rows), self.n_seq)
        self.prompts.require_read(*slots)
        return rows, slots
