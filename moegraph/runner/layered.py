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
from functools import partial

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled, InternalError
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
from .layer_graphs import LayerGraphs
from .misses import ADMIT_ROWS, MissHandler, MissMode
from .readback import HostIds, RoutingReadback
from .replay import Replay

# Plans kept: decode at two KV lengths and a few prompt chunks. Each refers to all graphs of a pass.
_MAX_PLANS = 8
# Layers at most in one graph: how soon the device begins, and how soon a prompt is cancelled. Few
# rows take no time worth cancelling, and a graph boundary takes some 5 us on CUDA.
MERGED, MERGED_LATER = 4, 64


@dataclass(frozen=True)
class _LaunchStep:
    """Consecutive layers in one graph.

    ids: where the host finds the choice of each: (il, I32 [n_tokens * n_expert_used]).
    fetch_layers: the layers that fetch by themselves; lacking: the last layer, if it may lack
    experts; guess: where a guess about it arrives, I32 [n_expert_used]; c: the graphs that add what
    it lacks, each C and E by the name that `MissHandler.resolve` knows; d: D.
    """

    graph: BuiltGraph
    ids: list[tuple[int, HostIds]]
    fetch_layers: frozenset[int] = frozenset()
    lacking: int | None = None
    prediction: HostIds | None = None
    add: dict[str, BuiltGraph] = field(default_factory=dict)
    sum_rows: BuiltGraph | None = None


@dataclass(frozen=True)
class _LaunchPlan:
    """All launches of one pass: the layers', then the head's."""

    steps: list[_LaunchStep]
    head: BuiltGraph
    generation: int


