"""Launch plans: all graphs of a pass in order, by what the pass is and how it deals with misses.

After a layer that has all its experts, nothing has to be added. So consecutive layers are merged
into one graph, in which only the last layer may lack experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ..arch.inputs import PAGED, PassShape
from ..experts.passplan import MissMode
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.head import Results
from ..resident.stage import Stage
from .layer_graphs import LayerGraphs
from .misses import AddGraphs
from .readback import HostIds, RoutingReadback

# Enough for sequences that take turns at any length; `GraphCache` limits the memory of the graphs.
_MAX_PLANS = 1024
# Most layers in one graph: in the first graph and in long passes, and in later graphs of up to
# _QUICK_ROWS rows. A short first graph lets the device start early, and a prompt is cancelled
# between graphs. Few rows are quick, and each graph boundary costs about 5 us on CUDA.
MERGED, MERGED_LATER = 4, 64
_QUICK_ROWS = 32
# Launches of a plan between two at which the cache is told that its graphs are in use.
_TOLD_EVERY = 16


@dataclass(frozen=True)
class LaunchStep:
    """Consecutive layers in one graph, and the graphs that complete the last layer.

    ids: (il, I32 [n_tokens * n_expert_used]) of each layer, in host memory. fetch_layers: layers
    whose graph fetches missing experts. lacking: the last layer, if it may lack experts; then there
    is add. sum_rows: the graph of that name (CPU device).
    """

    graph: BuiltGraph
    ids: list[tuple[int, HostIds]]
    fetch_layers: frozenset[int] = frozenset()
    lacking: int | None = None
    add: AddGraphs | None = None
    sum_rows: BuiltGraph | None = None

    def graphs(self) -> Iterator[BuiltGraph]:
        """Yield the graphs that each launch has."""
        yield self.graph
        if self.sum_rows:
            yield self.sum_rows


@dataclass
class LaunchPlan:
    """All graphs of one pass in order; valid while `GraphCache.generation` is the same.

    head: None if the stage has none. n_uses: passes so far.
    """

    steps: list[LaunchStep]
    head: BuiltGraph | None
    generation: int
    n_uses: int = 0

    def graphs(self) -> Iterator[BuiltGraph]:
        """Yield the graphs that each pass launches."""
        for step in self.steps:
            yield from step.graphs()
        if self.head:
            yield self.head

    def set_length(self, n_kv: int) -> None:
        """Do `BuiltGraph.set_length` for all graphs with attention."""
        for step in self.steps:
            step.graph.set_length(n_kv)


class LaunchPlans:
    """Builds launch plans at first use and keeps the latest.

    sums_last: `sum_rows` completes layers that may lack experts. n_planned: plans made so far.
    """

    def __init__(
        self,
        stage: Stage,
        graphs: GraphCache,
        layer_graphs: LayerGraphs,
        readback: RoutingReadback,
        sums_last: bool,
    ) -> None:
        self._stage = stage
        self._graphs = graphs
        self._layer_graphs = layer_graphs
        self._readback = readback
        self._sums_last = sums_last
        # upper bounds; the second one also holds for add_uploaded and sum_rows
        self._n_nodes_mixer_router, self._n_nodes_moe = 160, 128 + 10 * stage.hp.n_expert_used
        self._plans: OrderedDict[tuple[PassShape, Results, MissMode], LaunchPlan] = OrderedDict()
        self.n_planned = 0
        self._seen = self._state()

    def _state(self) -> tuple[int, int]:
        """Return what changes when the cache drops a graph."""
        return self._graphs.generation, self._graphs.n_dropped

    def get(self, shape: PassShape, results: Results, mode: MissMode) -> LaunchPlan:
        """Return the launch plan of a pass.

        Building a graph can move the shared block and make earlier graphs stale: then try again.
        """
        key, graphs = (shape, results, mode), self._graphs
        if self._seen != self._state():
            self._plans.clear()  # no plan keeps a graph that the cache has not
        plan = self._plans.get(key)
        while plan is None or plan.generation != graphs.generation:
            before = self._state()
            plan = LaunchPlan(self._steps(shape, mode), self._head(shape, results), before[0])
            self.n_planned += 1
            if self._state() != before:
                self._plans.clear()
            self._plans[key] = plan
        self._seen = self._state()
        self._plans.move_to_end(key)
        plan.n_uses += 1
        if plan.n_uses % _TOLD_EVERY == 2:
            graphs.used(plan.graphs())
        while len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def _steps(self, shape: PassShape, mode: MissMode) -> list[LaunchStep]:
        """Return the launch steps of all layers in order."""
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
        """Return the step of these layers, with the graphs that complete the last one."""
        graphs, n_tokens = self._layer_graphs, shape.n_tokens
        # without KV caches, one graph serves all lengths
        has_kv = any(self._stage.hp.layer(il).kv for il in layers)
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
        ids = [(il, self._readback.of(il, n_tokens)) for il in layers]
        if not may_lack:
            return LaunchStep(graph, ids, fetch_layers)
        sum_rows = None
        if self._sums_last:
            sum_rows = self._graphs.get(
                ("sum_rows", il, n_tokens),
                self._n_nodes_moe,
                lambda b: graphs.sum_rows(b, n_tokens, il),
            )
        add = self._add_graphs(il, n_tokens, mode)
        return LaunchStep(graph, ids, fetch_layers, il, add, sum_rows)

    def _add_graphs(self, il: int, n_tokens: int, mode: MissMode) -> AddGraphs:
        """Return the graphs that add the missing experts of layer il."""
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
        cpu = None
        if graphs.exports(il, mode):
            cpu = self._graphs.get(
                ("add_cpu", il, n_tokens), 16, lambda b: graphs.add_cpu(b, n_tokens, il)
            )
        return AddGraphs((add["staging0"], add["staging1"]), add.get("own"), cpu)

    def _head(self, shape: PassShape, results: Results) -> BuiltGraph | None:
        if not self._stage.has_head:
            return None
        # the rows of a tree are not kept for drafters before some of them are committed
        return self._graphs.get(
            ("head", shape.n_tokens, shape.n_out, shape.is_tree, results),
            64,
            lambda b: self._layer_graphs.head(b, shape, results),
        )
