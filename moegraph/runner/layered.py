"""Runs a pass as several graphs and handles missing experts between them.

A layer that may lack experts:

    compute:  mixer_router | moe ............ | add_uploaded, add_cpu, sum_rows if needed | next
    readback:                ids
    host:                        reads the ids, handles missing experts, enqueues what follows

`mixer_router` and `moe` are launched as one graph. The graph looks up its slots in a table on the
device, so it does not wait for the host. A small kernel that runs beside `moe` writes the ids into
host memory. The host watches that memory and has the whole of `moe` to act on the ids.

In a pass of one row, a graph may fetch its missing experts (misses.py). Such a layer counts as
having all its experts. Elsewhere a missing expert has slot -1, and `moe` leaves it out. The graphs
`add_uploaded` and `add_cpu` add it before the next layer is enqueued. On CUDA they add to the
layer's output. On the CPU device, results must be bit-equal whatever is resident: there, these
graphs only make the rows of single experts, and `sum_rows` sums them in routing order.

After a layer that has all its experts, nothing has to be added. So consecutive layers are merged
into one graph, in which only the last layer may lack experts. The host reads the ids of the others
one graph late. Each layer has host memory of its own for its ids.
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
from ..experts.cache import ExpertCache
from ..experts.policy import Lru
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..graphs.cache import BuiltGraph
from ..graphs.inputs import PassShape
from ..graphs.layer import Model
from ..resident.bank import Bank
from ..resident.layout import KV_PAD
from .base import Output, Runner
from .layer_graphs import LayerGraphs
from .misses import ADMIT_ROWS, MissHandler, MissMode
from .readback import HostIds, RoutingReadback
from .replay import Replay

# Enough for decode at two KV lengths and a few prompt chunks. A plan keeps all graphs of a pass.
_MAX_PLANS = 8
# Most layers in one graph: in the first graph and in prompts, and in later graphs of few rows. A
# short first graph lets the device start early, and a prompt is cancelled between graphs. Few rows
# are quick, and each graph boundary costs about 5 us on CUDA.
MERGED, MERGED_LATER = 4, 64


@dataclass(frozen=True)
class _LaunchStep:
    """Consecutive layers in one graph, and the graphs that complete the last layer.

    ids: (il, I32 [n_tokens * n_expert_used]) of each layer, in host memory. fetch_layers: layers
    whose graph fetches missing experts. lacking: the last layer, if it may lack experts.
    prediction: the prediction for that layer, I32 [n_expert_used]. add: `add_uploaded` and
    `add_cpu`, by the names of `MissHandler.resolve`. sum_rows: the graph of that name (CPU device).
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
    """All graphs of one pass in order; valid while `GraphCache.generation` is the same."""

    steps: list[_LaunchStep]
    head: BuiltGraph
    generation: int


