"""The graphs of a sweep.

    mixer     mixer and router of a chunk of one layer
    experts   the expert FFN of a chunk over the resident experts
    layer     both, in a full layer
    inputs    copies the inputs of a unit from host memory
    unit      experts in the ring, for rows of any chunk that chose them
    sum_rows  CPU device and --deterministic: sums the rows of all experts in routing order
    head      output matrix and argmax

A graph does not depend on where in the prompt its rows are: they are copied to fixed memory before
it and from there after it (`HiddenRows`, `CarryBuffers`), and units name their rows.
"""

from __future__ import annotations

from ..arch.inputs import PAGED, PassShape
from ..errors import InternalError
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.experts import build_slots
from ..graphs.head import Results, build_head
from ..graphs.hidden import HiddenRows
from ..graphs.layer import Routed, build_input_norm, build_mixer_router, build_moe
from ..resident.bank import Ring
from ..resident.stage import Stage
from .layer_graphs import CarryBuffers, LayerGraphs
from .sweep_memory import SweepMemory

# Places from which several are one token, for the sake of ggml's tiles (see `_build_unit`). Kernels
# of ours compute most types instead: up to 512 places moegraph-rows.cu, more moegraph-wide.cu.
# Neither depends on which places are one token.
_MIN_TILED = 1024


