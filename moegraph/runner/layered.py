"""Runs a pass as several graphs and handles missing experts between them.

A layer that may lack experts:

    compute:  mixer_router | moe ............ | add_uploaded, add_cpu, sum_rows if needed | next
    readback:                ids
    host:                        reads the ids, handles missing experts, enqueues what follows

`mixer_router` and `moe` are launched as one graph. The graph looks up its slots in a table on the
device, so it does not wait for the host. A small kernel that runs beside `moe` writes the ids into
host memory. The host watches that memory and has the whole of `moe` to act on the ids.

In a pass of up to 32 rows, a graph may fetch its missing experts (misses.py). Such a layer counts
as having all its experts, unless its slots may not suffice. A missing expert that is not fetched
has slot -1, and `moe` leaves it out. The graphs `add_uploaded` and `add_cpu` add it before the next
layer is enqueued. On CUDA they add to the layer's output. On the CPU device, and with
--deterministic, results must be bit-equal whatever is resident: then these graphs only make the
rows of single experts, and `sum_rows` sums them in routing order.

After a layer that has all its experts, nothing has to be added. So consecutive layers are merged
into one graph, in which only the last layer may lack experts. The host reads the ids of the others
one graph late. Each layer has host memory of its own for its ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PassShape
from ..errors import Cancelled, InternalError
from ..experts.cache import ExpertCache
from ..experts.cost import MissCosts, choose_ways
from ..experts.policy import Lru
from ..experts.residency import PassTerms, Residency
from ..ggml.lib import C, ffi
from ..graphs.head import Results
from ..graphs.inputs import HiddenRows
from ..kinds import Kind
from ..resident.stage import Stage
from .base import Runner
from .batch import Batch, Callback, Predicate
from .layer_graphs import LaunchPlan, LaunchPlans, LaunchStep, LayerGraphs, Replay
from .misses import MissHandler
from .results import Output
from .sweeps import Sweeps


class LayeredRunner(Runner):
    """Runs a pass as several graphs and reads each router's choice while the experts run.

    residency: decides about missing experts, and counts choices. cache: its slots.
    misses: carries out these decisions; None when all experts are resident.
    replay: recorded routing for one-row passes, or None.
    phases: total host seconds: launching graphs, waiting for ids, and resolving them (uploads of
        missing experts and their computation on the CPU included).
    plans: launch plans of the passes so far.
    observers: called with (il, ids I32 [rows * n_expert_used]) for every router in every pass;
        padding rows are left out.
    """

    mode = "layered"

    def __init__(
        self, stage: Stage, n_ubatch: int, misses: MissHandler | None,
        replay: Replay | None, n_sweep: int, ring_groups: int,
    ) -> None:  # fmt: skip
        """n_sweep: most rows of a prompt in one sweep. ring_groups: see `Sweeps`."""
        max_rows = stage.state.shape.pass_rows(n_ubatch)
        hidden = HiddenRows(stage, max_rows)
        super().__init__(stage, n_ubatch, hidden)
        self.misses, self.replay = self.own(misses), self.own(replay)
        hp, n_slots = stage.hp, stage.n_slots
        if misses:
            self.residency = misses.residency
        else:  # of full layers: it only counts choices
            ways = choose_ways("stream", MissCosts(), n_slots, hp.n_expert_used, hp.n_expert)
            cache = ExpertCache(hp.n_expert, n_slots, Lru(), hp.n_expert_used)
            self.residency = Residency(cache, ways)
        self.cache = self.residency.cache
        self.phases = dict.fromkeys(("launch", "wait", "resolve"), 0.0)
        self.observers: list[Callable[[int, npt.NDArray[np.int32]], None]] = []
        self._layer_graphs = self.own(
            LayerGraphs(stage, self._inputs, hidden, max_rows, replay, misses)
        )
        self._readback = self._layer_graphs.readback
        self.sweeps = self.own(Sweeps(
            stage, self.graphs, self.results, n_ubatch, n_sweep, hidden, self.residency,
            self._layer_graphs, self.observers, ring_groups,
        ))  # fmt: skip
        self.plans = LaunchPlans(stage, self.graphs, self._layer_graphs)
        # from `_prepare` to the end of `_launch`: if the pass fails, it must be rolled back
        self._is_unfinished, self._began = False, 0.0
        self._current: tuple[PassTerms, LaunchPlan] | None = None  # the pass that is launched next

    @property
    def compute_bytes(self) -> int:
        """Device bytes of inputs, intermediates and `CarryBuffers`."""
        return super().compute_bytes + self._layer_graphs.carry.n_bytes

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Leave the experts on the device, and what was counted of them, as they are before.

        For passes of several rows that are not of a text. The device is idle before and afterwards.
        """
        self.device.synchronize()
        real, phases, misses = self.residency, dict(self.phases), self.misses
        counts = (misses.uploads.n_bytes, misses.n_cpu_experts) if misses else (0, 0)
        self.residency = deepcopy(real)
        try:
            yield
        finally:
            self.give_up()
            self.device.synchronize()
            lost, self.residency = real.cache.lost_to(self.residency.cache), real
            if misses:
                for il, pairs in lost.items():
                    misses.uploads.fill(il, pairs)
                misses.uploads.n_bytes, misses.n_cpu_experts = counts
            self.phases.update(phases)

    def build(self, shape: PassShape, kind: Kind, results: Results) -> None:
        """Build the graphs of a pass."""
        mode = self.residency.miss_mode(kind, shape.n_tokens)
        self.plans.get(self.shapes.longest(shape), results, mode)

    def _prepare(self, shape: PassShape, batch: Batch) -> None:
        if self._is_unfinished:
            self._roll_back()
        self._is_unfinished = True
        try:
            start = self._began = time.perf_counter()
            terms = self.residency.begin_pass(batch.kind, shape.n_tokens)
            self._add_phase("launch", start)
            launches = self.plans.get(self.shapes.longest(shape), batch.results, terms.mode)
            launches.set_length(shape.n_kv)
            self._current = terms, launches
        except BaseException:
            self._roll_back()
            raise

    def _launch(
        self, shape: PassShape, cancelled: Predicate, begins: Callback, may_pause: Predicate | None
    ) -> Iterator[None]:
        try:
            yield from self._launch_all(shape, cancelled, begins, may_pause)
        except BaseException:
            self._roll_back()
            raise
        self._is_unfinished = False

    def give_up(self) -> None:
        """Forget the pass in flight; undo the last one, if it failed and that was interrupted."""
        super().give_up()
        if self._is_unfinished:
            self._roll_back()

    def _roll_back(self) -> None:
        """Undo a failed pass; safe to call again."""
        self.device.synchronize()
        self._current = None
        self.residency.rollback()
        self._readback.reset(self.max_rows)
        self._is_unfinished = False

    def _launch_all(
        self, shape: PassShape, cancelled: Predicate, begins: Callback, may_pause: Predicate | None
    ) -> Iterator[None]:
        start = time.perf_counter()
        if self._current is None:
            raise InternalError("a pass was launched before it was prepared")
        (terms, launches), self._current = self._current, None
        if self.misses:
            self.misses.begin_pass(terms)
        unread = None  # the last step, while the host has not read its ids
        for step in launches.steps:
            if cancelled():
                raise Cancelled("cancelled")
            if step is launches.steps[0]:
                begins()
            if step.fetch_layers:
                self.residency.begin_fetch(step.fetch_layers)
            status = C.mg_launch(self.device.compute.ptr, step.graph.graph, ffi.NULL, 0)
            if status:
                names = ", ".join(str(il) for il, _ in step.ids)
                self.device.check(status, f"layer {names}" if names else "dense layers")
            start = self._add_phase("launch", start)
            if unread:
                start = yield from self._read_routing(unread, shape, start, may_pause)
            unread = step
            if step.lacking is not None:
                start = yield from self._read_routing(step, shape, start, may_pause)
                unread = None
        head = launches.head
        if head:
            self.graphs.launch(head, "the output head", *self.results.reads(head.outputs))
        start = self._add_phase("launch", start)
        if unread:
            yield from self._read_routing(unread, shape, start, may_pause)
        # prepare the next pass while the device computes the head
        self._readback.reset(shape.n_tokens)
        if self.replay and shape.n_tokens == 1:
            self.replay.advance()
        if self.misses:
            self.misses.tables.send()  # the whole pass is enqueued, and all its ids have been read

    def collect(self) -> Output:
        """Wait for the pass and return its results; see `Runner.collect`."""
        output = super().collect()
        self.residency.results_arrived(time.perf_counter() - self._began)
        return output

    def _add_phase(self, phase: str, start: float) -> float:
        """Add the time since start to a phase; return the time now."""
        now = time.perf_counter()
        self.phases[phase] += now - start
        return now

    def _read_routing(
        self, step: LaunchStep, shape: PassShape, start: float, may_pause: Predicate | None
    ) -> Generator[None, None, float]:
        """Read the ids of a step's layers, and handle missing experts of the last one.

        Returns the time of the end, as start is that of the beginning.
        """
        misses, residency, readback = self.misses, self.residency, self._readback
        # this runs for each layer of each token: no call more than needed
        clock, waited, resolved = time.perf_counter, 0.0, 0.0
        n_tokens, is_ragged = shape.n_tokens, shape.is_ragged
        for il, host_ids in step.ids:
            while may_pause and may_pause() and not readback.has(host_ids):
                yield
            readback.wait(host_ids)
            arrived = clock()
            ids = real = host_ids.ids
            if is_ragged:
                real = ids[ids >= 0]
            if misses and il in step.fetch_layers:
                experts, row, remedy = residency.fetched(il, real)
                if experts or row:
                    misses.fetched(il, experts, row)
            else:
                remedy = residency.routed(il, real)
            if remedy and misses and step.add:
                cpu_s = misses.carry_out(il, remedy, ids, n_tokens, step.add)
                residency.split.took(n_tokens, cpu_s)
            if step.sum_rows and il == step.lacking:
                status = C.mg_launch(self.device.compute.ptr, step.sum_rows.graph, ffi.NULL, 0)
                if status:
                    self.device.check(status, f"layer {il}")
            for observer in self.observers:
                observer(il, real)
            waited += arrived - start
            start = clock()
            resolved += start - arrived
        self.phases["wait"] += waited
        self.phases["resolve"] += resolved
        return start

    def close(self) -> None:
        """Wait for the device, then free graphs and fixed memory."""
        self.plans.clear()
        self._current = None
        super().close()
