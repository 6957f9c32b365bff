"""Two graphs a layer where experts may be missing, fewer elsewhere, and Python in between.

Protocol of a layer that may lack experts, on a compute stream and a copy stream:

    compute: A(l) | event a | B(l) ........................ | A(l+1)
    copy:           wait a | ids to pinned memory | event r
    host:    enqueues all of it, waits for r, looks at the ids, goes on with layer l+1

A ends at the router. B finds its slots in the graph, through the table on the device, so it does
not wait for the host; the host's look hides behind B. The ids leave through the copy stream because
a copy to the host on the compute stream would delay B.

An expert that is not on the device has slot -1, and B leaves it out; misses.py says how it is added
by graphs C and E, before A(l+1) is enqueued. On CUDA, B ends with the layer's output and they add
to it. On the CPU, where results have to be bit-equal whatever is resident, they only produce single
experts' rows, and D sums them in routing order.

Behind a layer that has all its experts there is nothing to wait for: B(l) and A(l+1) are in one
graph, which may hold up to MERGED layers' A. The host always looks one graph late: behind each
launch, at the ids that the launch before published. So ids of two graphs can be under way; every
layer has memory of its own for them, and the two graphs an event each.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled
from ..experts.bank import Bank
from ..experts.cache import ExpertCache
from ..experts.policy import Lru
from ..ggml.device import Device
from ..ggml.handles import Event
from ..ggml.lib import C, ffi
from ..graphs.cache import BuiltGraph
from ..graphs.inputs import PassShape
from ..graphs.layer import Model
from ..state import KV_PAD
from .base import Runner
from .misses import ADMIT_ROWS, MissHandler
from .pieces import Pieces
from .replay import Replay

# Plans kept: decode at two KV lengths and a few prompt chunks. Each refers to all graphs of a pass.
_MAX_PLANS = 8
# Layers at most in one graph: how late the host sees a choice, and how soon a pass is cancelled.
# Graph boundaries cost some 5 us each on CUDA.
MERGED = 4


@dataclass(frozen=True)
class _Launch:
    """One graph of a pass, and what belongs to it.

    routes: the layers whose A it holds, each with its ids in the host block: I32 [n_rows *
    n_expert_used], valid once the host has waited for the read. reads: what the copy stream
    publishes behind it: these ids and, where the CPU may compute experts, the last layer's
    activations and weights. alone: the layer, if it is a B by itself; c: the graphs that add
    experts the layer lacks, each C and E by the name that `MissHandler.resolve` knows; d: D.
    """

    graph: BuiltGraph
    routes: Sequence[tuple[int, npt.NDArray[np.int32]]] = ()
    reads: Any = ()
    alone: int | None = None
    c: dict[str, BuiltGraph] = field(default_factory=dict)
    d: BuiltGraph | None = None


@dataclass(frozen=True)
class _Plan:
    """All launches of one pass: the layers', then the head's."""

    layers: list[_Launch]
    head: BuiltGraph
    generation: int


class LayeredRunner(Runner):
    """Runs a pass as several graphs and sees the router's choices in between.

    cache: which expert is where, and how often each was chosen.
    misses: fetches what is not on the device; None when everything is.
    replay: recorded routing for single-row passes, or None.
    phases: host seconds so far: launching graphs, waiting for the router's ids, and looking at them
        (fetching and computing what is missing included).
    observers: called with (il, ids I32 [n_rows * n_expert_used]) for every layer of every pass.
    """

    mode = "layered"

    def __init__(
        self, device: Device, model: Model, n_ubatch: int, misses: MissHandler | None = None,
        replay: Replay | None = None,
    ) -> None:
        super().__init__(device, model, n_ubatch)
        hp, max_rows = model.hp, n_ubatch * model.state.n_seq
        self._max_rows = max_rows
        self.misses = misses
        self.replay = replay
        self.cache = misses.cache if misses else ExpertCache(
            hp.n_expert, model.banks.n_slots, Lru(), hp.n_expert_used
        )
        self.phases = dict.fromkeys(("launch", "wait", "look"), 0.0)
        self.observers: list[Callable[[int, npt.NDArray[np.int32]], None]] = []
        # nodes of a B, C or D, at most
        self._n_nodes_b = 48 + 3 * hp.n_expert_used
        self._sums_last = device.is_cpu and misses is not None
        self._cold = misses.cold if misses else None
        self._pieces = Pieces(
            device, model, self._inputs, replay, max_rows, self._sums_last, self._cold is not None
        )
        self._ids = device.host_buffer(4 * hp.n_layer * hp.n_expert_used * max_rows)
        self._a_done = device.event()
        self._read_done = [device.event(), device.event()]  # of launches in turn
        self._plans: OrderedDict[tuple[PassShape, bool], _Plan] = OrderedDict()

    @property
    def compute_bytes(self) -> int:
        """Device bytes for inputs, intermediates and what passes between graphs."""
        return super().compute_bytes + self._pieces.carried.buffer.size

    def _plan(self, shape: PassShape, greedy: bool) -> _Plan:
        """Return the launches of a pass; no graph moved while the others were built."""
        key = (shape, greedy)
        plan = self._plans.get(key)
        if plan and plan.generation != self.graphs.generation:
            self._plans.clear()  # the others are as old
        while plan is None or plan.generation != self.graphs.generation:
            generation = self.graphs.generation
            plan = self._plans[key] = _Plan(*self._launches(shape, greedy), generation)
        self._plans.move_to_end(key)
        while len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _launches(self, shape: PassShape, greedy: bool) -> tuple[list[_Launch], BuiltGraph]:
        """Return the graphs of a pass in order, each built at first use."""
        launches: list[_Launch] = []
        il, with_b = 0, False  # the layer whose A is next, and whether the B before it is due
        while il < self.model.hp.n_layer:
            end = il + 1
            while end < min(il + MERGED, self.model.hp.n_layer) and not self._is_partial(end - 1):
                end += 1
            launches.append(self._route(shape, range(il, end), with_b))
            il, with_b = end, not self._is_partial(end - 1)
            if not with_b:
                launches.append(self._experts(shape.n_rows, end - 1))
        head = self.graphs.get(
            ("head", shape.n_rows, shape.n_out, greedy, with_b), 64 + self._n_nodes_b,
            lambda b: self._pieces.head(b, shape, greedy, with_b),
        )
        return launches, head

    def _route(self, shape: PassShape, layers: range, with_b: bool) -> _Launch:
        """Return the launch of A of these layers, with B between and, if with_b, in front."""
        hp, n_rows, last = self.model.hp, shape.n_rows, layers[-1]
        # DeltaNet layers do not see the KV length, so one graph serves for ever
        blind = all(hp.is_recurrent(il) for il in layers)
        seen = replace(shape, n_out=0, n_kv=KV_PAD if blind else shape.n_kv)
        graph = self.graphs.get(
            ("A", layers, seen, with_b), len(layers) * (160 + self._n_nodes_b),
            lambda b: self._pieces.to_a(b, seen, layers, with_b),
        )
        ids, *for_cpu = graph.outputs
        n_ids = hp.n_expert_used * n_rows
        starts = [il * hp.n_expert_used * self._max_rows for il in layers]
        reads = [
            (tensor, self._ids.address(4 * start), 4 * n_ids)
            for start, tensor in zip(starts, ids)
        ]
        if self._is_partial(last) and self._cold and n_rows <= ADMIT_ROWS:
            x, weights = for_cpu
            reads += [
                (x, self._cold.address("x"), C.ggml_nbytes(x)),
                (weights, self._cold.address("weights"), C.ggml_nbytes(weights)),
            ]
        host = self._ids.array.view(np.int32)
        routes = [(il, host[start : start + n_ids]) for il, start in zip(layers, starts)]
        return _Launch(graph, routes, ffi.new("struct mg_readback[]", reads))

    def _is_partial(self, il: int) -> bool:
        return self._pieces.is_partial(il)

    def _experts(self, n_rows: int, il: int) -> _Launch:
        """Return the launch of a B alone, with what completes a layer that lacks experts."""
        get, pieces, size = self.graphs.get, self._pieces, self._n_nodes_b
        graph = get(("B", il, n_rows), size, lambda b: pieces.b(b, n_rows, il))
        c = {
            name: get(("C", il, name, n_rows), size, lambda b, k=bank: pieces.c(b, n_rows, il, k))
            for name, bank in self._banks_for_misses(il, n_rows).items()
        }
        if self._cold and n_rows <= ADMIT_ROWS:
            c["cpu"] = get(("E", il, n_rows), 16, lambda b: pieces.e(b, n_rows, il))
        d = None
        if self._sums_last:
            d = get(("D", il, n_rows), size, lambda b: pieces.d(b, n_rows, il))
        return _Launch(graph, alone=il, c=c, d=d)

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
        start = time.perf_counter()
        if self.misses:
            self.misses.begin_step(shape.n_rows)
        else:
            self.cache.begin_step()
        if self.replay and shape.n_rows == 1:
            self.replay.send()
        launches, head = self._current.layers, self._current.head
        before = None
        for at, launch in enumerate(launches):
            if cancelled():
                raise Cancelled("cancelled")
            self._enqueue(launch, at)
            start = self._look(before, launch, at - 1, shape.n_rows, start)
            before = launch
        reads = self._result_reads(shape, head.outputs, greedy)
        status = C.mg_launch(self.device.compute.ptr, head.graph, reads, 2)
        self.device.check(status, "the output head")
        self._look(before, None, len(launches) - 1, shape.n_rows, start)

    def _enqueue(self, launch: _Launch, at: int) -> None:
        """Enqueue one graph of the layers, and behind it what it publishes."""
        compute, graph = self.device.compute.ptr, launch.graph.graph
        if launch.alone is None:
            status = C.mg_launch_publish(
                compute, self.device.copy.ptr, graph, _ptr(self._a_done),
                _ptr(self._read_done[at % 2]), launch.reads, len(launch.reads),
            )
        else:
            status = C.mg_launch(compute, graph, ffi.NULL, 0)
        if status:
            layers = [il for il, _ in launch.routes] or [launch.alone]
            self.device.check(status, f"layer {', '.join(map(str, layers))}")

    def _look(
        self, published: _Launch | None, now: _Launch | None, at: int, n_rows: int, start: float
    ) -> float:
        """Read what launch number `at` published; have experts that `now` lacks computed.

        start: when the enqueuing of `now` began. Returns when the look ended.
        """
        launched = time.perf_counter()
        self.phases["launch"] += launched - start
        if published is None or not published.routes:
            return launched
        if self._read_done[at % 2]:
            self._read_done[at % 2].wait()
        seen = time.perf_counter()
        self.phases["wait"] += seen - launched
        for il, ids in published.routes:
            if n_rows <= ADMIT_ROWS:
                missing = self.cache.look(il, ids.tolist())
            else:
                missing = self.cache.look_batch(il, ids)
            if now and now.alone == il:
                self._complete(now, missing, ids, n_rows)
            for observer in self.observers:
                observer(il, ids)
        looked = time.perf_counter()
        self.phases["look"] += looked - seen
        return looked

    def _complete(
        self, launch: _Launch, missing: list[int], ids: npt.NDArray[np.int32], n_rows: int
    ) -> None:
        """Add the missing experts to what a B by itself left."""
        if missing and self.misses:
            self.misses.resolve(launch.alone, missing, ids, n_rows, launch.c)
        if launch.d:
            status = C.mg_launch(self.device.compute.ptr, launch.d.graph, ffi.NULL, 0)
            if status:
                self.device.check(status, f"layer {launch.alone}")

    def close(self) -> None:
        """Free graphs, events and fixed memory."""
        self._plans.clear()
        self._current = None
        super().close()
        for part in (self.misses, self.replay):
            if part:
                part.close()
        self._pieces.close()
        for handle in (self._a_done, *self._read_done, self._ids):
            if handle:
                handle.close()


def _ptr(event: Event | None) -> Any:
    return event.ptr if event else ffi.NULL
