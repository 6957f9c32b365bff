"""The graphs that a layered pass is made of, and the memory between them.

    layers   A and B of one or more layers: norm of the first one's input (if nothing did it yet);
             mixer, router (A); experts that are on the device, shared expert, sum (B)
    C(l)     adds experts that were fetched          E(l)    adds what the CPU computed
    D(l)     CPU only: the sum, in routing order, of the rows that B, C and E left unsummed

Only the last layer of a graph may lack experts, since C, E and D come behind it. A layer that
fetches what is missing by itself lacks none. What ends a layer also computes the norm that the next
one begins with.
"""

from __future__ import annotations

from functools import partial

from ..experts.bank import Bank
from ..ggml.device import Device
from ..ggml.lib import C
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.experts import (
    build_expert_rows,
    build_expert_sum,
    build_fetched_slots,
    build_slots,
)
from ..graphs.head import HeadOutputs, build_head
from ..graphs.inputs import InputBlock, PassShape
from ..graphs.layer import (
    Model,
    Routed,
    build_input_norm,
    build_layer_end,
    build_mixer_router,
    build_moe,
)
from ..graphs.router import build_prediction
from ..weights import place, round_up
from .misses import ADMIT_ROWS, MissHandler, MissMode
from .readback import RoutingReadback
from .replay import Replay


class CarryBuffers:
    """Fixed device memory for what passes from graph to graph.

    l_out, input_norm (of what comes next), residual, post_norm F32 [n_embd, n_tokens]; weights F32
    [n_expert_used, n_tokens]; slots I32 [n_expert_used, n_tokens], for C; expert_rows F32 [n_embd,
    n_expert_used, n_tokens], where B and C produce rows only; cpu_out: what the CPU computed.
    """

    def __init__(
        self, device: Device, model: Model, max_rows: int, with_rows: bool, cpu_out: bool
    ) -> None:
        hp = model.hp
        rows = {
            "l_out": hp.n_embd,
            "input_norm": hp.n_embd,
            "residual": hp.n_embd,
            "post_norm": hp.n_embd,
            "weights": hp.n_expert_used,
            "slots": hp.n_expert_used,
        }
        if with_rows:
            rows["expert_rows"] = hp.n_embd * hp.n_expert_used
        if cpu_out:
            rows["cpu_out"] = hp.n_embd * (hp.n_expert_used if with_rows else 1)
        self.offsets, size = {}, 0
        for name, ne0 in rows.items():
            self.offsets[name] = size
            size = round_up(size + 4 * ne0 * max_rows, device.alignment)
        self.buffer = device.buffer(size, "activations between graphs", "lower -ub")
        C.ggml_backend_buffer_clear(self.buffer.ptr, 0)

    def put(self, tensor: Tensor, name: str) -> Tensor:
        """Place a node's result in the memory of that name; return the node."""
        place(self.buffer, tensor, self.offsets[name])
        return tensor

    def leaf(self, b: Builder, name: str, dtype: int, *ne: int) -> Tensor:
        """Make a leaf that reads what another graph left under a name."""
        return self.put(b.leaf(dtype, ne, name), name)


