"""The graphs of a layered pass in order, and the device memory that carries tensors between them.

    layers        mixer_router and moe of one or more layers
    add_uploaded  adds uploaded experts
    add_cpu       adds experts that the CPU computed
    sum_rows      CPU device, --deterministic, and models that do not add late: sums the rows of
                  all experts in routing order

The last three complete the last layer of a `layers` graph, so only that layer may lack experts. A
layer whose graph fetches its missing experts lacks none. The graph that completes a layer also
computes the input norm of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arch.blocks.experts import build_expert_rows
from ..arch.inputs import PAGED, PassShape
from ..errors import ConfigError, NativeError
from ..experts.residency import MissMode
from ..ggml.handles import Owner
from ..ggml.lib import C, ffi
from ..ggml.memory import Block, Sender, place
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.head import HeadOutputs, Results, build_head
from ..graphs.inputs import HiddenRows, InputBlock
from ..graphs.layer import (
    Routed,
    build_absent,
    build_dense_layer,
    build_expert_sum,
    build_fetched_slots,
    build_hidden,
    build_input_norm,
    build_last_hidden,
    build_mixer_router,
    build_moe,
    build_slots,
)
from ..resident.bank import Bank
from ..resident.stage import Stage
from .misses import MissHandler


class HostIds(NamedTuple):
    """Where ids arrive: I32 numpy array, valid after `RoutingReadback.wait`, and its address."""

    ids: npt.NDArray[np.int32]
    address: Any


class RoutingReadback(Owner):
    """Pinned host memory for the chosen ids of every layer of a stage.

    A copy node writes a layer's ids there while the graph runs, and the host watches that memory.
    On CUDA the copy runs beside the layer's experts (native/README.md: publish). A driver copy and
    an event would instead cost a boundary between two graphs, and the host about 10 us per miss.

    On the CPU device a launch returns after its graph is computed, so waits end at once.
    """

    def __init__(self, stage: Stage, max_rows: int) -> None:
        """Allocate memory for passes of at most max_rows rows."""
        self._device, self._first = stage.device, stage.layers.start
        n_layer, n_expert_used = len(stage.layers), stage.hp.n_expert_used
        self._n_used = n_expert_used
        self._stride = 4 * n_expert_used * max_rows
        size = self._stride * n_layer
        self._host = self.own(stage.device.host_buffer(size, must_pin=True))
        self._ids = self._host.array[:size].view(np.int32).reshape(n_layer, -1)
        self._stream: Any = stage.device.compute.ptr  # looked up once, not for each layer
        self.reset(max_rows)

    def export(self, b: Builder, ids: Tensor, il: int) -> None:
        """Append the copy of layer il's chosen ids, I32 [n_expert_used, n_tokens]."""
        target = b.leaf(I32, (ids.ne[0], ids.ne[1]), "ids_host")
        place(self._host, target, (il - self._first) * self._stride)
        b.expand(b.publish(ids, target))

    def of(self, il: int, n_tokens: int) -> HostIds:
        """Return where layer il's chosen ids arrive: I32 [n_tokens * n_expert_used]."""
        at, n = il - self._first, n_tokens * self._n_used
        address = ffi.cast("int32_t *", self._host.address(at * self._stride))
        return HostIds(self._ids[at, :n], address)

    def reset(self, n_tokens: int) -> None:
        """Set the ids to MG_NO_ID after a pass of n_tokens rows, once all its ids were read."""
        self._ids[:, : n_tokens * self._n_used] = C.MG_NO_ID

    def has(self, host_ids: HostIds) -> bool:
        """Return whether these ids seem to have been written; `wait` makes sure of it."""
        return not (host_ids.ids == C.MG_NO_ID).any()

    def wait(self, host_ids: HostIds) -> None:
        """Block until the device has written all these ids."""
        if not C.mg_wait_ids(self._stream, host_ids.address, host_ids.ids.size):
            raise NativeError(
                f"{self._device.name} finished a pass without writing the router's choice"
            )


