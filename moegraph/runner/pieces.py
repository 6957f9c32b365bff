"""The graphs that a layered pass is made of, and the memory between them.

A ends at the router and B is the expert FFN. Where a layer may lack experts, B stands alone, so
that C, E and D can add to what it left:

    A(l)    norm of the layer's input (if nothing did it yet), mixer, router
    B(l)    the experts that are on the device, shared expert, sum; the next layer's attn_norm
    C(l)    adds experts that were fetched          E(l)    adds what the CPU computed
    D(l)    CPU only: the sum, in routing order, of the rows that B, C and E left unsummed

Where it cannot, B(l) and A(l+1) are one graph, several layers of that kind are, and the last B and
the head are.
"""

from __future__ import annotations

from ..experts.bank import Bank
from ..ggml.device import Device
from ..ggml.lib import C
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.experts import build_expert_rows, build_expert_sum, build_slots
from ..graphs.head import HeadOutputs, build_head
from ..graphs.inputs import InputBlock, PassShape
from ..graphs.layer import Model, build_a, build_attn_norm, build_b, build_layer_end
from ..graphs.router import Routing
from ..weights import place, round_up
from .replay import Replay


class Carried:
    """Fixed device memory for what passes from graph to graph.

    l_out, attn_norm (of the next layer), residual, post_norm F32 [n_embd, n_rows]; weights F32
    [n_expert_used, n_rows]; slots I32 [n_expert_used, n_rows], for C; expert_rows F32 [n_embd,
    n_expert_used, n_rows], where B and C produce rows only; cold: what the CPU computed; for every
    layer, because the host reads them late, its ids: I32 [n_expert_used, n_rows], or for one row
    argsort I32 [n_expert].
    """

    def __init__(
        self, device: Device, model: Model, max_rows: int, with_rows: bool, cold: bool
    ) -> None:
        hp = model.hp
        rows = {
            "l_out": hp.n_embd, "attn_norm": hp.n_embd, "residual": hp.n_embd,
            "post_norm": hp.n_embd, "weights": hp.n_expert_used, "slots": hp.n_expert_used,
        }
        if with_rows:
            rows["expert_rows"] = hp.n_embd * hp.n_expert_used
        if cold:
            rows["cold"] = hp.n_embd * (hp.n_expert_used if with_rows else 1)
        sizes = {name: ne0 * max_rows for name, ne0 in rows.items()}
        ids = max(hp.n_expert, hp.n_expert_used * max_rows)
        sizes |= {f"ids{il}": ids for il in range(hp.n_layer)}
        self.offsets, size = {}, 0
        for name, n in sizes.items():
            self.offsets[name] = size
            size = round_up(size + 4 * n, device.alignment)
        self.buffer = device.buffer(size, "activations between graphs", "lower -ub")
        C.ggml_backend_buffer_clear(self.buffer.ptr, 0)

    def put(self, tensor: Tensor, name: str) -> Tensor:
        """Place a node's result in the memory of that name; return the node."""
        place(self.buffer, tensor, self.offsets[name])
        return tensor

    def leaf(self, b: Builder, name: str, dtype: int, *ne: int) -> Tensor:
        """Make a leaf that reads what another graph left under a name."""
        return self.put(b.leaf(dtype, ne, name), name)


