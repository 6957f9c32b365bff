"""Two graphs a layer, and Python in between.

Protocol of one layer, on a compute stream and a copy stream:

    compute: A(l) | event a | B(l) ........................ | A(l+1)
    copy:           wait a | ids to pinned memory | event r
    host:    enqueues all of it, waits for r, looks at the ids, goes on with layer l+1

A ends at the router. B finds its slots in the graph, through the table on the device, so it does not
wait for the host; the host's look hides behind B. The ids leave through the copy stream because a copy
to the host on the compute stream would delay B. Fixed memory carries values from graph to graph; one
set is enough, because A(l+1) is enqueued only after the host has seen the ids of layer l.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import Cancelled
from ..experts.usage import ExpertUsage
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.experts import build_slots
from ..graphs.head import HeadOutputs, build_head
from ..graphs.inputs import PassShape
from ..graphs.layer import Model, build_a, build_b
from ..state import KV_PAD
from ..weights import place, round_up
from .base import Runner

# Plans kept: decode at two KV lengths and a few prompt chunks. Each holds two graphs a layer.
_MAX_PLANS = 8


class _Carried:
    """Fixed device memory for what passes from graph to graph.

    l_out, residual, post_norm F32 [n_embd, n_rows]; argsort I32 [n_expert, n_rows]; ids I32
    [n_expert_used, n_rows]; weights F32 [n_expert_used, n_rows].
    """

    def __init__(self, device: Device, model: Model, max_rows: int) -> None:
        hp = model.hp
        rows = {
            "l_out": hp.n_embd, "residual": hp.n_embd, "post_norm": hp.n_embd,
            "argsort": hp.n_expert, "ids": hp.n_expert_used, "weights": hp.n_expert_used,
        }
        self.offsets, size = {}, 0
        for name, ne0 in rows.items():
            self.offsets[name] = size
            size = round_up(size + 4 * ne0 * max_rows, device.alignment)
        self.buffer = device.buffer(size, "activations between graphs", "lower -ub")

    def put(self, tensor: Tensor, name: str) -> Tensor:
        place(self.buffer, tensor, self.offsets[name])
        return tensor

    def leaf(self, b: Builder, name: str, dtype: int, *ne: int) -> Tensor:
        return self.put(b.leaf(dtype, ne, name), name)


class _Plan:
    """All launches of one pass: per layer A, B and the read-back, then the head."""

    def __init__(self, layers: list[tuple[Any, Any, Any]], head: Any, generation: int) -> None:
        self.layers = layers
        self.head = head
        self.generation = generation


class LayeredRunner(Runner):
    """Runs a pass as two graphs a layer and counts which experts the router chose."""

    mode = "layered"

    def __init__(self, device: Device, model: Model, n_ubatch: int) -> None:
        super().__init__(device, model, n_ubatch)
        hp, max_rows = model.hp, n_ubatch * model.state.n_seq
        self.usage = ExpertUsage(hp.n_layer, hp.n_expert)
        self._carried = _Carried(device, model, max_rows)
        self._ids = device.host_buffer(4 * hp.n_expert_used * max_rows)
        self._a_done, self._read_done = device.event(), device.event()
        self._plans: OrderedDict[tuple[PassShape, bool], _Plan] = OrderedDict()

    @property
    def compute_bytes(self) -> int:
        """Device bytes for inputs, intermediates and what passes between graphs."""
        return super().compute_bytes + self._carried.buffer.size

    # -- graphs ----------------------------------------------------------------------------------

    def _build_a(self, b: Builder, shape: PassShape, il: int) -> Tensor:
        """Append A(il) and return the tensor that holds the chosen ids, [n_expert_used, n_rows]."""
        hp, c = self.model.hp, self._carried
        inp = self._inputs.leaves(b, shape)
        x = c.leaf(b, "l_out", F32, hp.n_embd, shape.n_rows) if il else inp.embd
        r = build_a(b, self.model, inp, shape, x, il)
        c.put(r.residual, "residual")
        c.put(r.post_norm, "post_norm")
        c.put(r.routing.argsort, "argsort")
        c.put(r.routing.weights_data, "weights")
        if shape.n_rows == 1:
            return r.routing.argsort  # its first ids are the choice: no copy needed
        return c.put(b.expand(b.cont(r.routing.topk)), "ids")

    def _build_b(self, b: Builder, n_rows: int, il: int) -> Tensor:
        hp, c = self.model.hp, self._carried
        k = hp.n_expert_used
        residual = c.leaf(b, "residual", F32, hp.n_embd, n_rows)
        post_norm = c.leaf(b, "post_norm", F32, hp.n_embd, n_rows)
        ids = c.leaf(b, "argsort" if n_rows == 1 else "ids", I32, k, n_rows)
        weights = c.leaf(b, "weights", F32, 1, k, n_rows)
        slots = build_slots(b, self.model.banks.layer(il), ids)
        out = build_b(b, self.model, residual, post_norm, slots, weights, il)
        return c.put(out, "l_out")

    def _build_head(self, b: Builder, shape: PassShape, greedy: bool) -> HeadOutputs:
        x = self._carried.leaf(b, "l_out", F32, self.model.hp.n_embd, shape.n_rows)
        out_ids = self._inputs.leaves(b, shape).out_ids
        return build_head(b, self.model.hp, self.model.weights, x, out_ids, greedy)

    def _plan(self, shape: PassShape, greedy: bool) -> _Plan:
        """Return the launches of a pass, built so that no graph moved while the others were built."""
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

    def _layer(self, shape: PassShape, il: int) -> tuple[Any, Any, Any]:
        hp, n_rows = self.model.hp, shape.n_rows
        # a DeltaNet layer does not see the KV length, so one graph serves for ever
        seen = replace(shape, n_out=0, n_kv=KV_PAD if hp.is_recurrent(il) else shape.n_kv)
        a = self.graphs.get(("A", il, seen), 160, lambda b: self._build_a(b, seen, il))
        experts = self.graphs.get(
            ("B", il, n_rows), 64 + 3 * hp.n_expert_used, lambda b: self._build_b(b, n_rows, il)
        )
        size = 4 * hp.n_expert_used * n_rows
        read = {"src": a.outputs, "dst": self._ids.address(), "size": size}
        return a, experts, ffi.new("struct mg_readback[1]", [read])

    def reserve(self) -> None:
        """Build the largest pass, so that lack of memory shows at start and nothing moves later."""
        state = self.model.state
        self._plan(PassShape(self.n_ubatch, state.n_seq, 0, state.n_ctx, state.n_seq), True)

    # -- one pass --------------------------------------------------------------------------------

    def _prepare(self, shape: PassShape, greedy: bool) -> None:
        self._current = self._plan(shape, greedy)

    def _launch(self, shape: PassShape, greedy: bool, cancelled: Callable[[], bool]) -> None:
        compute, copy = self.device.compute.ptr, self.device.copy.ptr
        a_done = self._a_done.ptr if self._a_done else ffi.NULL
        read_done = self._read_done.ptr if self._read_done else ffi.NULL
        n_ids = self.model.hp.n_expert_used * shape.n_rows
        ids = self._ids.array[: 4 * n_ids].view(np.int32)
        for il, (a, experts, read) in enumerate(self._current.layers):
            if cancelled():
                raise Cancelled("cancelled")
            status = C.mg_launch_pair(
                compute, copy, a.graph, experts.graph, a_done, read_done, read, 1
            )
            if status:
                self.device.check(status, f"layer {il}")
            if self._read_done:
                self._read_done.wait()
            self.usage.observe(il, ids)
        head = self._current.head
        reads = self._result_reads(shape, head.outputs, greedy)
        status = C.mg_launch(compute, head.graph, reads, 2)
        self.device.check(status, "the output head")

    def close(self) -> None:
        """Free graphs, events and fixed memory."""
        self._plans.clear()
        super().close()
        for handle in (self._a_done, self._read_done, self._ids, self._carried.buffer):
            if handle:
                handle.close()