class Replay(Owner):
    """Feeds recorded expert ids to the layers of a stage.

    ids: of the whole model, numpy shape [n_steps, n_layer, n_expert_used].
    """

    def __init__(self, stage: Stage, ids: npt.NDArray[np.int32]) -> None:
        """Check the recording and upload its first step."""
        device, hp, layers = stage.device, stage.hp, stage.layers
        wanted = (hp.n_layer, hp.n_expert_used)
        if ids.ndim != 3 or ids.shape[1:] != wanted or ids.shape[0] == 0:
            raise ConfigError(
                f"the routing trace has shape {ids.shape}; this model needs steps of "
                f"{wanted[0]} layers with {wanted[1]} experts"
            )
        if ids.min() < 0 or ids.max() >= hp.n_expert:
            raise ConfigError(
                f"the routing trace has ids {ids.min()} to {ids.max()}; "
                f"this model has experts 0 to {hp.n_expert - 1}"
            )
        self._recorded = np.ascontiguousarray(ids[:, layers.start : layers.stop], dtype=np.int32)
        self._first = layers.start
        self._n_used = hp.n_expert_used
        shapes = {"ids": (hp.n_expert_used, len(layers))}
        self._block = self.own(Block(device, shapes, "the routing trace", "drop --routing"))
        self._block.set("ids", self._recorded[0])
        self._sender, self._step = self.own(Sender(device, self._recorded[0].nbytes)), 0

    def leaf(self, b: Builder, il: int) -> Tensor:
        """Return a leaf that reads the current step's ids of layer il: I32 [n_expert_used, 1]."""
        at = 4 * self._n_used * (il - self._first)
        return self._block.leaf(b, "ids", I32, self._n_used, 1, at=at)

    def advance(self) -> None:
        """Enqueue the upload of the next step's ids, after the pass that uses the current ones."""
        self._step += 1
        ids = self._recorded[self._step % len(self._recorded)]
        self._sender.put(self._block.tensors["ids"], ids)


class CarryBuffers(Block):
    """Fixed device memory for tensors that one graph writes and a later one reads.

    l_out has memory of its own (`HiddenRows`).

    F32 [n_embd, n_tokens]: input_norm (of the next layer or the head), residual, post_norm.
    weights F32 [n_factors, n_expert_used, n_tokens]; slots I32 (for `add_uploaded`)
        [n_expert_used, n_tokens].
    cpu_out: result of the CPU, F32 [n_embd, n_tokens].
    with_rows (`LayerGraphs.sums_last`): there is expert_rows, F32 [n_embd, n_expert_used,
        n_tokens], and cpu_out has that shape.

    tensors: the memory as matrices, n_expert_used columns a row for weights and expert_rows.
    """

    def __init__(self, stage: Stage, max_rows: int, with_rows: bool, cpu_out: bool) -> None:
        n_embd, n_places = stage.hp.n_embd, stage.hp.n_expert_used * max_rows
        shapes = dict.fromkeys(("input_norm", "residual", "post_norm"), (n_embd, max_rows))
        shapes |= {"weights": (stage.hp.n_factors, n_places), "slots": (1, n_places)}
        if with_rows:
            shapes["expert_rows"] = n_embd, n_places
        if cpu_out:
            shapes["cpu_out"] = n_embd, n_places if with_rows else max_rows
        super().__init__(stage.device, shapes, "activations between graphs", "lower -ub")
        self._n_embd, self._n_used = n_embd, stage.hp.n_expert_used
        self._n_factors = stage.hp.n_factors

    def embd(self, b: Builder, name: str, n_tokens: int) -> Tensor:
        """Return a leaf F32 [n_embd, n_tokens] that reads the memory of that name."""
        return self.leaf(b, name, F32, self._n_embd, n_tokens)

    def weights(self, b: Builder, n_tokens: int) -> Tensor:
        """Return a leaf that reads the weights, F32 [n_factors, n_expert_used, n_tokens]."""
        return self.leaf(b, "weights", F32, self._n_factors, self._n_used, n_tokens)

    def expert_rows(self, b: Builder, n_tokens: int) -> Tensor:
        """Return a leaf that reads expert_rows, F32 [n_embd, n_expert_used, n_tokens]."""
        return self.leaf(b, "expert_rows", F32, self._n_embd, self._n_used, n_tokens)