class SweepGraphs:
    """Builds the graphs of sweeps at first use.

    hidden: where graphs read and leave the rows. layer_graphs: has the other memory between graphs,
    and `sum_rows`; None if all layers are full and nobody reads the ids. sums_last: see
    `LayerGraphs`. reads_ids: the host wants the choice in full layers too.
    """

    def __init__(
        self,
        stage: Stage,
        graphs: GraphCache,
        hidden: HiddenRows,
        memory: SweepMemory,
        ring: Ring | None,
        layer_graphs: LayerGraphs | None,
        sums_last: bool,
        reads_ids: bool,
    ) -> None:
        self._stage, self._graphs, self._hidden = stage, graphs, hidden
        self._memory, self._ring, self._layer_graphs = memory, ring, layer_graphs
        self._sums_last, self._reads_ids = sums_last, reads_ids
        self._n_nodes_mixer, self._n_nodes_moe = 160, 128 + 10 * stage.hp.n_expert_used

    @property
    def _carry(self) -> CarryBuffers:
        if self._layer_graphs is None:
            raise InternalError("a full layer has no carry buffers")
        return self._layer_graphs.carry

    def _of_layer(self, il: int, shape: PassShape) -> PassShape:
        """Return what matters to a layer: without a KV cache, a graph serves any length."""
        return shape if self._stage.hp.layer(il).kv else shape._replace(n_kv=PAGED)

    def mixer(self, il: int, n: int, shape: PassShape) -> BuiltGraph:
        """Return `mixer` for n rows; its outputs: the ids I32 [n_used, n] for the host.

        shape: of the rectangle of the chunk.
        """
        shape = self._of_layer(il, shape)
        return self._graphs.get(
            ("sweep mixer", il, n, shape),
            self._n_nodes_mixer,
            lambda b: self._build_mixer(b, il, n, shape),
        )

    def layer(self, il: int, n: int, shape: PassShape) -> BuiltGraph:
        """Return `layer` for n rows; its outputs: the ids, or None if nobody reads them."""
        shape = self._of_layer(il, shape)
        return self._graphs.get(
            ("sweep layer", il, n, shape),
            self._n_nodes_mixer + self._n_nodes_moe,
            lambda b: self._build_layer(b, il, n, shape),
        )

    def experts(self, il: int, n: int) -> BuiltGraph:
        """Return `experts` for n rows."""
        return self._graphs.get(
            ("sweep experts", il, n), self._n_nodes_moe, lambda b: self._build_experts(b, il, n)
        )

    def unit_inputs(self, turn: int, n_padded: int) -> BuiltGraph:
        """Return `inputs`, which reads what `SweepMemory.write_unit` wrote in that turn.

        A copy that the driver makes would wait until the experts that are on their way have
        arrived: the device has one engine for all of them.
        """
        return self._graphs.get(
            ("sweep inputs", turn, n_padded), 4,
            lambda b: self._memory.gather_unit(b, turn, n_padded),
        )  # fmt: skip

    def unit(self, il: int, group: int, n_padded: int) -> BuiltGraph:
        """Return `unit` over a group of the ring, for layers of layer il's kind."""
        ring = self._ring
        return self._graphs.get(
            ("sweep unit", ring and ring.kind(il), group, n_padded),
            64,
            lambda b: self._build_unit(b, il, group, n_padded),
        )

    def sum_rows(self, il: int, n: int) -> BuiltGraph | None:
        """Return `sum_rows` for n rows; None if the device adds to a finished sum."""
        layer_graphs = self._layer_graphs
        if layer_graphs is None or not self._sums_last:
            return None
        return self._graphs.get(
            ("sum_rows", il, n), self._n_nodes_moe, lambda b: layer_graphs.sum_rows(b, n, il)
        )

    def head(self, n: int, results: Results) -> BuiltGraph:
        """Return `head` for the n rows that were copied to l_out."""
        return self._graphs.get(("sweep head", n, results), 64, lambda b: self._head(b, n, results))

    def _head(self, b: Builder, n: int, results: Results) -> object:
        m = self._stage
        norm = build_input_norm(b, m, self._hidden.leaf(b, n), m.hp.n_layer)
        if m.weights.head is None:
            raise InternalError("a stage without a head has no results")
        draws = self._memory.inputs.draws(b) if results is Results.CANDIDATES else None
        return build_head(b, m.weights.head, norm, None, draws, results)

    def _embd(self, b: Builder, name: str, n: int) -> Tensor:
        """Return a leaf F32 [n_embd, n] that reads the carry buffer of that name."""
        return self._carry.leaf(b, name, F32, self._stage.hp.n_embd, n)

    def _mixer_router(self, b: Builder, il: int, n: int, shape: PassShape) -> Routed:
        m, x = self._stage, self._hidden.leaf(b, n)
        inputs = self._memory.inputs.leaves(b, x, shape)
        if inputs.joint:
            x = inputs.joint.fill(b, x)
        norm = build_input_norm(b, m, x, il)
        return build_mixer_router(b, m, inputs, shape, x, norm, il)

    def _ids(self, b: Builder, topk: Tensor) -> Tensor:
        """Append a copy of the choice; return its leaf, I32 [n_used, n]."""
        ids = self._carry.leaf(b, "slots", I32, topk.ne[0], topk.ne[1])
        b.expand(b.cpy(topk, ids))
        return ids

    def _build_mixer(self, b: Builder, il: int, n: int, shape: PassShape) -> Tensor:
        r = self._mixer_router(b, il, n, shape)
        self._carry.put(r.residual, "residual")
        self._carry.put(r.post_norm, "post_norm")
        self._carry.put(r.routing.weights_data, "weights")
        return self._ids(b, r.routing.topk)

    def _build_layer(self, b: Builder, il: int, n: int, shape: PassShape) -> Tensor | None:
        r = self._mixer_router(b, il, n, shape)
        ids = self._ids(b, r.routing.topk) if self._reads_ids else None
        topk, weights = r.routing.topk, r.routing.weights
        x = build_moe(b, self._stage, r.residual, r.post_norm, topk, weights, il)
        self._hidden.put(x)
        return ids

    def _build_experts(self, b: Builder, il: int, n: int) -> None:
        m, k = self._stage, self._stage.hp.n_expert_used
        ids = self._carry.leaf(b, "slots", I32, k, n)
        weights = self._carry.leaf(b, "weights", F32, 1, k, n)
        residual, post_norm = self._embd(b, "residual", n), self._embd(b, "post_norm", n)
        bank = m.banks.layer(il)
        slots = build_slots(b, m.banks.tables[il], ids)
        if not self._sums_last:
            x = build_moe(b, m, residual, post_norm, slots, weights, il)
            self._hidden.put(x)
            return
        if bank.n_slots == 0:
            rows = b.fill(self._carry.leaf(b, "expert_rows", F32, m.hp.n_embd, k, n), 0.0)
        else:
            rows = m.hp.expert_rows(b, bank.parts, post_norm, slots, weights, il)
        self._carry.put(b.expand(rows), "expert_rows")

    def _build_unit(self, b: Builder, il: int, group: int, n_padded: int) -> None:
        memory, n_embd = self._memory, self._stage.hp.n_embd
        token, slot, at, target, *terms = memory.unit_leaves(b, n_padded)
        if self._ring is None:
            return
        # CUDA makes tiles for as many rows of an expert as there are tokens. So a token here is
        # about as many places as there are experts, whichever those places chose: a power of two,
        # which divides the padded places.
        n = 1 << self._ring.n_each.bit_length() - 1 if n_padded >= _MIN_TILED else 1
        cur = b.get_rows(memory.tensor("post_norm"), token)
        cur = b.reshape(cur, n_embd, n, n_padded // n)
        weights = b.reshape(b.get_rows(memory.tensor("weights"), at), 1, n, n_padded // n)
        slots = b.reshape(slot, n, n_padded // n)
        parts = self._ring.bank(il, group).parts
        rows = self._stage.hp.expert_rows(b, parts, cur, slots, weights, -1)
        rows = b.reshape(rows, n_embd, n_padded)
        if self._sums_last:
            b.expand(b.set_rows(memory.tensor("expert_rows"), rows, at))
            return
        total = b.get_rows(memory.hidden, target)
        for term in terms:
            total = b.add_rows(total, rows, term)
        b.expand(b.set_rows(memory.hidden, total, target))
