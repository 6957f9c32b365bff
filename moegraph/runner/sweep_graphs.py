"""The memory that all rows of a prompt need on the device between two layers, and the graphs.

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

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PAGED, PassShape
from ..errors import InternalError
from ..experts.crossing import padded
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, I32, Builder, Tensor
from ..ggml.places import write_unit
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.chunk import ChunkInputs
from ..graphs.experts import build_slots
from ..graphs.head import Results, build_head
from ..graphs.hidden import HiddenRows
from ..graphs.layer import Routed, build_input_norm, build_mixer_router, build_moe
from ..resident.bank import Ring
from ..resident.layout import UNIT_SHARE, most_terms
from ..resident.stage import Stage
from ..units import round_up
from .layer_graphs import CarryBuffers, LayerGraphs

# Host copies of the inputs of units that may be under way at once.
_N_HOST = 8


class SweepMemory:
    """Fixed memory for a sweep of at most n_rows rows in chunks of at most max_rows.

    hidden: F32 [n_embd, n_rows + 1], the input of the layer that is computed next, then its
    output. If experts may be missing: post_norm F32 [n_embd, n_rows], weights F32 [1, n_used *
    n_rows + 1], and with_rows (CPU device, --deterministic) expert_rows F32 [n_embd, n_used *
    n_rows + 1]. The last row of hidden, weights and expert_rows is spare: padding goes there.
    ids: I32 numpy [2, n_rows * n_used], the choice in a layer and in the one before.
    most: places of a unit, at most.
    """

    def __init__(
        self, stage: Stage, max_rows: int, n_rows: int, may_lack: bool, with_rows: bool
    ) -> None:
        device, hp = stage.device, stage.hp
        self._device, self.n_rows, self.max_rows = device, n_rows, max_rows
        n_places = hp.n_expert_used * n_rows
        self._n_terms = most_terms(hp.n_expert_used, hp.n_expert)
        # on the CPU the bits of a product depend on how many rows chose the expert: see `Sweep`
        share = 1 if device.can.exact_sums else UNIT_SHARE
        self.most = max(64, hp.n_expert_used * max_rows // share + 1)
        shapes = {"hidden": (hp.n_embd, n_rows + 1)}
        if may_lack:
            shapes |= {"post_norm": (hp.n_embd, n_rows), "weights": (1, n_places + 1)}
            shapes["unit"] = (1, self._n_words(padded(self.most)))
            shapes["unit_rows"] = (1, 4 + self._n_terms)
        if with_rows:
            shapes["expert_rows"] = (hp.n_embd, n_places + 1)
        self._context = Context(len(shapes))
        tensors: dict[str, Tensor] = {}
        offsets, size = {}, 0
        for name, ne in shapes.items():
            offsets[name] = size
            size = round_up(size + 4 * ne[0] * ne[1], device.alignment)
            tensors[name] = C.ggml_new_tensor_2d(self._context.ptr, F32, *ne)
        self._buffer = device.buffer(size, f"a sweep of {n_rows} rows", "lower -c or -ub")
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        for name, tensor in tensors.items():
            place(self._buffer, tensor, offsets[name])
        self.hidden = tensors["hidden"]
        self._tensors, self._offsets = tensors, offsets
        if may_lack:
            rows = np.arange(4 + self._n_terms, dtype=np.int32)
            C.ggml_backend_tensor_set(tensors["unit_rows"], ffi.from_buffer(rows), 0, rows.nbytes)
        self.inputs = ChunkInputs(stage, max_rows, n_rows)
        self._ids_host = device.host_buffer(8 * n_places)
        self.ids: npt.NDArray[np.int32] = self._ids_host.array[: 8 * n_places].view(np.int32)
        self.ids = self.ids.reshape(2, n_places)
        self._host_step = 4 * self._n_words(padded(self.most))
        # graphs read it: see `SweepGraphs.unit_inputs`
        self._units_host = device.host_buffer(self._host_step * _N_HOST, must_pin=True)
        self._sent = [device.event() for _ in range(_N_HOST)]
        self._turn = 0
        self.n_bytes = size + self.inputs.n_bytes

    def _n_words(self, n_padded: int) -> int:
        """Return the words of the inputs of a unit."""
        return (4 + self._n_terms) * n_padded

    def ids_address(self, turn: int, at: int) -> Any:
        """Return where the ids of a layer are written, from place `at` on."""
        return self._ids_host.address(4 * (turn * self.ids.shape[1] + at))

    def tensor(self, name: str) -> Tensor:
        """Return post_norm, weights or expert_rows."""
        return self._tensors[name]

    def unit_leaves(self, b: Builder, n_padded: int) -> list[Tensor]:
        """Return the inputs of a unit: token, slot, place, target, and one leaf of each round."""
        leaves = []
        for at in range(4 + self._n_terms):
            leaf = b.leaf(I32, (n_padded,), "unit")
            place(self._buffer, leaf, self._offsets["unit"] + 4 * at * n_padded)
            leaves.append(leaf)
        return leaves

    def gather_unit(self, b: Builder, turn: int, n_padded: int) -> None:
        """Append the copy of a unit's inputs from host memory to where `unit_leaves` reads them."""
        n = 4 + self._n_terms
        host, rows = b.leaf(I32, (n_padded, n), "unit_host"), b.leaf(I32, (n,), "unit_rows")
        place(self._units_host, host, turn * self._host_step)
        place(self._buffer, rows, self._offsets["unit_rows"])
        found = b.get_rows(host, rows)
        place(self._buffer, found, self._offsets["unit"])
        b.expand(found)

    def write_unit(
        self, places: npt.NDArray[np.int32], ids: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
    ) -> tuple[int, int]:  # fmt: skip
        """Write the inputs of a unit to host memory; return the turn and the padded places.

        places: fewer than `most`. Others: as in `write_unit`. Launch what reads the turn, then call
        `sent_unit`.
        """
        turn, self._turn = self._turn, (self._turn + 1) % _N_HOST
        sent, n_used = self._sent[turn], self.ids.shape[1] // self.n_rows
        if sent:
            sent.wait()
        n_padded = padded(len(places))
        at, n_bytes = turn * self._host_step, 4 * self._n_words(n_padded)
        words = self._units_host.array[at : at + n_bytes].view(np.int32)
        n_rounds = write_unit(
            places, ids, slots, n_used, self.n_rows, n_padded, self._n_terms, words
        )
        words[(4 + n_rounds) * n_padded :] = -1  # one graph for any number of rounds
        return turn, n_padded

    def sent_unit(self, turn: int) -> None:
        """Note that what reads the inputs of this turn is enqueued."""
        sent = self._sent[turn]
        if sent:
            C.ggml_backend_event_record(sent.ptr, self._device.compute.ptr)

    def copy(self, source: Tensor, source_at: int, to: Tensor, to_at: int, n: int) -> None:
        """Enqueue a copy of n rows between two tensors F32 [m, ...], from rows source_at, to_at."""
        size = source.nb[1]
        C.mg_copy_bytes(
            self._device.compute.ptr, source, size * source_at, to, size * to_at, size * n
        )

    def close(self) -> None:
        """Free all memory."""
        parts: list[Any] = [
            *self._sent, self._units_host, self._ids_host, self.inputs, self._buffer, self._context,
        ]  # fmt: skip
        for part in parts:
            if part:
                part.close()


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