class LayerGraphs(Owner):
    """Build functions for the graphs of one stage's layered pass.

    hidden: carries l_out from graph to graph, and from and to other stages.
    sums_last: graphs leave the rows of single experts, and `sum_rows` sums them. readback: brings
    the ids to the host. misses: source of fetched experts, and of the CPU's memory if it may
    compute experts. mode, in all methods: how the pass deals with missing experts.
    """

    def __init__(
        self, stage: Stage, inputs: InputBlock, hidden: HiddenRows, max_rows: int,
        replay: Replay | None, misses: MissHandler | None,
    ) -> None:  # fmt: skip
        self._stage, self._inputs, self._hidden = stage, inputs, hidden
        self._replay, self.misses = replay, misses
        device, self._cpu_experts = stage.device, misses.cpu_experts if misses else None
        adds_late = stage.hp.adds_late and not (device.can.exact_sums or device.is_invariant)
        self.sums_last = misses is not None and not adds_late
        self.readback = self.own(RoutingReadback(stage, max_rows))
        has_cpu = self._cpu_experts is not None
        self.carry = self.own(CarryBuffers(stage, max_rows, self.sums_last, has_cpu))

    def may_lack(self, il: int, mode: MissMode) -> bool:
        """Return whether `moe` of a layer may have to leave experts out."""
        is_partial = self._stage.banks.n_slots[il] < self._stage.hp.n_expert
        return is_partial and (il not in mode.fetch_layers or il in mode.short_layers)

    def exports(self, il: int, mode: MissMode) -> bool:
        """Return whether the CPU may have to compute experts of a layer."""
        return mode.cpu and il not in mode.fetch_layers and self.may_lack(il, mode)

    def layers(self, b: Builder, shape: PassShape, layers: range, mode: MissMode) -> None:
        """Append consecutive layers, of which only the last may lack experts."""
        stage, n_tokens, inp = self._stage, shape.n_tokens, self._inputs.leaves(b, shape)
        if layers[0] == stage.layers[0]:
            x = self._inputs.embd(b, n_tokens)
            norm = build_input_norm(b, stage, x, layers[0])
        else:
            x, norm = self._hidden.leaf(b, n_tokens), self.carry.embd(b, "input_norm", n_tokens)
        for il in layers:
            if il != layers[0]:
                norm = build_input_norm(b, stage, x, il)
            build_hidden(b, stage, x, norm, il)
            if not stage.hp.layer(il).is_routed:
                x = build_dense_layer(b, stage, inp, shape, x, norm, il)
                continue
            r = build_mixer_router(b, stage, inp, shape, x, norm, il)
            ids = self._replay.leaf(b, il) if n_tokens == 1 and self._replay else r.routing.topk
            slots, is_fetched = None, il in mode.fetch_layers
            if shape.is_ragged and self.may_lack(il, mode) and not is_fetched:
                # now, because the table has no row for an id of -1
                slots = build_absent(b, inp, b.expand(self._slots(b, ids, il, mode)))
            ids = build_absent(b, inp, ids)
            self._export(b, r, ids, il, self.exports(il, mode))
            slots = slots or self._slots(b, ids, il, mode)
            if self.may_lack(il, mode):
                self._moe_that_may_lack(b, r, slots, il)
                return
            x = build_moe(b, stage, r.residual, r.post_norm, slots, r.routing.weights, il)
        self._put_outputs(b, x, layers[-1])

    def _export(self, b: Builder, r: Routed, ids: Tensor, il: int, for_cpu: bool) -> None:
        """Append the copies of the ids, and of what the CPU needs, to the host.

        The ids come last: the host watches them, and once they arrive, the rest has too.
        """
        if for_cpu and self._cpu_experts:
            self._cpu_experts.export(b, r.post_norm, r.routing.weights)
        self.readback.export(b, ids, il)

    def _slots(self, b: Builder, ids: Tensor, il: int, mode: MissMode) -> Tensor:
        """Append the look-up of slots; missing experts are fetched, or get slot -1."""
        banks = self._stage.banks
        if self.misses and il in mode.fetch_layers:
            return build_fetched_slots(b, banks, il, ids, self.misses.store.rows[il])
        if self.may_lack(il, mode):
            return build_slots(b, banks.tables[il], ids)
        return ids  # in a full layer, the slot of an expert is its id

    def _moe_that_may_lack(self, b: Builder, r: Routed, slots: Tensor, il: int) -> None:
        """Append `moe` over the resident experts; put what the completing graphs need."""
        c, stage = self.carry, self._stage
        bank = stage.banks.layer(il)
        c.put(r.post_norm, "post_norm")
        c.put(r.routing.weights_data, "weights")
        if not self.sums_last:
            x = build_moe(b, stage, r.residual, r.post_norm, slots, r.routing.weights, il)
            self._put_outputs(b, x, il)
            return
        c.put(r.residual, "residual")
        self.put_rows(b, bank, r.post_norm, slots, r.routing.weights, il)

    def put_rows(
        self, b: Builder, bank: Bank, x: Tensor, slots: Tensor, weights: Tensor, il: int
    ) -> None:
        """Append the rows of the resident experts, and put them; zeros for others."""
        if bank.n_slots == 0:
            rows = b.fill(self.carry.expert_rows(b, x.ne[1]), 0.0)
        else:
            rows = build_expert_rows(b, bank.parts, x, slots, weights, il, self._stage.hp.glu)
        self.carry.put(b.expand(rows), "expert_rows")

    def head(self, b: Builder, shape: PassShape, results: Results) -> HeadOutputs | None:
        """Append the head, if there is one; it reads the norm that completes the last layer."""
        head = self._stage.weights.head
        if head is None:
            return None
        norm = self.carry.embd(b, "input_norm", shape.n_tokens)
        l_out = self._hidden.leaf(b, shape.n_tokens)
        inp = self._inputs.leaves(b, shape)
        build_last_hidden(b, self._stage, inp, shape, l_out, norm)
        return build_head(b, head, norm, inp.out_ids, inp.draws, results)

    def _put_outputs(self, b: Builder, l_out: Tensor, il: int) -> None:
        """Put layer il's output, and append and put the norm that follows it in this stage.

        Both are in one graph because CUDA adds and normalises in one kernel.
        """
        stage = self._stage
        self._hidden.put(l_out)
        if il < stage.layers[-1] or stage.has_head:
            self.carry.put(build_input_norm(b, stage, l_out, il + 1), "input_norm")

    def add_uploaded(self, b: Builder, n_tokens: int, il: int, bank: Bank) -> Tensor:
        """Append `add_uploaded` over a bank; return its input slots, I32 [n_expert_used, n_tokens].

        A slot below 0 adds nothing.
        """
        c = self.carry
        post_norm, weights = c.embd(b, "post_norm", n_tokens), c.weights(b, n_tokens)
        slots = c.leaf(b, "slots", I32, self._stage.hp.n_expert_used, n_tokens)
        rows = build_expert_rows(b, bank.parts, post_norm, slots, weights, -1, self._stage.hp.glu)
        if self.sums_last:
            c.put(b.expand(b.add(self.carry.expert_rows(b, n_tokens), rows)), "expert_rows")
        else:
            self._add_to_output(b, build_expert_sum(b, rows, -1), il)
        return slots

    def add_cpu(self, b: Builder, n_tokens: int, il: int) -> Tensor:
        """Append `add_cpu`; return its input, the CPU's result (shape: see `CarryBuffers`)."""
        c, hp = self.carry, self._stage.hp
        if self.sums_last:
            cpu_out = c.leaf(b, "cpu_out", F32, hp.n_embd, hp.n_expert_used, n_tokens)
            c.put(b.expand(b.add(self.carry.expert_rows(b, n_tokens), cpu_out)), "expert_rows")
        else:
            cpu_out = self.carry.embd(b, "cpu_out", n_tokens)
            self._add_to_output(b, cpu_out, il)
        return cpu_out

    def _add_to_output(self, b: Builder, delta: Tensor, il: int) -> None:
        """Add delta [n_embd, n_tokens] to the layer's output, and redo the norm that follows."""
        l_out = self._hidden.leaf(b, delta.ne[1])
        self._put_outputs(b, b.expand(b.add(l_out, delta)), il)

    def sum_rows(self, b: Builder, n_tokens: int, il: int) -> None:
        """Append the sum of the expert rows, then the shared expert and the residual."""
        moe = build_expert_sum(b, self.carry.expert_rows(b, n_tokens), il)
        residual, post_norm = (
            self.carry.embd(b, "residual", n_tokens),
            self.carry.embd(b, "post_norm", n_tokens),
        )
        stage = self._stage
        x = stage.hp.layer_end(b, stage.weights.layer(il), residual, post_norm, moe, il)
        self._put_outputs(b, x, il)