class LayerGraphs:
    """Build functions of one model's layered pass.

    sums_last: B and C leave single experts' rows, and D sums them. choices: takes the ids to the
    host; misses: takes what the CPU needs to compute experts, if it may, and says where graphs
    fetch them from. miss_mode: of the graphs of one row that are built now.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        inputs: InputBlock,
        replay: Replay | None,
        max_rows: int,
        sums_last: bool,
        readback: RoutingReadback,
        misses: MissHandler | None,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._replay = replay
        self._sums_last = sums_last
        self._readback = readback
        self._misses = misses
        self._cpu_experts = misses.cpu_experts if misses else None
        self.miss_mode = MissMode()
        self.carry = CarryBuffers(device, model, max_rows, sums_last, self._cpu_experts is not None)

    def fetches(self, il: int, n_tokens: int) -> bool:
        """Return whether the graph of a layer fetches by itself what is not there."""
        return n_tokens == 1 and il in self.miss_mode.fetch_layers

    def may_lack(self, il: int, n_tokens: int) -> bool:
        """Return whether B of a layer may have to leave experts out."""
        is_partial = self._model.banks.n_slots[il] < self._model.hp.n_expert
        return is_partial and not self.fetches(il, n_tokens)

    def is_predicted(self, il: int, n_tokens: int) -> bool:
        """Return whether passes guess in front of a layer what it may lack."""
        if n_tokens > 1 or not self.miss_mode.prefetch:
            return False
        return 0 < il < self._model.hp.n_layer and self.may_lack(il, n_tokens)

    def _embd(self, b: Builder, name: str, n_tokens: int) -> Tensor:
        return self.carry.leaf(b, name, F32, self._model.hp.n_embd, n_tokens)

    def layers(self, b: Builder, shape: PassShape, layers: range) -> None:
        """Append neighbouring layers, of which only the last may lack experts."""
        m, n_tokens, inp = self._model, shape.n_tokens, self._inputs.leaves(b, shape)
        if layers[0]:
            x, norm = self._embd(b, "l_out", n_tokens), self._embd(b, "input_norm", n_tokens)
        else:
            x, norm = inp.embd, build_input_norm(b, m, inp.embd, 0)
        for il in layers:
            predict = None
            if self.is_predicted(il + 1, n_tokens):
                predict = partial(self._predict, b, il + 1)
            r = build_mixer_router(b, m, inp, shape, x, norm, il, predict)
            ids = self._replay.leaf(b, il) if n_tokens == 1 and self._replay else r.routing.topk
            may_lack = self.may_lack(il, n_tokens)
            if may_lack and self._cpu_experts and n_tokens <= ADMIT_ROWS:
                self._cpu_experts.export(b, r.post_norm, r.routing.weights)
            self._readback.export(b, ids, il)  # last: whoever sees them sees the others
            if may_lack:
                self._b_that_may_lack(b, r, ids, il)
                return
            slots = ids  # a layer with all its experts has each in the slot of its number
            if self._misses and self.fetches(il, n_tokens):
                slots = build_fetched_slots(b, m.banks, il, ids, self._misses.source(il))
            x = build_moe(b, m, r.residual, r.post_norm, slots, r.routing.weights, il)
            norm = build_input_norm(b, m, x, il + 1)
        self._leave(x, norm)

    def _predict(self, b: Builder, il: int, cur: Tensor) -> None:
        """Append a guess at what layer il will choose, from what the layer before it reads."""
        m = self._model
        self._readback.export_prediction(b, build_prediction(b, m.hp, m.weights.layer(il), cur), il)

    def _b_that_may_lack(self, b: Builder, r: Routed, ids: Tensor, il: int) -> None:
        """Append B over the experts that are there; leave what C, E and D need."""
        c, m = self.carry, self._model
        bank = m.banks.layer(il)
        c.put(r.post_norm, "post_norm")
        c.put(r.routing.weights_data, "weights")
        slots = build_slots(b, m.banks.tables[il], ids)
        if not self._sums_last:
            x = build_moe(b, m, r.residual, r.post_norm, slots, r.routing.weights, il)
            self._leave(x, build_input_norm(b, m, x, il + 1))
            return
        c.put(r.residual, "residual")
        if bank.n_slots == 0:
            rows = b.fill(self._rows_leaf(b, r.post_norm.ne[1]), 0.0)
        else:
            rows = build_expert_rows(b, bank, r.post_norm, slots, r.routing.weights, il)
        c.put(b.expand(rows), "expert_rows")

    def _from_a(self, b: Builder, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Make the leaves post_norm and weights that A left behind."""
        weights = self.carry.leaf(b, "weights", F32, 1, self._model.hp.n_expert_used, n_tokens)
        return self._embd(b, "post_norm", n_tokens), weights

    def head(self, b: Builder, shape: PassShape, greedy: bool) -> HeadOutputs:
        """Append the head."""
        norm = self._embd(b, "input_norm", shape.n_tokens)
        out_ids = self._inputs.leaves(b, shape).out_ids
        return build_head(b, self._model.weights, norm, out_ids, greedy)

    def _leave(self, l_out: Tensor, norm: Tensor) -> None:
        """Keep a layer's output, and the norm of it that comes next.

        CUDA adds and normalises in one kernel; alone, the norm would be a kernel of its own.
        """
        self.carry.put(l_out, "l_out")
        self.carry.put(norm, "input_norm")

    def _rows_leaf(self, b: Builder, n_tokens: int) -> Tensor:
        hp = self._model.hp
        return self.carry.leaf(b, "expert_rows", F32, hp.n_embd, hp.n_expert_used, n_tokens)

    def add_uploaded(self, b: Builder, n_tokens: int, il: int, bank: Bank) -> Tensor:
        """Append C(il) over experts in a bank; return the tensor that receives their slots."""
        c = self.carry
        post_norm, weights = self._from_a(b, n_tokens)
        slots = c.leaf(b, "slots", I32, self._model.hp.n_expert_used, n_tokens)
        rows = build_expert_rows(b, bank, post_norm, slots, weights, -1)
        if self._sums_last:
            c.put(b.expand(b.add(self._rows_leaf(b, n_tokens), rows)), "expert_rows")
        else:
            self._add(b, build_expert_sum(b, rows, -1), il)
        return slots

    def add_cpu(self, b: Builder, n_tokens: int, il: int) -> Tensor:
        """Append E(il); return the tensor that receives what the CPU computed."""
        c, hp = self.carry, self._model.hp
        if self._sums_last:
            cpu_out = c.leaf(b, "cpu_out", F32, hp.n_embd, hp.n_expert_used, n_tokens)
            c.put(b.expand(b.add(self._rows_leaf(b, n_tokens), cpu_out)), "expert_rows")
        else:
            cpu_out = self._embd(b, "cpu_out", n_tokens)
            self._add(b, cpu_out, il)
        return cpu_out

    def _add(self, b: Builder, more: Tensor, il: int) -> None:
        """Add to the layer's output [n_embd, n_tokens]."""
        so_far = self._embd(b, "l_out", more.ne[1])
        x = b.expand(b.add(so_far, more))
        self._leave(x, build_input_norm(b, self._model, x, il + 1))

    def sum_rows(self, b: Builder, n_tokens: int, il: int) -> None:
        """Append D(il)."""
        moe = build_expert_sum(b, self._rows_leaf(b, n_tokens), il)
        residual, post_norm = (
            self._embd(b, "residual", n_tokens),
            self._embd(b, "post_norm", n_tokens),
        )
        x = build_layer_end(b, self._model, residual, post_norm, moe, il)
        self._leave(x, build_input_norm(b, self._model, x, il + 1))

    def close(self) -> None:
        """Free the memory between graphs."""
        self.carry.buffer.close()