class LayeredRunner(Runner):
    """Runs a pass as several graphs and sees each router's choice while its experts run.

    cache: which expert is where, and how often each was chosen.
    misses: fetches what is not on the device; None when everything is.
    replay: recorded routing for single-row passes, or None.
    phases: host seconds so far: launching graphs, waiting for the router's ids, and looking at them
        (fetching and computing what is missing included).
    observers: called with (il, ids I32 [n_tokens * n_expert_used]) for every layer of every pass.
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
        self.phases = dict.fromkeys(("launch", "wait", "resolve"), 0.0)
        self.observers: list[Callable[[int, npt.NDArray[np.int32]], None]] = []
        # nodes of an A and of a B, C or D, at most
        self._n_nodes_a, self._n_nodes_b = 160, 48 + 3 * hp.n_expert_used
        self._sums_last = device.is_cpu and misses is not None
        self._readback = RoutingReadback(device, hp.n_layer, hp.n_expert_used, max_rows)
        self._layer_graphs = LayerGraphs(
            device,
            model,
            self._inputs,
            replay,
            max_rows,
            self._sums_last,
            self._readback,
            misses,
        )
        self._plans: OrderedDict[tuple[PassShape, bool, MissMode], _LaunchPlan] = OrderedDict()
        # A pass has changed books and memory, and not all of its own books are kept yet.
        self._is_unfinished = False
        self._current: _LaunchPlan | None = None  # the pass that is launched next

    @property
    def compute_bytes(self) -> int:
        """Device bytes for inputs, intermediates and what passes between graphs."""
        return super().compute_bytes + self._layer_graphs.carry.buffer.size

    def _plan(self, shape: PassShape, greedy: bool) -> _LaunchPlan:
        """Return the launches of a pass; no graph moved while the others were built."""
        miss_mode = self.misses.miss_mode if self.misses and shape.n_tokens == 1 else MissMode()
        self._layer_graphs.miss_mode = miss_mode
        key = (shape, greedy, miss_mode)
        plan = self._plans.get(key)
        if plan and plan.generation != self.graphs.generation:
            self._plans.clear()  # the others are as old
        while plan is None or plan.generation != self.graphs.generation:
            generation = self.graphs.generation
            plan = self._plans[key] = _LaunchPlan(
                self._steps(shape), self._head(shape, greedy), generation
            )
        self._plans.move_to_end(key)
        while len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _steps(self, shape: PassShape) -> list[_LaunchStep]:
        """Return the graphs of a pass's layers in order, each built at first use."""
        steps: list[_LaunchStep] = []
        il, n_layer = 0, self.model.hp.n_layer
        while il < n_layer:
            end = il + 1
            n_merged = MERGED if il == 0 or shape.n_tokens > ADMIT_ROWS else MERGED_LATER
            while end < min(il + n_merged, n_layer):
                if self._layer_graphs.may_lack(end - 1, shape.n_tokens):
                    break
                end += 1
            steps.append(self._step(shape, range(il, end)))
            il = end
        return steps

    def _step(self, shape: PassShape, layers: range) -> _LaunchStep:
        """Return the graph of these layers, with what completes the last one if that lacks any."""
        get, graphs, size, n_tokens = (
            self.graphs.get,
            self._layer_graphs,
            self._n_nodes_b,
            shape.n_tokens,
        )
        # DeltaNet layers do not see the KV length, so one graph serves for ever
        blind = all(self.model.hp.is_recurrent(il) for il in layers)
        seen = replace(shape, n_out=0, n_kv=KV_PAD if blind else shape.n_kv)
        predicts = any(graphs.is_predicted(il + 1, n_tokens) for il in layers)
        fetch_layers = frozenset(il for il in layers if graphs.fetches(il, n_tokens))
        graph = get(
            ("layers", layers, seen, predicts, fetch_layers),
            len(layers) * (self._n_nodes_a + size),
            lambda b: graphs.layers(b, seen, layers),
        )
        ids = [(il, self._readback.of(il, n_tokens)) for il in layers]
        il = layers[-1]
        if not graphs.may_lack(il, n_tokens):
            return _LaunchStep(graph, ids, fetch_layers)
        add = {
            name: get(
                ("add_uploaded", il, name, n_tokens),
                size,
                partial(graphs.add_uploaded, n_tokens=n_tokens, il=il, bank=bank),
            )
            for name, bank in self._banks_for_misses(il, n_tokens).items()
        }
        if self.misses and self.misses.cpu_experts and n_tokens <= ADMIT_ROWS:
            add["cpu"] = get(
                ("add_cpu", il, n_tokens), 16, lambda b: graphs.add_cpu(b, n_tokens, il)
            )
        sum_rows = None
        if self._sums_last:
            sum_rows = get(
                ("sum_rows", il, n_tokens), size, lambda b: graphs.sum_rows(b, n_tokens, il)
            )
        prediction = self._readback.prediction_of(il) if graphs.is_predicted(il, n_tokens) else None
        return _LaunchStep(graph, ids, fetch_layers, il, prediction, add, sum_rows)

    def _head(self, shape: PassShape, greedy: bool) -> BuiltGraph:
        return self.graphs.get(
            ("head", shape.n_tokens, shape.n_out, greedy),
            64,
            lambda b: self._layer_graphs.head(b, shape, greedy),
        )

    def _banks_for_misses(self, il: int, n_tokens: int) -> dict[str, Bank]:
        banks = self.model.banks
        found = {f"staging{turn}": banks.staging(il, turn) for turn in range(2)}
        if n_tokens <= ADMIT_ROWS and banks.n_slots[il]:
            found["own"] = banks.layer(il)
        return found

    def reserve_graphs(self) -> None:
        """Build the largest pass, so that lack of memory shows at start and nothing moves later."""
        state = self.model.state
        self._plan(PassShape(self.n_ubatch, state.n_seq, 0, state.n_ctx, state.n_seq), True)

    def _prepare(self, shape: PassShape, greedy: bool) -> None:
        self._current = self._plan(shape, greedy)

    def _launch(self, shape: PassShape, greedy: bool, cancelled: Callable[[], bool]) -> None:
        if self._is_unfinished:
            self._roll_back()  # the last pass failed, and this was interrupted
        self._is_unfinished = True
        try:
            self._launch_all(shape, greedy, cancelled)
        except BaseException:
            self._roll_back()
            raise
        self._is_unfinished = False

    def _roll_back(self) -> None:
        """Undo what a pass that failed left behind; harmless when called again."""
        self.device.synchronize()
        if self.misses:
            self.misses.rollback()
        else:
            self.cache.rollback()
        self._readback.reset(self.n_ubatch * self.model.state.n_seq)
        self._is_unfinished = False

    def _launch_all(self, shape: PassShape, greedy: bool, cancelled: Callable[[], bool]) -> None:
        start, plan = time.perf_counter(), self._current
        if plan is None:
            raise InternalError("a pass was launched before it was prepared")
        if self.misses:
            self.misses.begin_pass(shape.n_tokens)
        else:
            self.cache.begin_pass()
        unseen = None
        for step in plan.steps:
            if cancelled():
                raise Cancelled("cancelled")
            self.cache.in_flight.update(step.fetch_layers)
            status = C.mg_launch(self.device.compute.ptr, step.graph.graph, ffi.NULL, 0)
            if status:
                names = ", ".join(str(il) for il, _ in step.ids)
                self.device.check(status, f"layer {names}")
            start = self._add_phase("launch", start)
            if unseen:
                start = self._read_routing(unseen, shape.n_tokens, start)
            unseen = step
            if step.lacking is not None:
                start = self._read_routing(step, shape.n_tokens, start)
                unseen = None
        head = plan.head
        reads = self._result_reads(shape, head.outputs, greedy)
        status = C.mg_launch(self.device.compute.ptr, head.graph, reads, 2)
        self.device.check(status, "the output head")
        start = self._add_phase("launch", start)
        if unseen:
            self._read_routing(unseen, shape.n_tokens, start)
        # what the next pass needs, while the device computes the head
        self._readback.reset(shape.n_tokens)
        if self.replay and shape.n_tokens == 1:
            self.replay.advance()
        if self.misses:
            self.misses.end_launch()

    def collect(self) -> Output:
        """Wait for the pass and return its results; see `Runner.collect`."""
        if self.misses:
            self.misses.clock.back()
        output = super().collect()
        if self.misses:
            self.misses.end_pass()
        return output

    def _add_phase(self, phase: str, start: float) -> float:
        """Add the time since start to a phase; return now."""
        now = time.perf_counter()
        self.phases[phase] += now - start
        return now

    def _read_routing(self, step: _LaunchStep, n_tokens: int, start: float) -> float:
        """Read what a segment's layers chose, and have what the last one lacks computed."""
        misses = self.misses
        for il, host_ids in step.ids:
            if misses and step.prediction is not None and il == step.lacking:
                self._readback.wait(step.prediction)
                start = self._add_phase("wait", start)
                misses.prefetch(il, step.prediction.ids.tolist())
                start = self._add_phase("resolve", start)
            self._readback.wait(host_ids)
            start = self._add_phase("wait", start)
            ids = host_ids.ids
            if n_tokens <= ADMIT_ROWS:
                chosen = ids.tolist()
                missing = self.cache.access(il, chosen)
            else:
                missing = self.cache.access_batch(il, ids)
            if misses and il in step.fetch_layers:
                misses.commit_fetched(il, missing, chosen)
            if il == step.lacking:
                self._complete(step, il, missing, ids, n_tokens)
            for observer in self.observers:
                observer(il, ids)
            start = self._add_phase("resolve", start)
        return start

    def _complete(
        self,
        step: _LaunchStep,
        il: int,
        missing: list[int],
        ids: npt.NDArray[np.int32],
        n_tokens: int,
    ) -> None:
        """Add the missing experts to what B left of layer il."""
        if missing and self.misses:
            self.misses.resolve(il, missing, ids, n_tokens, step.add)
        if step.sum_rows:
            status = C.mg_launch(self.device.compute.ptr, step.sum_rows.graph, ffi.NULL, 0)
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
        self._layer_graphs.close()
        self._readback.close()