# Enough for sequences that take turns at any length; `GraphCache` limits the memory of the graphs.
_MAX_PLANS = 1024
# Most layers in one graph: in the first graph and in long passes, and in later graphs of up to
# _QUICK_ROWS rows. A short first graph lets the device start early, and a prompt is cancelled
# between graphs. Few rows are quick, and each graph boundary costs about 5 us on CUDA.
MERGED, MERGED_LATER = 4, 64
_QUICK_ROWS = 32


@dataclass(frozen=True)
class LaunchStep:
    """Consecutive layers in one graph, and the graphs that complete the last layer.

    ids: (il, I32 [n_tokens * n_expert_used]) of each router, in host memory. fetch_layers: layers
    whose graph fetches missing experts. lacking: the last layer, if it may lack experts. add: the
    graphs that add what its `moe` left out: `add_uploaded` of both staging banks (staging0,
    staging1) and of its own, if missing experts may get its slots; cpu, `add_cpu`, if the CPU may
    compute. sum_rows: the graph of that name (CPU device).
    """

    graph: BuiltGraph
    ids: list[tuple[int, HostIds]]
    fetch_layers: frozenset[int] = frozenset()
    lacking: int | None = None
    add: Mapping[str, BuiltGraph] = field(default_factory=dict)
    sum_rows: BuiltGraph | None = None