class Pieces:
    """Build functions of one model's layered pass.

    sums_last: B and C leave single experts' rows, and D sums them.
    """

    def __init__(
        self, device: Device, model: Model, inputs: InputBlock, replay: Replay | None,
        max_rows: int, sums_last: bool, cold: bool,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._replay = replay
        self._sums_last = sums_last
        self.carried = Carried(device, model, max_rows, sums_last, cold)

    def is_partial(self, il: int) -> bool:
        """Return whether a layer may lack experts."""
        return self._model.banks.n_slots[il] < self._model.hp.n_expert

    def _embd(self, b: Builder, name: str, n_rows: int) -> Tensor:
        return self.carried.leaf(b, name, F32, self._model.hp.n_embd, n_rows)

    def to_a(
        self, b: Builder, shape: PassShape, layers: range, with_b: bool
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Append A of the first layer, behind B of the one before if with_b; B and A of the others.

        Returns the tensors that hold the ids of each layer, and of the last one post_norm and the
        weights.
        """
        m, n_rows, il = self._model, shape.n_rows, layers[0]
        if il and not with_b:
            x, attn_norm = self._embd(b, "l_out", n_rows), self._embd(b, "attn_norm", n_rows)
        else:
            x = self._l_out(b, n_rows, il - 1) if with_b else self._inputs.leaves(b, shape).embd
            attn_norm = build_attn_norm(b, m, x, il)
        ids = []
        for il in layers:
            inp = self._inputs.leaves(b, shape)
            r = build_a(b, m, inp, shape, x, attn_norm, il)
            ids.append(self._keep_ids(b, r.routing, n_rows, il))
            if il == layers[-1]:
                break
            slots = ids[-1] if n_rows == 1 and self._replay else r.routing.topk
            x = build_b(b, m, r.residual, r.post_norm, slots, r.routing.weights, il)
            attn_norm = build_attn_norm(b, m, x, il + 1)
        self.carried.put(r.residual, "residual")
        self.carried.put(r.post_norm, "post_norm")
        self.carried.put(r.routing.weights_data, "weights")
        return ids, r.post_norm, r.routing.weights_data

    def _keep_ids(self, b: Builder, routing: Routing, n_rows: int, il: int) -> Tensor:
        """Place a layer's choice where the host reads it; return the tensor."""
        if n_rows == 1 and self._replay:
            return self._replay.leaf(b, il)
        # of one row the first ids are the choice: no copy needed
        ids = routing.argsort if n_rows == 1 else b.expand(b.cont(routing.topk))
        return self.carried.put(ids, f"ids{il}")

    def _from_a(self, b: Builder, n_rows: int) -> tuple[Tensor, Tensor]:
        """Make the leaves post_norm and weights that A left behind."""
        weights = self.carried.leaf(b, "weights", F32, 1, self._model.hp.n_expert_used, n_rows)
        return self._embd(b, "post_norm", n_rows), weights

    def _slots(self, b: Builder, n_rows: int, il: int) -> Tensor:
        """Append the look-up of the chosen experts' slots; where all have one, slots are ids."""
        if n_rows == 1 and self._replay:
            ids = self._replay.leaf(b, il)
        else:
            ids = self.carried.leaf(b, f"ids{il}", I32, self._model.hp.n_expert_used, n_rows)
        return build_slots(b, self._model.banks.tables[il], ids) if self.is_partial(il) else ids

    def _l_out(self, b: Builder, n_rows: int, il: int) -> Tensor:
        """Append B(il) from what A left; return the layer's output."""
        post_norm, weights = self._from_a(b, n_rows)
        residual = self._embd(b, "residual", n_rows)
        slots = self._slots(b, n_rows, il)
        return build_b(b, self._model, residual, post_norm, slots, weights, il)

    def b(self, b: Builder, n_rows: int, il: int) -> None:
        """Append B(il) by itself."""
        c, bank = self.carried, self._model.banks.layer(il)
        if not self._sums_last:
            self._leave(b, self._l_out(b, n_rows, il), il)
        elif bank.n_slots == 0:
            c.put(b.expand(b.fill(self._rows_leaf(b, n_rows), 0.0)), "expert_rows")
        else:
            post_norm, weights = self._from_a(b, n_rows)
            slots = self._slots(b, n_rows, il)
            c.put(build_expert_rows(b, bank, post_norm, slots, weights, il), "expert_rows")

    def head(self, b: Builder, shape: PassShape, greedy: bool, with_b: bool) -> HeadOutputs:
        """Append the head, behind the last layer's B if with_b."""
        m, n_rows = self._model, shape.n_rows
        last = m.hp.n_layer - 1
        x = self._l_out(b, n_rows, last) if with_b else self._embd(b, "l_out", n_rows)
        out_ids = self._inputs.leaves(b, shape).out_ids
        return build_head(b, m.hp, m.weights, x, out_ids, greedy)

    def _leave(self, b: Builder, l_out: Tensor, il: int) -> None:
        """Keep a layer's output, and the norm of it that the next layer begins with.

        CUDA adds and normalises in one kernel; left to A, the norm would be a kernel of its own.
        """
        self.carried.put(l_out, "l_out")
        if il + 1 < self._model.hp.n_layer:
            self.carried.put(build_attn_norm(b, self._model, l_out, il + 1), "attn_norm")

    def _rows_leaf(self, b: Builder, n_rows: int) -> Tensor:
        hp = self._model.hp
        return self.carried.leaf(b, "expert_rows", F32, hp.n_embd, hp.n_expert_used, n_rows)

    def c(self, b: Builder, n_rows: int, il: int, bank: Bank) -> Tensor:
        """Append C(il) over experts in a bank; return the tensor that receives their slots."""
        c = self.carried
        post_norm, weights = self._from_a(b, n_rows)
        slots = c.leaf(b, "slots", I32, self._model.hp.n_expert_used, n_rows)
        rows = build_expert_rows(b, bank, post_norm, slots, weights, -1)
        if self._sums_last:
            c.put(b.expand(b.add(self._rows_leaf(b, n_rows), rows)), "expert_rows")
        else:
            self._add(b, build_expert_sum(b, rows, -1), il)
        return slots

    def e(self, b: Builder, n_rows: int, il: int) -> Tensor:
        """Append E(il); return the tensor that receives what the CPU computed."""
        c, hp = self.carried, self._model.hp
        if self._sums_last:
            cold = c.leaf(b, "cold", F32, hp.n_embd, hp.n_expert_used, n_rows)
            c.put(b.expand(b.add(self._rows_leaf(b, n_rows), cold)), "expert_rows")
        else:
            cold = self._embd(b, "cold", n_rows)
            self._add(b, cold, il)
        return cold

    def _add(self, b: Builder, more: Tensor, il: int) -> None:
        """Add to the layer's output [n_embd, n_rows]."""
        so_far = self._embd(b, "l_out", more.ne[1])
        self._leave(b, b.expand(b.add(so_far, more)), il)

    def d(self, b: Builder, n_rows: int, il: int) -> None:
        """Append D(il)."""
        moe = build_expert_sum(b, self._rows_leaf(b, n_rows), il)
        residual, post_norm = self._embd(b, "residual", n_rows), self._embd(b, "post_norm", n_rows)
        self._leave(b, build_layer_end(b, self._model, residual, post_norm, moe, il), il)

    def close(self) -> None:
        """Free the memory between graphs."""
        self.carried.buffer.close()