class LayeredRunner(Runner):
    """Runs a pass as several graphs and reads each router's choice while the experts run.

    cache: which expert is in which slot, and how often each was chosen.
    misses: handles missing experts; None when all experts are resident.
    replay: recorded routing for one-row passes, or None.
    phases: total host seconds: launching graphs, waiting for ids, and resolving them (uploads of
        missing experts and their computation on the CPU included).
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
        # upper bounds; the second one also holds for add_uploaded and sum_rows
        self._n_nodes_mixer_router, self._n_nodes_moe = 160, 48 + 3 * hp.n_expert_used
        self._sums_last = device.can.exact_sums and misses is not None
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
        # set while a pass is launched: if that fails, tables and memory must be rolled back
        self._is_unfinished = False
        self._current: _LaunchPlan | None = None  # the pass that is launched next

    @property
    def compute_bytes(self) -> int:
        """Device bytes of inputs, intermediates and `CarryBuffers`."""
        return super().compute_bytes + self._layer_graphs.carry.buffer.size

    def _plan(self, shape: PassShape, greedy: bool) -> _LaunchPlan:
        """Return the launch plan of a pass, built at first use.

        Building a graph can move the shared block and make earlier graphs stale: then try again.
        """
        miss_mode = self.misses.miss_mode if self.misses and shape.n_tokens == 1 else MissMode()
        self._layer_graphs.miss_mode = miss_mode
        key = (shape, greedy, miss_mode)
        plan = self._plans.get(key)
        if plan and plan.generation != self.graphs.generation:
            self._plans.clear()  # all plans have stale graphs
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
        """Return the launch steps of all layers in order."""
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
        """Return the step of these layers, with the graphs that complete the last one."""
        get, graphs, n_tokens = self.graphs.get, self._layer_graphs, shape.n_tokens
        n_nodes = self._n_nodes_moe
        # the KV length does not matter to DeltaNet layers: one graph serves all lengths
        is_recurrent = all(self.model.hp.is_recurrent(il) for il in layers)
        layer_shape = replace(shape, n_out=0, n_kv=KV_PAD if is_recurrent else shape.n_kv)
        predicts = any(graphs.is_predicted(il + 1, n_tokens) for il in layers)
        fetch_layers = frozenset(il for il in layers if graphs.fetches(il, n_tokens))
        graph = get(
            ("layers", layers, layer_shape, predicts, fetch_layers),
            len(layers) * (self._n_nodes_mixer_router + n_nodes),
            lambda b: graphs.layers(b, layer_shape, layers),
        )
        ids = [(il, self._readback.of(il, n_tokens)) for il in layers]
        il = layers[-1]
        if not graphs.may_lack(il, n_tokens):
            return _LaunchStep(graph, ids, fetch_layers)
        add = {
            name: get(
                ("add_uploaded", il, name, n_tokens),
                n_nodes,
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
                ("sum_rows", il, n_tokens), n_nodes, lambda b: graphs.sum_rows(b, n_tokens, il)
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
        """Build the graphs of the largest pass, so that the shared block never grows later.

        Raises:
            OutOfDeviceMemory: the intermediates do not fit.
        """
        state = self.model.state
        self._plan(PassShape(self.n_ubatch, state.n_seq, 0, state.n_ctx, state.n_seq), True)

    def _prepare(self, shape: PassShape, greedy: bool) -> None:
        self._current = self._plan(shape, greedy)

    def _launch(self, shape: PassShape, greedy: bool, cancelled: Callable[[], bool]) -> None:
        if self._is_unfinished:
            self._roll_back()  # the last pass failed, and its roll-back was interrupted
        self._is_unfinished = True
        try:
            self._launch_all(shape, greedy, cancelled)
        except BaseException:
            self._roll_back()
            raise
        self._is_unfinished = False

    def _roll_back(self) -> None:
        """Undo a failed pass; safe to call again."""
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
        unread = None  # the last step, while the host has not read its ids
        for step in plan.steps:
            if cancelled():
                raise Cancelled("cancelled")
            self.cache.in_flight.update(step.fetch_layers)
            status = C.mg_launch(self.device.compute.ptr, step.graph.graph, ffi.NULL, 0)
            if status:
                names = ", ".join(str(il) for il, _ in step.ids)
                self.device.check(status, f"layer {names}")
            start = self._add_phase("launch", start)
            if unread:
                start = self._read_routing(unread, shape.n_tokens, start)
            unread = step
            if step.lacking is not None:
                start = self._read_routing(step, shape.n_tokens, start)
                unread = None
        head = plan.head
        reads = self._result_reads(shape, head.outputs, greedy)
        status = C.mg_launch(self.device.compute.ptr, head.graph, reads, 2)
        self.device.check(status, "the output head")
        start = self._add_phase("launch", start)
        if unread:
            self._read_routing(unread, shape.n_tokens, start)
        # prepare the next pass while the device computes the head
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
        """Add the time since start to a phase; return the time now."""
        now = time.perf_counter()
        self.phases[phase] += now - start
        return now

    def _read_routing(self, step: _LaunchStep, n_tokens: int, start: float) -> float:
        """Read the ids of a step's layers, and handle missing experts of the last one."""
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
        """Add the missing experts of layer il; on the CPU device, sum the rows of all experts."""
        if missing and self.misses:
            self.misses.resolve(il, missing, ids, n_tokens, step.add)
        if step.sum_rows:
            status = C.mg_launch(self.device.compute.ptr, step.sum_rows.graph, ffi.NULL, 0)
            if status:
                self.device.check(status, f"layer {il}")

    def close(self) -> None:
        """Wait for the device, then free graphs and fixed memory."""
        self._plans.clear()
        self._current = None
        super().close()
        for part in (self.misses, self.replay):
            if part:
                part.close()
        self._layer_graphs.close()
        self._readback.close()