@dataclass
class LaunchPlan:
    """All graphs of one pass in order; valid while `GraphCache.generation` is the same.

    head: None if the stage has none.
    """

    steps: list[LaunchStep]
    head: BuiltGraph | None
    generation: int

    def graphs(self) -> list[BuiltGraph]:
        """Return the graphs that each pass launches."""
        found = [graph for step in self.steps for graph in (step.graph, step.sum_rows)]
        return [graph for graph in (*found, self.head) if graph]

    def set_length(self, n_kv: int) -> None:
        """Do `BuiltGraph.set_length` for all graphs with attention."""
        for step in self.steps:
            step.graph.set_length(n_kv)


class LaunchPlans:
    """Builds launch plans at first use and keeps them."""

    def __init__(self, stage: Stage, graphs: GraphCache, layer_graphs: LayerGraphs) -> None:
        self._stage, self._graphs, self._layer_graphs = stage, graphs, layer_graphs
        # upper bounds; the second one also holds for add_uploaded and sum_rows
        self._n_nodes_mixer_router, self._n_nodes_moe = 160, 128 + 10 * stage.hp.n_expert_used
        self._plans: dict[tuple[PassShape, Results, MissMode], LaunchPlan] = {}
        self._seen = self._state()

    def _state(self) -> tuple[int, int]:
        """Return what changes when the cache drops a graph."""
        return self._graphs.generation, self._graphs.n_dropped

    def get(self, shape: PassShape, results: Results, mode: MissMode) -> LaunchPlan:
        """Return the launch plan of a pass.

        Building a graph can move the shared block and make earlier graphs stale: then try again.
        """
        key, graphs = (shape, results, mode), self._graphs
        if self._seen != self._state() or len(self._plans) > _MAX_PLANS:
            self._plans.clear()  # no plan keeps a graph that the cache has not
        plan = self._plans.get(key)
        while plan is None or plan.generation != graphs.generation:
            before = self._state()
            plan = LaunchPlan(self._steps(shape, mode), self._head(shape, results), before[0])
            if self._state() != before:
                self._plans.clear()
            self._plans[key] = plan
        self._seen = self._state()
        graphs.used(plan.graphs())
        return plan

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def _steps(self, shape: PassShape, mode: MissMode) -> list[LaunchStep]:
        steps: list[LaunchStep] = []
        layers = self._stage.layers
        il = layers.start
        while il < layers.stop:
            end = il + 1
            is_short = il == layers.start or shape.n_tokens > _QUICK_ROWS
            n_merged = MERGED if is_short else MERGED_LATER
            while end < min(il + n_merged, layers.stop):
                if self._layer_graphs.may_lack(end - 1, mode):
                    break
                end += 1
            steps.append(self._step(shape, range(il, end), mode))
            il = end
        return steps

    def _step(self, shape: PassShape, layers: range, mode: MissMode) -> LaunchStep:
        graphs, n_tokens = self._layer_graphs, shape.n_tokens
        # without KV caches, one graph serves all lengths
        kinds = {il: self._stage.hp.layer(il) for il in layers}
        has_kv = any(kind.kv for kind in kinds.values())
        layer_shape = shape._replace(n_out=0, n_kv=shape.n_kv if has_kv else PAGED)
        # what of the mode matters to this graph
        fetch_layers = mode.fetch_layers & frozenset(layers)
        il, may_lack = layers[-1], graphs.may_lack(layers[-1], mode)
        exports = graphs.exports(il, mode)
        graph = self._graphs.get(
            ("layers", layers, layer_shape, fetch_layers, may_lack, exports),
            len(layers) * (self._n_nodes_mixer_router + self._n_nodes_moe),
            lambda b: graphs.layers(b, layer_shape, layers, mode),
        )
        routed = [il for il in layers if kinds[il].is_routed]
        ids = [(il, self._layer_graphs.readback.of(il, n_tokens)) for il in routed]
        if not may_lack:
            return LaunchStep(graph, ids, fetch_layers)
        sum_rows = None
        if graphs.sums_last:
            sum_rows = self._graphs.get(
                ("sum_rows", il, n_tokens),
                self._n_nodes_moe,
                lambda b: graphs.sum_rows(b, n_tokens, il),
            )
        add = self._add_graphs(il, n_tokens, mode)
        return LaunchStep(graph, ids, fetch_layers, il, add, sum_rows)

    def _add_graphs(self, il: int, n_tokens: int, mode: MissMode) -> dict[str, BuiltGraph]:
        """Return the graphs that add the missing experts of layer il; see `LaunchStep`."""
        graphs, banks = self._layer_graphs, self._stage.banks
        named = {f"staging{turn}": banks.staging(il, turn) for turn in range(2)}
        if mode.admits and banks.n_slots[il] and il not in mode.fetch_layers:
            named["own"] = banks.layer(il)
        add = {
            name: self._graphs.get(
                ("add_uploaded", il, name, n_tokens),
                self._n_nodes_moe,
                partial(graphs.add_uploaded, n_tokens=n_tokens, il=il, bank=bank),
            )
            for name, bank in named.items()
        }
        if graphs.exports(il, mode):
            add["cpu"] = self._graphs.get(
                ("add_cpu", il, n_tokens), 16, lambda b: graphs.add_cpu(b, n_tokens, il)
            )
        return add

    def _head(self, shape: PassShape, results: Results) -> BuiltGraph | None:
        if not self._stage.has_head:
            return None
        # the rows of a tree are not kept for drafters before some of them are committed
        return self._graphs.get(
            ("head", shape.n_tokens, shape.n_out, shape.is_tree, results),
            64,
            lambda b: self._layer_graphs.head(b, shape, results),
        )
