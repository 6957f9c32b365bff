"""One graph a layer where experts may be missing, fewer elsewhere, and Python beside it.

Protocol of a layer that may lack experts:

    compute: A(l) | B(l) .............................. | C(l), E(l), D(l) if needed | A(l+1)
    beside B:  ids, in memory of the host
    host:      sees them, fetches what is missing, then enqueues what follows

A ends at the router's choice, B is the expert FFN; they are built apart and launched as one. B
finds its slots in the graph, through the table on the device, so it does not wait for the host. In
between, a small kernel beside B writes the ids into host memory, which the host watches: it has
the whole of B to look at them.

Where experts are in pinned memory, the graph of a single row fetches what is missing by itself
(misses.py), and such a layer counts as having all of them. Elsewhere an expert that is not on the
device has slot -1, and B leaves it out; misses.py says how it is added by graphs C and E, before
A(l+1) is enqueued. On CUDA, B ends with the layer's output and they add to it. On the CPU, where
results have to be bit-equal whatever is resident, they only produce single experts' rows, and D
sums them in routing order.

Behind a layer that has all its experts there is nothing to wait for: several layers are one graph,
of which the last may lack experts, and the host looks at those that lack none one graph late. Every
layer has host memory of its own for its ids.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled
from ..experts.bank import Bank
from ..experts.cache import ExpertCache
from ..experts.policy import Lru
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..graphs.cache import BuiltGraph
from ..graphs.inputs import PassShape
from ..graphs.layer import Model
from ..state import KV_PAD
from .base import Output, Runner
from .choices import Awaited, Choices
from .misses import ADMIT_ROWS, Manner, MissHandler
from .pieces import Pieces
from .replay import Replay

# Plans kept: decode at two KV lengths and a few prompt chunks. Each refers to all graphs of a pass.
_MAX_PLANS = 8
# Layers at most in one graph: how soon the device begins, and how soon a prompt is cancelled. Few
# rows take no time worth cancelling, and a graph boundary takes some 5 us on CUDA.
MERGED, MERGED_LATER = 4, 64


@dataclass(frozen=True)
class _Segment:
    """Consecutive layers in one graph.

    ids: where the host finds the choice of each: (il, I32 [n_rows * n_expert_used]). fetching: the
    layers that fetch by themselves; lacking: the last layer, if it may lack experts; guess: where a
    guess about it arrives, I32 [n_expert_used]; c: the graphs that add what it lacks, each C and E
    by the name that `MissHandler.resolve` knows; d: D.
    """

    graph: BuiltGraph
    ids: list[tuple[int, Awaited]]
    fetching: frozenset[int] = frozenset()
    lacking: int | None = None
    guess: Awaited | None = None
    c: dict[str, BuiltGraph] = field(default_factory=dict)
    d: BuiltGraph | None = None


@dataclass(frozen=True)
class _Plan:
    """All launches of one pass: the layers', then the head's."""

    segments: list[_Segment]
    head: BuiltGraph
    generation: int


class LayeredRunner(Runner):
    """Runs a pass as several graphs and sees each router's choice while its experts run.

    cache: which expert is where, and how often each was chosen.
    misses: fetches what is not on the device; None when everything is.
    replay: recorded routing for single-row passes, or None.
    phases: host seconds so far: launching graphs, waiting for the router's ids, and looking at them
        (fetching and computing what is missing included).
    observers: called with (il, ids I32 [n_rows * n_expert_used]) for every layer of every pass.
    """

    mode = "layered"

    def __init__(
        self,
        device: Device,
        model: Model,
        n_ubatch: int,
        misses: MissHandler | None = None,
        replay: Replay | None = None,
    ) -> None:
        super().__init__(device, model, n_ubatch)
        hp, max_rows = model.hp, n_ubatch * model.state.n_seq
        self.misses = misses
        self.replay = replay
        self.cache = (
            misses.cache
            if misses
            else ExpertCache(hp.n_expert, model.banks.n_slots, Lru(), hp.n_expert_used)
        )
        self.phases = dict.fromkeys(("launch", "wait", "look"), 0.0)
        self.observers: list[Callable[[int, npt.NDArray[np.int32]], None]] = []
        # nodes of an A and of a B, C or D, at most
        self._n_nodes_a, self._n_nodes_b = 160, 48 + 3 * hp.n_expert_used
        self._sums_last = device.is_cpu and misses is not None
        self._choices = Choices(device, hp.n_layer, hp.n_expert_used, max_rows)
        self._pieces = Pieces(
            device,
            model,
            self._inputs,
            replay,
            max_rows,
            self._sums_last,
            self._choices,
            misses,
        )
        self._plans: OrderedDict[tuple[PassShape, bool, Manner], _Plan] = OrderedDict()
        self._fetched: set[int] = set()  # layers under way whose landings the cache does not know

    @property
    def compute_bytes(self) -> int:
        """Device bytes for inputs, intermediates and what passes between graphs."""
        return super().compute_bytes + self._pieces.carried.buffer.size

    def _plan(self, shape: PassShape, greedy: bool) -> _Plan:
        """Return the launches of a pass; no graph moved while the others were built."""
        manner = self.misses.manner if self.misses and shape.n_rows == 1 else Manner()
        self._pieces.manner = manner
        key = (shape, greedy, manner)
        plan = self._plans.get(key)
        if plan and plan.generation != self.graphs.generation:
            self._plans.clear()  # the others are as old
        while plan is None or plan.generation != self.graphs.generation:
            generation = self.graphs.generation
            plan = self._plans[key] = _Plan(
                self._segments(shape), self._head(shape, greedy), generation
            )
        self._plans.move_to_end(key)
        while len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _segments(self, shape: PassShape) -> list[_Segment]:
        """Return the graphs of a pass's layers in order, each built at first use."""
        segments: list[_Segment] = []
        il, n_layer = 0, self.model.hp.n_layer
        while il < n_layer:
            end = il + 1
            n_merged = MERGED if il == 0 or shape.n_rows > ADMIT_ROWS else MERGED_LATER
            while end < min(il + n_merged, n_layer):
                if self._pieces.may_lack(end - 1, shape.n_rows):
                    break
                end += 1
            segments.append(self._segment(shape, range(il, end)))
            il = end
        return segments

    def _segment(self, shape: PassShape, layers: range) -> _Segment:
        """Return the graph of these layers, with what completes the last one if that lacks any."""
        get, pieces, size, n_rows = self.graphs.get, self._pieces, self._n_nodes_b, shape.n_rows
        # DeltaNet layers do not see the KV length, so one graph serves for ever
        blind = all(self.model.hp.is_recurrent(il) for il in layers)
        seen = replace(shape, n_out=0, n_kv=KV_PAD if blind else shape.n_kv)
        foresees = any(pieces.is_foreseen(il + 1, n_rows) for il in layers)
        fetching = frozenset(il for il in layers if pieces.fetches(il, n_rows))
        graph = get(
            ("layers", layers, seen, foresees, fetching),
            len(layers) * (self._n_nodes_a + size),
            lambda b: pieces.layers(b, seen, layers),
        )
        ids = [(il, self._choices.of(il, n_rows)) for il in layers]
        il = layers[-1]
        if not pieces.may_lack(il, n_rows):
            return _Segment(graph, ids, fetching)
        c = {
            name: get(("C", il, name, n_rows), size, lambda b, k=bank: pieces.c(b, n_rows, il, k))
            for name, bank in self._banks_for_misses(il, n_rows).items()
        }
        if self.misses and self.misses.cold and n_rows <= ADMIT_ROWS:
            c["cpu"] = get(("E", il, n_rows), 16, lambda b: pieces.e(b, n_rows, il))
        d = None
        if self._sums_last:
            d = get(("D", il, n_rows), size, lambda b: pieces.d(b, n_rows, il))
        guess = self._choices.guess_of(il) if pieces.is_foreseen(il, n_rows) else None
        return _Segment(graph, ids, fetching, il, guess, c, d)

    def _head(self, shape: PassShape, greedy: bool) -> BuiltGraph:
        return self.graphs.get(
            ("head", shape.n_rows, shape.n_out, greedy),
            64,
            lambda b: self._pieces.head(b, shape, greedy),
        )

    def _banks_for_misses(self, il: int, n_rows: int) -> dict[str, Bank]:
        banks = self.model.banks
        found = {f"spare{turn}": banks.spare(il, turn) for turn in range(2)}
        if n_rows <= ADMIT_ROWS and banks.n_slots[il]:
            found["own"] = banks.layer(il)
        return found

    def reserve(self) -> None:
        """Build the largest pass, so that lack of memory shows at start and nothing moves later."""
        state = self.model.state
        self._plan(PassShape(self.n_ubatch, state.n_seq, 0, state.n_ctx, state.n_seq), True)

    def _prepare(self, shape: PassShape, greedy: bool) -> None:
        self._current = self._plan(shape, greedy)

    def _launch(self, shape: PassShape, greedy: bool, cancelled: Callable[[], bool]) -> None:
        try:
            self._launch_all(shape, greedy, cancelled)
        except BaseException:
            self.device.synchronize()
            if self.misses:
                self.misses.lose(self._fetched)
            self._fetched.clear()
            self._choices.forget(self.n_ubatch * self.model.state.n_seq)
            raise

    def _launch_all(self, shape: PassShape, greedy: bool, cancelled: Callable[[], bool]) -> None:
        start = time.perf_counter()
        if self.misses:
            self.misses.begin_step(shape.n_rows)
        else:
            self.cache.begin_step()
        unseen = None
        for segment in self._current.segments:
            if cancelled():
                raise Cancelled("cancelled")
            self._fetched |= segment.fetching
            status = C.mg_launch(self.device.compute.ptr, segment.graph.graph, ffi.NULL, 0)
            if status:
                names = ", ".join(str(il) for il, _ in segment.ids)
                self.device.check(status, f"layer {names}")
            start = self._note("launch", start)
            if unseen:
                start = self._look(unseen, shape.n_rows, start)
            unseen = segment
            if segment.lacking is not None:
                start = self._look(segment, shape.n_rows, start)
                unseen = None
        head = self._current.head
        reads = self._result_reads(shape, head.outputs, greedy)
        status = C.mg_launch(self.device.compute.ptr, head.graph, reads, 2)
        self.device.check(status, "the output head")
        start = self._note("launch", start)
        if unseen:
            self._look(unseen, shape.n_rows, start)
        # what the next pass needs, while the device computes the head
        self._choices.forget(shape.n_rows)
        if self.replay and shape.n_rows == 1:
            self.replay.advance()
        if self.misses:
            self.misses.end_launch()

    def collect(self) -> Output:
        """Wait for the pass and return its results; see `Runner.collect`."""
        if self.misses:
            self.misses.clock.back()
        output = super().collect()
        if self.misses:
            self.misses.end_step()
        return output

    def _note(self, phase: str, start: float) -> float:
        """Add the time since start to a phase; return now."""
        now = time.perf_counter()
        self.phases[phase] += now - start
        return now

    def _look(self, segment: _Segment, n_rows: int, start: float) -> float:
        """Read what a segment's layers chose, and have what the last one lacks computed."""
        for il, awaited in segment.ids:
            if il == segment.lacking and segment.guess is not None:
                self._choices.wait(segment.guess)
                start = self._note("wait", start)
                self.misses.foresee(il, segment.guess.ids.tolist())
                start = self._note("look", start)
            self._choices.wait(awaited)
            start = self._note("wait", start)
            ids = awaited.ids
            if n_rows <= ADMIT_ROWS:
                chosen = ids.tolist()
                missing = self.cache.look(il, chosen)
            else:
                missing = self.cache.look_batch(il, ids)
            if il in segment.fetching:
                self.misses.land(il, missing, chosen)
                self._fetched.discard(il)
            if il == segment.lacking:
                self._complete(segment, missing, ids, n_rows)
            for observer in self.observers:
                observer(il, ids)
            start = self._note("look", start)
        return start

    def _complete(
        self, segment: _Segment, missing: list[int], ids: npt.NDArray[np.int32], n_rows: int
    ) -> None:
        """Add the missing experts to what B left."""
        il = segment.lacking
        if missing and self.misses:
            self.misses.resolve(il, missing, ids, n_rows, segment.c)
        if segment.d:
            status = C.mg_launch(self.device.compute.ptr, segment.d.graph, ffi.NULL, 0)
            if status:
                self.device.check(status, f"layer {il}")

    def close(self) -> None:
        """Free graphs and fixed memory."""
        self._plans.clear()
        self._current = None
        super().close()
        for part in (self.misses, self.replay):
            if part:
                part.close()
        self._pieces.close()
        self._choices.close()
