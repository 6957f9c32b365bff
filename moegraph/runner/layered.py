"""Two graphs a layer, and Python in between.

Protocol of one layer, on a compute stream and a copy stream:

    compute: A(l) | event a | B(l) ........................ | A(l+1)
    copy:           wait a | ids to pinned memory | event r
    host:    enqueues all of it, waits for r, looks at the ids, goes on with layer l+1

A ends at the router. B finds its slots in the graph, through the table on the device, so it does
not wait for the host; the host's look hides behind B. The ids leave through the copy stream because
a copy to the host on the compute stream would delay B. Fixed memory carries values from graph to
graph; one set is enough, because A(l+1) is enqueued only after the host has seen the ids of layer
l.

An expert that is not on the device has slot -1, and B leaves it out; misses.py says how it is added
by graphs C and E. On CUDA, B ends with the layer's output and they add to it. On the CPU, where
results have to be bit-equal whatever is resident, they only produce single experts' rows, and D
sums them in routing order.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled
from ..experts.bank import Bank
from ..experts.cache import ExpertCache
from ..experts.policy import Lru
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.cache import BuiltGraph
from ..graphs.experts import build_expert_rows, build_expert_sum, build_slots
from ..graphs.head import HeadOutputs, build_head
from ..graphs.inputs import PassShape
from ..graphs.layer import Model, build_a, build_b, build_layer_end
from ..state import KV_PAD
from ..weights import place, round_up
from .base import Runner
from .misses import ADMIT_ROWS, MissHandler
from .replay import Replay

# Plans kept: decode at two KV lengths and a few prompt chunks. Each holds two graphs a layer or
# more.
_MAX_PLANS = 8


class _Carried:
    """Fixed device memory for what passes from graph to graph.

    l_out, residual, post_norm F32 [n_embd, n_rows]; argsort I32 [n_expert, n_rows]; ids I32
    [n_expert_used, n_rows]; weights F32 [n_expert_used, n_rows]; slots I32 as ids, for C;
    expert_rows F32 [n_embd, n_expert_used, n_rows], where B and C produce rows only; cold: what the
    CPU computed.
    """

    def __init__(
        self, device: Device, model: Model, max_rows: int, with_rows: bool, cold: bool
    ) -> None:
        hp = model.hp
        rows = {
            "l_out": hp.n_embd, "residual": hp.n_embd, "post_norm": hp.n_embd,
            "argsort": hp.n_expert, "ids": hp.n_expert_used, "weights": hp.n_expert_used,
            "slots": hp.n_expert_used,
        }
        if with_rows:
            rows["expert_rows"] = hp.n_embd * hp.n_expert_used
        if cold:
            rows["cold"] = hp.n_embd * (hp.n_expert_used if with_rows else 1)
        self.offsets, size = {}, 0
        for name, ne0 in rows.items():
            self.offsets[name] = size
            size = round_up(size + 4 * ne0 * max_rows, device.alignment)
        self.buffer = device.buffer(size, "activations between graphs", "lower -ub")
        C.ggml_backend_buffer_clear(self.buffer.ptr, 0)

    def put(self, tensor: Tensor, name: str) -> Tensor:
        place(self.buffer, tensor, self.offsets[name])
        return tensor

    def leaf(self, b: Builder, name: str, dtype: int, *ne: int) -> Tensor:
        return self.put(b.leaf(dtype, ne, name), name)


@dataclass(frozen=True)
class _LayerPlan:
    """Launches of one layer: A, B, read-backs, and where experts may be missing C, E and D."""

    a: BuiltGraph
    b: BuiltGraph
    reads: Any
    c: dict[str, BuiltGraph]
    d: BuiltGraph | None


@dataclass(frozen=True)
class _Plan:
    """All launches of one pass: the layers, then the head."""

    layers: list[_LayerPlan]
    head: BuiltGraph
    generation: int


class LayeredRunner(Runner):
    """Runs a pass as two graphs a layer.

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
        self.misses = misses
        self.replay = replay
        self.cache = misses.cache if misses else ExpertCache(
            hp.n_expert, model.banks.n_slots, Lru(), hp.n_expert_used
        )
        self.phases = dict.fromkeys(("launch", "wait", "look"), 0.0)
        self.observers: list[Callable[[int, npt.NDArray[np.int32]], None]] = []
        self._sums_last = device.is_cpu and misses is not None
        self._cold = misses.cold if misses else None
        self._carried = _Carried(
            device, model, max_rows, self._sums_last, self._cold is not None
        )
        self._ids = device.host_buffer(4 * hp.n_expert_used * max_rows)
        self._a_done, self._read_done = device.event(), device.event()
        self._plans: OrderedDict[tuple[PassShape, bool], _Plan] = OrderedDict()

    @property
    def compute_bytes(self) -> int:
        """Device bytes for inputs, intermediates and what passes between graphs."""
        return super().compute_bytes + self._carried.buffer.size

    def _build_a(self, b: Builder, shape: PassShape, il: int) -> tuple[Tensor, Tensor, Tensor]:
        """Append A(il); return the tensors that hold the chosen ids, post_norm and the weights."""
        hp, c = self.model.hp, self._carried
        inp = self._inputs.leaves(b, shape)
        x = c.leaf(b, "l_out", F32, hp.n_embd, shape.n_rows) if il else inp.embd
        r = build_a(b, self.model, inp, shape, x, il)
        c.put(r.residual, "residual")
        c.put(r.post_norm, "post_norm")
        c.put(r.routing.argsort, "argsort")
        c.put(r.routing.weights_data, "weights")
        if shape.n_rows == 1 and self.replay:
            ids = self.replay.leaf(b, il)
        elif shape.n_rows == 1:
            ids = r.routing.argsort  # its first ids are the choice: no copy needed
        else:
            ids = c.put(b.expand(b.cont(r.routing.topk)), "ids")
        return ids, r.post_norm, r.routing.weights_data

    def _from_a(self, b: Builder, n_rows: int) -> tuple[Tensor, Tensor]:
        """Make the leaves post_norm and weights that A left behind."""
        hp, c = self.model.hp, self._carried
        post_norm = c.leaf(b, "post_norm", F32, hp.n_embd, n_rows)
        return post_norm, c.leaf(b, "weights", F32, 1, hp.n_expert_used, n_rows)

    def _slots(self, b: Builder, n_rows: int, il: int) -> Tensor:
        """Append the look-up of the chosen experts' slots in the layer's table."""
        if n_rows == 1 and self.replay:
            ids = self.replay.leaf(b, il)
        else:
            name = "argsort" if n_rows == 1 else "ids"
            ids = self._carried.leaf(b, name, I32, self.model.hp.n_expert_used, n_rows)
        return build_slots(b, self.model.banks.tables[il], ids)

    def _rows_leaf(self, b: Builder, n_rows: int) -> Tensor:
        hp = self.model.hp
        return self._carried.leaf(b, "expert_rows", F32, hp.n_embd, hp.n_expert_used, n_rows)

    def _build_b(self, b: Builder, n_rows: int, il: int) -> Tensor:
        hp, c, bank = self.model.hp, self._carried, self.model.banks.layer(il)
        if bank.n_slots == 0 and self._sums_last:
            return c.put(b.expand(b.fill(self._rows_leaf(b, n_rows), 0.0)), "expert_rows")
        post_norm, weights = self._from_a(b, n_rows)
        slots = self._slots(b, n_rows, il)
        if self._is_partial(il) and self._sums_last:
            return c.put(build_expert_rows(b, bank, post_norm, slots, weights, il), "expert_rows")
        residual = c.leaf(b, "residual", F32, hp.n_embd, n_rows)
        return c.put(build_b(b, self.model, residual, post_norm, slots, weights, il), "l_out")

    def _build_c(self, b: Builder, n_rows: int, bank: Bank) -> Tensor:
        """Append experts of a bank to what B left; return the tensor that receives their slots."""
        hp, c = self.model.hp, self._carried
        post_norm, weights = self._from_a(b, n_rows)
        slots = c.leaf(b, "slots", I32, hp.n_expert_used, n_rows)
        rows = build_expert_rows(b, bank, post_norm, slots, weights, -1)
        if self._sums_last:
            c.put(b.expand(b.add(self._rows_leaf(b, n_rows), rows)), "expert_rows")
        else:
            so_far = c.leaf(b, "l_out", F32, hp.n_embd, n_rows)
            c.put(b.expand(b.add(so_far, build_expert_sum(b, rows, -1))), "l_out")
        return slots

    def _build_e(self, b: Builder, n_rows: int) -> Tensor:
        """Append what the CPU computed to what is there; return the tensor that receives it."""
        hp, c = self.model.hp, self._carried
        ne = (hp.n_embd, hp.n_expert_used, n_rows) if self._sums_last else (hp.n_embd, n_rows)
        where = "expert_rows" if self._sums_last else "l_out"
        cold, so_far = c.leaf(b, "cold", F32, *ne), c.leaf(b, where, F32, *ne)
        c.put(b.expand(b.add(so_far, cold)), where)
        return cold

    def _build_d(self, b: Builder, n_rows: int, il: int) -> Tensor:
        hp, c = self.model.hp, self._carried
        residual = c.leaf(b, "residual", F32, hp.n_embd, n_rows)
        post_norm = c.leaf(b, "post_norm", F32, hp.n_embd, n_rows)
        moe = build_expert_sum(b, self._rows_leaf(b, n_rows), il)
        return c.put(build_layer_end(b, self.model, residual, post_norm, moe, il), "l_out")

    def _is_partial(self, il: int) -> bool:
        return self.model.banks.n_slots[il] < self.model.hp.n_expert

    def _build_head(self, b: Builder, shape: PassShape, greedy: bool) -> HeadOutputs:
        x = self._carried.leaf(b, "l_out", F32, self.model.hp.n_embd, shape.n_rows)
        out_ids = self._inputs.leaves(b, shape).out_ids
        return build_head(b, self.model.hp, self.model.weights, x, out_ids, greedy)

    def _plan(self, shape: PassShape, greedy: bool) -> _Plan:
        """Return the launches of a pass; no graph moved while the others were built."""
        key = (shape, greedy)
        plan = self._plans.get(key)
        while plan is None or plan.generation != self.graphs.generation:
            generation = self.graphs.generation
            layers = [self._layer(shape, il) for il in range(self.model.hp.n_layer)]
            head = self.graphs.get(
                ("head", shape.n_rows, shape.n_out, greedy), 64,
                lambda b: self._build_head(b, shape, greedy),
            )
            plan = self._plans[key] = _Plan(layers, head, generation)
        self._plans.move_to_end(key)
        while len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _layer(self, shape: PassShape, il: int) -> _LayerPlan:
        hp, n_rows, get = self.model.hp, shape.n_rows, self.graphs.get
        # a DeltaNet layer does not see the KV length, so one graph serves for ever
        seen = replace(shape, n_out=0, n_kv=KV_PAD if hp.is_recurrent(il) else shape.n_kv)
        size = 64 + 3 * hp.n_expert_used
        a = get(("A", il, seen), 160, lambda b: self._build_a(b, seen, il))
        experts = get(("B", il, n_rows), size, lambda b: self._build_b(b, n_rows, il))
        added, summed = {}, None
        if self._is_partial(il):
            for name, bank in self._banks_for_misses(il, n_rows).items():
                key = ("C", id(bank), n_rows)
                added[name] = get(key, size, lambda b, k=bank: self._build_c(b, n_rows, k))
            if self._cold and n_rows <= ADMIT_ROWS:
                added["cpu"] = get(("E", n_rows), 16, lambda b: self._build_e(b, n_rows))
            if self._sums_last:
                summed = get(("D", il, n_rows), size, lambda b: self._build_d(b, n_rows, il))
        ids, *for_cpu = a.outputs
        reads = [(ids, self._ids.address(), 4 * hp.n_expert_used * n_rows)]
        if "cpu" in added:
            x, weights = for_cpu
            reads += [
                (x, self._cold.address("x"), C.ggml_nbytes(x)),
                (weights, self._cold.address("weights"), C.ggml_nbytes(weights)),
            ]
        return _LayerPlan(a, experts, ffi.new("struct mg_readback[]", reads), added, summed)

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
        compute, copy = self.device.compute.ptr, self.device.copy.ptr
        a_done = self._a_done.ptr if self._a_done else ffi.NULL
        read_done = self._read_done.ptr if self._read_done else ffi.NULL
        n_ids = self.model.hp.n_expert_used * shape.n_rows
        ids = self._ids.array[: 4 * n_ids].view(np.int32)
        phases = self.phases
        start = time.perf_counter()
        if self.misses:
            self.misses.begin_step(shape.n_rows)
        else:
            self.cache.begin_step()
        if self.replay and shape.n_rows == 1:
            self.replay.send()
        for il, layer in enumerate(self._current.layers):
            if cancelled():
                raise Cancelled("cancelled")
            status = C.mg_launch_pair(
                compute, copy, layer.a.graph, layer.b.graph, a_done, read_done,
                layer.reads, len(layer.reads),
            )
            if status:
                self.device.check(status, f"layer {il}")
            launched = time.perf_counter()
            if self._read_done:
                self._read_done.wait()
            seen = time.perf_counter()
            self._look(il, layer, ids, shape.n_rows)
            phases["launch"] += launched - start
            phases["wait"] += seen - launched
            start = time.perf_counter()
            phases["look"] += start - seen
        head = self._current.head
        reads = self._result_reads(shape, head.outputs, greedy)
        status = C.mg_launch(compute, head.graph, reads, 2)
        self.device.check(status, "the output head")

    def _look(
        self, il: int, layer: _LayerPlan, ids: npt.NDArray[np.int32], n_rows: int
    ) -> None:
        """Read the router's choice, and have what is missing computed."""
        if n_rows <= ADMIT_ROWS:
            missing = self.cache.look(il, ids.tolist())
        else:
            missing = self.cache.look_batch(il, ids)
        if missing and self.misses:
            self.misses.resolve(il, missing, ids, n_rows, layer.c)
        if layer.d:
            status = C.mg_launch(self.device.compute.ptr, layer.d.graph, ffi.NULL, 0)
            if status:
                self.device.check(status, f"layer {il}")
        for observer in self.observers:
            observer(il, ids)

    def close(self) -> None:
        """Free graphs, events and fixed memory."""
        self._plans.clear()
        self._current = None
        super().close()
        for part in (self.misses, self.replay):
            if part:
                part.close()
        for handle in (self._a_done, self._read_done, self._ids, self._carried.buffer):
            if handle:
                handle.close()
