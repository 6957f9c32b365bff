"""What the sweeps of one runner share: memory, graphs, events, and the ring that experts pass.

    mixer     mixer and router of a chunk of one layer
    experts   the expert FFN of a chunk over the resident experts
    layer     both, in a full layer
    inputs    copies the inputs of a unit from host memory
    unit      experts in the ring, for rows of any chunk that chose them
    sum_rows  where `LayerGraphs.sums_last`: sums the rows of all experts in routing order
    head      output matrix and argmax

A graph does not depend on where in the prompt its rows are: they are copied to fixed memory before
it and from there after it (`HiddenRows`, `CarryBuffers`), and units name their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch.blocks.experts import build_expert_rows
from ..arch.inputs import PAGED, PassInputs, PassShape
from ..errors import InternalError
from ..experts.crossing import Group, padded
from ..experts.residency import Residency
from ..ggml.handles import Owner
from ..ggml.lib import C, ffi
from ..ggml.memory import Block, place
from ..ggml.ops import I32, Builder, Tensor
from ..ggml.places import write_unit
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.chunk import ChunkInputs, Form, Segment
from ..graphs.head import Results, build_head
from ..graphs.inputs import HiddenRows
from ..graphs.layer import (
    Routed,
    build_dense_layer,
    build_input_norm,
    build_mixer_router,
    build_moe,
    build_slots,
)
from ..resident.bank import Ring
from ..resident.layout import N_GROUPS, PAGE, UNIT_SHARE, group_size, most_terms
from ..resident.stage import Stage
from .layer_graphs import LayerGraphs
from .results import ResultMemory

# Steps that may be enqueued ahead of the device: few, because others wait for them.
AHEAD = 3
# Host copies of the inputs of units that may be under way at once.
_N_HOST = 8
# Places from which several are one token, for the sake of ggml's tiles (see `_build_unit`). Kernels
# of ours compute most types instead: up to 512 places moegraph-rows.cu, more moegraph-wide.cu.
# Neither depends on which places are one token.
_MIN_TILED = 1024
Observer = Callable[[int, npt.NDArray[np.int32]], None]


class SweepMemory(Owner):
    """Fixed memory for a sweep of at most n_rows rows in chunks of at most max_rows.

    hidden: F32 [n_embd, n_rows + 1], the input of the layer that is computed next, then its
    output. If experts may be missing: post_norm F32 [n_embd, n_rows], weights F32 [1, n_used *
    n_rows + 1], and with_rows (`LayerGraphs.sums_last`) expert_rows F32 [n_embd, n_used *
    n_rows + 1]. The last row of hidden, weights and expert_rows is spare: padding goes there.
    ids: I32 numpy [2, n_rows * n_used], the choice in a layer and in the one before.
    most: places of a unit, at most. n_terms: of its places that a row may have, at most.
    """

    def __init__(
        self, stage: Stage, max_rows: int, n_rows: int, may_lack: bool, with_rows: bool
    ) -> None:
        device, hp = stage.device, stage.hp
        self._device, self.n_rows, self.max_rows = device, n_rows, max_rows
        n_places = hp.n_expert_used * n_rows
        self.n_terms = most_terms(hp.n_expert_used, hp.n_expert)
        # on the CPU the bits of a product depend on how many rows chose the expert: see `Sweep`
        share = 1 if device.can.exact_sums else UNIT_SHARE
        self.most = max(64, hp.n_expert_used * max_rows // share + 1)
        shapes = {"hidden": (hp.n_embd, n_rows + 1)}
        if may_lack:
            shapes |= {"post_norm": (hp.n_embd, n_rows), "weights": (hp.n_factors, n_places + 1)}
            shapes["unit"] = (1, self._n_words(padded(self.most)))
            shapes["unit_rows"] = (1, 4 + self.n_terms)
        if with_rows:
            shapes["expert_rows"] = (hp.n_embd, n_places + 1)
        what = f"a sweep of {n_rows} rows"
        self._block = self.own(Block(device, shapes, what, "lower -c or -ub"))
        self.tensors = self._block.tensors
        self.hidden = self.tensors["hidden"]
        if may_lack:
            self._block.set("unit_rows", np.arange(4 + self.n_terms, dtype=np.int32))
        self.inputs = self.own(ChunkInputs(stage, max_rows, n_rows))
        self._ids_host = self.own(device.host_buffer(8 * n_places))
        self.ids: npt.NDArray[np.int32] = self._ids_host.array[: 8 * n_places].view(np.int32)
        self.ids = self.ids.reshape(2, n_places)
        self._host_step = 4 * self._n_words(padded(self.most))
        # graphs read it: see `SweepGraphs.unit_inputs`
        size = self._host_step * _N_HOST
        self._units_host = self.own(device.host_buffer(size, must_pin=True))
        self._sent = [self.own(device.event()) for _ in range(_N_HOST)]
        self._turn = 0
        self.n_bytes = self._block.n_bytes + self.inputs.n_bytes

    def _n_words(self, n_padded: int) -> int:
        return (4 + self.n_terms) * n_padded

    def reads(self, ids: Tensor | None, il: int, row: int, n: int) -> tuple[object, int]:
        """Return the copies to the host of what n rows from `row` on choose in layer il."""
        if ids is None:
            return ffi.NULL, 0
        k = self.ids.shape[1] // self.n_rows
        host = self._ids_host.address(4 * (il % 2 * self.ids.shape[1] + row * k))
        return ffi.new("struct mg_readback[1]", [{"src": ids, "dst": host, "size": 4 * k * n}]), 1

    def unit_leaves(self, b: Builder, n_padded: int) -> list[Tensor]:
        """Return the inputs of a unit: token, slot, place, target, and one leaf of each round."""
        return [
            self._block.leaf(b, "unit", I32, n_padded, at=4 * at * n_padded)
            for at in range(4 + self.n_terms)
        ]

    def gather_unit(self, b: Builder, turn: int, n_padded: int) -> None:
        """Append the copy of a unit's inputs from host memory to where `unit_leaves` reads them."""
        n = 4 + self.n_terms
        host = b.leaf(I32, (n_padded, n), "unit_host")
        place(self._units_host, host, turn * self._host_step)
        rows = self._block.leaf(b, "unit_rows", I32, n)
        b.expand(self._block.put(b.get_rows(host, rows), "unit"))

    def write_unit(
        self, places: npt.NDArray[np.int32], ids: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
    ) -> tuple[int, int]:  # fmt: skip
        """Write the inputs of a unit to host memory; return the turn and the padded places.

        places: fewer than `most`. Others: as in `write_unit`. Launch what reads the turn, then
        call `sent_unit`.
        """
        turn, self._turn = self._turn, (self._turn + 1) % _N_HOST
        sent, n_used = self._sent[turn], self.ids.shape[1] // self.n_rows
        if sent:
            sent.wait()
        n_padded = padded(len(places))
        at, n_bytes = turn * self._host_step, 4 * self._n_words(n_padded)
        words = self._units_host.array[at : at + n_bytes].view(np.int32)
        n_rounds = write_unit(
            places, ids, slots, n_used, self.n_rows, n_padded, self.n_terms, words
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


class SweepGraphs:
    """Builds the graphs of sweeps at first use.

    hidden: where graphs read and leave the rows. layer_graphs: has the other memory between graphs,
    and `sum_rows`; None if all layers are full and the ids are not read.
    """

    def __init__(
        self, stage: Stage, graphs: GraphCache, hidden: HiddenRows, memory: SweepMemory,
        ring: Ring | None, layer_graphs: LayerGraphs | None,
    ) -> None:  # fmt: skip
        self._stage, self._graphs, self._hidden = stage, graphs, hidden
        self._memory, self._ring, self._layer_graphs = memory, ring, layer_graphs
        self._sums_last = layer_graphs is not None and layer_graphs.sums_last
        # graphs that use it are built only where layers may lack experts, or ids are read
        self._carry: Any = layer_graphs.carry if layer_graphs else None
        self._n_nodes_mixer, self._n_nodes_moe = 160, 128 + 10 * stage.hp.n_expert_used

    def _get(self, name: str, n_nodes: int, build: Callable[..., Any], *at: Any) -> BuiltGraph:
        return self._graphs.get(("sweep", name, *at), n_nodes, lambda b: build(b, *at))

    def _of_layer(self, il: int, shape: PassShape) -> PassShape:
        """Return what matters to a layer: without a KV cache, a graph serves any length."""
        same = shape._replace(n_kv=PAGED, has_axes=False)
        return shape if self._stage.hp.layer(il).kv else same

    def mixer(self, il: int, n: int, shape: PassShape) -> BuiltGraph:
        """Return `mixer` for n rows; its outputs: the ids I32 [n_used, n] for the host.

        shape: of the rectangle of the chunk.
        """
        shape = self._of_layer(il, shape)
        return self._get("mixer", self._n_nodes_mixer, self._build_mixer, il, n, shape)

    def layer(self, il: int, n: int, shape: PassShape) -> BuiltGraph:
        """Return `layer` for n rows; its outputs: the ids, or None if they are not read."""
        n_nodes, shape = self._n_nodes_mixer + self._n_nodes_moe, self._of_layer(il, shape)
        return self._get("layer", n_nodes, self._build_layer, il, n, shape)

    def experts(self, il: int, n: int) -> BuiltGraph:
        """Return `experts` for n rows."""
        return self._get("experts", self._n_nodes_moe, self._build_experts, il, n)

    def unit_inputs(self, turn: int, n_padded: int) -> BuiltGraph:
        """Return `inputs`, which reads what `SweepMemory.write_unit` wrote in that turn.

        A copy that the driver makes would wait until the experts that are on their way have
        arrived: the device has one engine for all of them.
        """
        return self._get("inputs", 4, self._memory.gather_unit, turn, n_padded)

    def unit(self, il: int, group: int, n_padded: int) -> BuiltGraph:
        """Return `unit` over a group of the ring, for layers of layer il's kind."""
        ring = self._ring
        return self._graphs.get(
            ("sweep unit", ring and ring.kind(il), group, n_padded),
            48 + 4 * self._memory.n_terms,
            lambda b: self._build_unit(b, il, group, n_padded),
        )

    def sum_rows(self, il: int, n: int) -> BuiltGraph:
        """Return `sum_rows` for n rows."""
        layer_graphs: Any = self._layer_graphs
        return self._graphs.get(
            ("sum_rows", il, n), self._n_nodes_moe, lambda b: layer_graphs.sum_rows(b, n, il)
        )

    def head(self, n: int, results: Results) -> BuiltGraph:
        """Return `head` for the n rows that were copied to l_out."""
        return self._get("head", 64, self._head, n, results)

    def chunk(self, il: int, n: int, shape: PassShape) -> None:
        """Build the graphs of a chunk of n rows in a layer, if they are not built.

        shape: of the rectangle of the chunk.
        """
        if self._stage.banks.n_slots[il] == self._stage.hp.n_expert:
            self.layer(il, n, shape)
        else:
            self.mixer(il, n, shape)
            self.experts(il, n)

    def reserve(self) -> None:
        """Build the largest graphs, so that the shared block never grows later."""
        stage, n, inputs = self._stage, self._memory.max_rows, self._memory.inputs
        hp, state = stage.hp, stage.state
        shapes = [PassShape(n, 1, inputs.n_kv(state.n_ctx), 0)]
        if state.n_seq > 1:  # rows rounded up, and rows of several sequences
            shapes.append(shapes[0]._replace(is_ragged=True))
            if n > 1 and state.n_ctx >= 2 * PAGE:
                shapes.append(
                    PassShape(n // 2, 2, inputs.n_kv(state.n_ctx // 2), 0, is_ragged=True)
                )
        seen = set()
        for il in stage.layers:
            full = stage.banks.n_slots[il] == hp.n_expert
            kind = hp.layer(il), full, self._ring and not full and self._ring.kind(il)
            if kind in seen:
                continue
            seen.add(kind)
            for shape in shapes:
                self.chunk(il, n, shape)
            if self._sums_last and not full:
                self.sum_rows(il, n)
            if not full:
                self.unit(il, 0, padded(self._memory.most - 1))

    def _head(self, b: Builder, n: int, results: Results) -> object:
        m = self._stage
        norm = build_input_norm(b, m, self._hidden.leaf(b, n), m.hp.n_layer)
        if m.weights.head is None:
            raise InternalError("a stage without a head has no results")
        draws = self._memory.inputs.draws(b) if results is Results.CANDIDATES else None
        return build_head(b, m.weights.head, norm, None, draws, results)

    def _layer_inputs(
        self, b: Builder, il: int, n: int, shape: PassShape
    ) -> tuple[PassInputs, Tensor, Tensor]:
        """Append the layer's input rows and their norm."""
        m, x = self._stage, self._hidden.leaf(b, n)
        inputs = self._memory.inputs.leaves(b, n, shape)
        if inputs.joint:
            x = inputs.joint.fill(b, x)
        return inputs, x, build_input_norm(b, m, x, il)

    def _mixer_router(self, b: Builder, il: int, n: int, shape: PassShape) -> Routed:
        inputs, x, norm = self._layer_inputs(b, il, n, shape)
        return build_mixer_router(b, self._stage, inputs, shape, x, norm, il)

    def _ids(self, b: Builder, topk: Tensor) -> Tensor:
        """Append a copy of the choice; return its leaf, I32 [n_used, n]."""
        ids: Tensor = self._carry.leaf(b, "slots", I32, topk.ne[0], topk.ne[1])
        b.expand(b.cpy(topk, ids))
        return ids

    def _build_mixer(self, b: Builder, il: int, n: int, shape: PassShape) -> Tensor:
        r = self._mixer_router(b, il, n, shape)
        self._carry.put(r.residual, "residual")
        self._carry.put(r.post_norm, "post_norm")
        self._carry.put(r.routing.weights_data, "weights")
        return self._ids(b, r.routing.topk)

    def _build_layer(self, b: Builder, il: int, n: int, shape: PassShape) -> Tensor | None:
        if not self._stage.hp.layer(il).is_routed:
            inputs, x, norm = self._layer_inputs(b, il, n, shape)
            self._hidden.put(build_dense_layer(b, self._stage, inputs, shape, x, norm, il))
            return None
        r = self._mixer_router(b, il, n, shape)
        ids = self._ids(b, r.routing.topk) if self._layer_graphs else None
        topk, weights = r.routing.topk, r.routing.weights
        x = build_moe(b, self._stage, r.residual, r.post_norm, topk, weights, il)
        self._hidden.put(x)
        return ids

    def _build_experts(self, b: Builder, il: int, n: int) -> None:
        m, c, layer_graphs = self._stage, self._carry, self._layer_graphs
        slots = build_slots(b, m.banks.tables[il], c.leaf(b, "slots", I32, m.hp.n_expert_used, n))
        post_norm, weights = c.embd(b, "post_norm", n), c.weights(b, n)
        if layer_graphs and layer_graphs.sums_last:
            layer_graphs.put_rows(b, m.banks.layer(il), post_norm, slots, weights, il)
        else:
            residual = c.embd(b, "residual", n)
            self._hidden.put(build_moe(b, m, residual, post_norm, slots, weights, il))

    def _build_unit(self, b: Builder, il: int, group: int, n_padded: int) -> None:
        tensors, n_embd = self._memory.tensors, self._stage.hp.n_embd
        token, slot, at, target, *terms = self._memory.unit_leaves(b, n_padded)
        if self._ring is None:
            return
        # CUDA makes tiles for as many rows of an expert as there are tokens. So a token here is
        # about as many places as there are experts, whichever those places chose: a power of two,
        # which divides the padded places.
        n = 1 << self._ring.n_each.bit_length() - 1 if n_padded >= _MIN_TILED else 1
        cur = b.get_rows(tensors["post_norm"], token)
        cur = b.reshape(cur, n_embd, n, n_padded // n)
        weights = b.get_rows(tensors["weights"], at)
        weights = b.reshape(weights, weights.ne[0], n, n_padded // n)
        slots = b.reshape(slot, n, n_padded // n)
        parts = self._ring.bank(il, group).parts
        rows = build_expert_rows(b, parts, cur, slots, weights, -1, self._stage.hp.glu)
        rows = b.reshape(rows, n_embd, n_padded)
        if self._sums_last:
            b.expand(b.set_rows(tensors["expert_rows"], rows, at))
            return
        total = b.get_rows(tensors["hidden"], target)
        for term in terms:
            total = b.add_rows(total, rows, term)
        b.expand(b.set_rows(tensors["hidden"], total, target))


class Sweeps(Owner):
    """The parts of a runner that its sweeps use, one sweep at a time.

    memory: for the rows of a sweep. carried: where graphs read and leave rows, by name: F32
    [n_embd, rows], or [1, n_used * rows] for weights. ring: None if no expert can be missing.
    residency, layer_graphs: None if the runner computes a pass as one graph. launch: see
    `GraphCache`.
    routed, layer_done, paces: events after the choice of a chunk, after a layer, after a step.
    ring_events: of each group: all that read it is done; all uploads to it are done.
    """

    def __init__(
        self, stage: Stage, graphs: GraphCache, results: ResultMemory, max_rows: int, n_rows: int,
        hidden: HiddenRows, residency: Residency | None = None,
        layer_graphs: LayerGraphs | None = None, observers: Sequence[Observer] = (),
        ring_groups: int = 0,
    ) -> None:  # fmt: skip
        """ring_groups: groups of the ring; 0: as few as make sense."""
        self.stage, self.device, self.results = stage, stage.device, results
        self.launch = graphs.launch
        self.residency, self._observers = residency, observers
        self.misses = layer_graphs.misses if layer_graphs else None
        self.sums_last = layer_graphs is not None and layer_graphs.sums_last
        device, own, self.ring = stage.device, self.own, None
        n_groups = 0 if stage.is_full else ring_groups or N_GROUPS
        if n_groups:
            self.ring = own(Ring(device, stage.store, n_groups, group_size(stage.hp.n_expert)))
        has_ring = self.ring is not None
        self.memory = own(SweepMemory(stage, max_rows, n_rows, has_ring, self.sums_last))
        self.graphs = SweepGraphs(stage, graphs, hidden, self.memory, self.ring, layer_graphs)
        self.carried = {"l_out": hidden.all, **(layer_graphs.carry.tensors if layer_graphs else {})}
        self.routed = [own(device.event()), own(device.event())]
        self.layer_done = [own(device.event()), own(device.event())]
        self.paces = [own(device.event()) for _ in range(AHEAD)]
        self.ring_events = [(own(device.event()), own(device.event())) for _ in range(n_groups)]

    def send(self, il: int, group: int, pairs: list[tuple[int, int]]) -> None:
        """Enqueue uploads of (expert, slot in the group)."""
        if self.misses and self.ring:
            self.misses.uploads.send(il, self.ring.bank(il, group), pairs)

    def vacate(self, group: Group, slot_of: Mapping[int, int]) -> None:
        """Copy experts of a group into slots of their layer; offer the others to host memory.

        slot_of: expert -> slot. The slots' last readers and the next ones are on the same stream.
        """
        if self.residency is None or self.misses is None or self.ring is None:
            return
        il = group.il
        kept = [(expert, slot_of[expert]) for expert in group.experts if expert in slot_of]
        self.residency.keep(il, kept)
        self.misses.uploads.displace(il, kept, group.experts, self.ring.bank(il, group.index))
        if not kept:
            return
        packing = self.misses.store.packing(il)
        at = {expert: i for i, expert in enumerate(group.experts)}
        pairs = ffi.new("int32_t[]", [n for expert, slot in kept for n in (at[expert], slot)])
        C.mg_copy_experts(
            self.device.compute.ptr, self.ring.bank(il, group.index).to_fill,
            self.stage.banks.layer(il).to_fill, pairs, len(kept), packing.stride, packing.n_bytes,
        )  # fmt: skip

    def record(
        self, il: int, ids: npt.NDArray[np.int32], counts: npt.NDArray[np.int32] | None = None
    ) -> list[int]:
        """Record the choice in layer il, and return what has no slot; see `Residency.routed`."""
        remedy = self.residency.routed(il, ids, counts) if self.residency else None
        for observer in self._observers:
            observer(il, ids)
        return remedy.staged if remedy else []

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Return whether there is memory for such a chunk, rounded up."""
        inputs, n = self.memory.inputs, sum(segment.n for segment in segments)
        if n > self.memory.max_rows or max(one.end for one in segments) > self.stage.state.n_ctx:
            return False
        return inputs.fits(segments, Form.ROUNDED)
