"""Prompts: rows that are computed layer by layer, or as one pass if they are few.

A prompt is computed by steps, so that other sequences can be computed in between. Until its last
step its sequence is what it was before; a failed or cancelled prompt leaves it so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import Cancelled, InternalError, MoegraphError, RequestError
from ..events import CancelToken
from ..ggml.mapped import WatchedFiles
from ..kinds import SHORT_PROMPT
from ..pictures import positions_saved
from ..runner import AnyRunner, NotFinite, Output
from ..runner.inspect import first_bad_place
from ..runner.sweep import Sweep
from ..runner.sweep_batch import SweepBatch, SweptPrompt
from .cputhreads import CpuThreads


def is_short(batch: SweepBatch, n_ubatch: int) -> bool:
    """Return whether a prompt is computed as one pass; otherwise a sweep computes it."""
    if batch.as_pass or batch.pictures:
        return batch.as_pass
    return len(batch.tokens) <= min(SHORT_PROMPT, n_ubatch) and not batch.cuts


class Prompts:
    """The prompts under way, which one sweep reads, if there are any, and what undoes them.

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
