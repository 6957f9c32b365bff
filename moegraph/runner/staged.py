"""Runs passes over a model in several stages: each in turn, with a copy of the rows between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PassShape
from ..errors import InternalError, RequestError
from .base import Runner, run_out
from .batch import Batch, Callback, Once, Predicate
from .boundary import Boundary, Relay
from .flights import Flights
from .results import Output
from .sweep import Sweep
from .sweep_batch import SweepBatch, Taps


class StagedRunner:
    """Runs passes over consecutive stages, one pass at a time; used like a `Runner`.

    A pass is enqueued on all devices before the host waits, unless a stage may lack experts. Every
    stage keeps its own graphs and experts; the sequences are one, and the last stage's passes and
    commits record what they hold. After an error in any stage no pass is in flight in any of them.

    parts: the runners of the stages, in order of layers. flights: passes of several groups at once,
    instead of one; they bring no taps. sequences, hp: of the whole model. device:
    of the last stage, which has the results. n_ubatch, max_rows: as of each part.
    """

    def __init__(self, parts: Sequence[Runner]) -> None:
        """Take the runners, which the caller closes later."""
        self.parts = tuple(parts)
        self._last = last = self.parts[-1]
        self.sequences, self.hp, self.device = last.sequences, last.hp, last.device
        self.n_ubatch, self.max_rows = last.n_ubatch, last.max_rows
        with ExitStack() as stack:
            own = stack.enter_context
            self._boundaries = [
                own(closing(Boundary(before.device, after.device)))
                for before, after in zip(self.parts, self.parts[1:])
            ]
            self._relays: dict[int, Relay] = {}  # of stages whose taps a drafter wants
            for i, part in enumerate(self.parts[:-1]):
                if not {*part.stage.layers}.isdisjoint(last.stage.taps.layers):
                    self._relays[i] = own(closing(Relay(part.stage, last.stage)))
            self._opened = stack.pop_all()
        n_bytes = 4 * self.hp.n_embd
        self._hand_over = partial(_hand_over, self.parts, self._boundaries, n_bytes)
        self.flights = Flights(self.parts, self._hand_over)

    @property
    def mode(self) -> str:
        """'whole' if every stage computes a pass as one graph, else 'layered'."""
        modes = {part.mode for part in self.parts}
        return modes.pop() if len(modes) == 1 else "layered"

    @property
    def n_built(self) -> int:
        """Return how many graphs were built."""
        return sum(part.n_built for part in self.parts)

    @property
    def compute_bytes(self) -> int:
        """Device bytes of inputs, intermediates and rows, on all devices."""
        return sum(part.compute_bytes for part in self.parts)

    @property
    def lines(self) -> list[str]:
        """Return how rows come from each stage to the next one, a line each."""
        return list(dict.fromkeys(boundary.line() for boundary in self._boundaries))

    def require_idle(self) -> None:
        """Check that no pass is in flight; see `Runner.require_idle`."""
        if not self.flights.is_empty:
            raise RequestError("passes of groups are in flight; collect their results first")
        self._last.require_idle()

    def is_paged(self, n_rows: int) -> bool:
        """Return whether passes of so many rows read K and V through pages in every stage."""
        return all(part.is_paged(n_rows) for part in self.parts)

    def shape_of(self, batch: Batch) -> PassShape:
        """Return the shape of a pass in the stage that reads most of the KV caches at once."""
        return max((part.shape_of(batch) for part in self.parts), key=lambda shape: shape.n_kv)

    def drop(self, slot: int) -> None:
        """Forget a sequence's verified rows, and its results in flight; see `Runner.drop`."""
        self.flights.drop(slot)
        for part in self.parts:
            part.drop(slot)

    def give_up(self) -> None:
        """Wait for all passes in flight, if there are any, and forget their results."""
        self.flights.give_up()
        for part in self.parts:
            part.give_up()

    def recover(self) -> None:
        """Undo what is left of a pass that failed; before a sweep goes on."""
        for part in self.parts:
            part.recover()

    def submit(
        self,
        batch: Batch,
        cancelled: Predicate = lambda: False,
        begins: Callback = lambda: None,
        meanwhile: Once | None = None,
    ) -> None:
        """Start a pass; see `Runner.submit`."""
        self.require_idle()
        try:
            shapes = []
            for part in self.parts:
                part.give_up()  # left there if the clean-up of an earlier pass was interrupted
                shapes.append(part.prepare(batch))
            for part, shape in zip(self.parts, shapes):  # before the host may wait for a stage
                part.fill(batch, shape)
            for i, (part, shape) in enumerate(zip(self.parts, shapes)):
                if i:
                    self.hand_over(i, batch.tokens.size)
                pauses, first = part.pauses(meanwhile), bool if i else begins
                run_out(part.launch(batch, shape, cancelled, first, pauses), meanwhile)
                if i in self._relays:
                    self._relays[i].bring(batch.tokens.size)
        except BaseException:
            for part in self.parts:
                part.give_up()
                part.recover()
            raise

    def hand_over(self, i: int, n_rows: int) -> None:
        """Enqueue the copy of a pass's rows to a stage from the one before."""
        self._hand_over(i, n_rows)

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results; see `Runner.collect`."""
        try:
            for part in self.parts:
                output = part.collect()
        except BaseException:
            self.give_up()
            raise
        return output

    def commit(
        self, paths: Mapping[int, list[int]], begins: Callback = lambda: None
    ) -> dict[int, list[int]]:
        """Enqueue the commit of verified rows in all stages; see `Runner.commit`."""
        tokens: dict[int, list[int]] = {}
        for i, part in enumerate(self.parts):
            tokens = part.commit(paths, (lambda: None) if i else begins)
        return tokens

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a row of the pass that was collected last; see `Runner.logits`."""
        return self._last.logits(row)

    def sweep(self, *batches: SweepBatch) -> Sweep:
        """Return a sweep over prompts; see `Runner.sweep`."""
        each = [part.sweeps for part in self.parts if part.sweeps]
        if len(each) < len(self.parts):
            raise InternalError("a stage has no memory for prompts")
        taps: list[Taps] = [{} for _ in self.parts]
        taps[-1] = {batch.slot: batch.taps for batch in batches}
        for i, relay in self._relays.items():
            mine = self.parts[i].stage.layers
            taps[i] = {
                slot: {il: relay.relayed(tap) for il, tap in found.items() if il in mine}
                for slot, found in taps[-1].items()
            }
        return Sweep(each, batches, self._boundaries, taps)

    def reserve_graphs(self, n_draft: int = 0) -> None:
        """Build the graphs of the largest passes; see `Runner.reserve_graphs`."""
        for i, part in enumerate(self.parts):
            part.reserve_graphs(n_draft)
            if i in self._relays and part.sweeps:
                self._relays[i].reserve(part.sweeps.memory.n_rows)

    def build_ahead(self, batch: Batch) -> None:
        """Build the graphs of a pass that will be submitted later, also while one is in flight."""
        for part in self.parts:
            part.build_ahead(batch)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Do `LayeredRunner.rehearsing` on each device."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.rehearsing())
            yield

    def close(self) -> None:
        """Wait for all devices, then free the copies' memory; the caller closes the parts."""
        self._opened.close()


def _hand_over(
    parts: Sequence[Runner], boundaries: Sequence[Boundary], row_bytes: int, i: int, n_rows: int
) -> None:
    source, to = parts[i - 1].hidden, parts[i].hidden
    if source is None or to is None:
        raise InternalError("a stage has no memory for the rows of another one")
    boundaries[i - 1].copy(source.all, to.all, row_bytes * n_rows)


AnyRunner = Runner | StagedRunner
