"""Runs a pass as one graph, which CUDA replays as one launch; every expert is resident."""

from __future__ import annotations

from collections.abc import Iterable

from ..arch.inputs import PassShape
from ..errors import Cancelled, InternalError
from ..ggml.lib import C
from ..ggml.ops import Builder
from ..graphs.cache import BuiltGraph
from ..graphs.head import HeadOutputs, Results, build_head
from ..graphs.inputs import HiddenRows, InputBlock
from ..graphs.layer import (
    build_absent,
    build_dense_layer,
    build_hidden,
    build_input_norm,
    build_last_hidden,
    build_mixer_router,
    build_moe,
)
from ..kinds import Kind
from ..resident.stage import Stage
from .base import Runner
from .batch import Batch, Callback, Predicate
from .sweeps import Sweeps


def build_whole(
    b: Builder, stage: Stage, inputs: InputBlock, hidden: HiddenRows, shape: PassShape,
    results: Results,
) -> HeadOutputs | None:  # fmt: skip
    """Append every layer of a stage and its head; the slot of an expert is its id.

    Without a head, the rows are left in `hidden`.
    """
    inp, head = inputs.leaves(b, shape), stage.weights.head
    x = inputs.embd(b, shape.n_tokens)
    for il in stage.layers:
        norm = build_input_norm(b, stage, x, il)
        build_hidden(b, stage, x, norm, il)
        if not stage.hp.layer(il).is_routed:
            x = build_dense_layer(b, stage, inp, shape, x, norm, il)
            continue
        r = build_mixer_router(b, stage, inp, shape, x, norm, il)
        slots = build_absent(b, inp, r.routing.topk)
        x = build_moe(b, stage, r.residual, r.post_norm, slots, r.routing.weights, il)
    if head:
        norm = build_input_norm(b, stage, x, stage.hp.n_layer)
        build_last_hidden(b, stage, inp, shape, x, norm)
        return build_head(b, head, norm, inp.out_ids, inp.draws, results)
    hidden.put(x)
    return None


def n_nodes_whole(stage: Stage) -> int:
    """Return an upper bound on the nodes of a pass in one graph."""
    return len(stage.layers) * (176 + 10 * stage.hp.n_expert_used) + 64


class WholeRunner(Runner):
    """Runs a pass as one graph."""

    mode = "whole"

    def __init__(self, stage: Stage, n_ubatch: int, n_sweep: int) -> None:
        """n_sweep: most rows of a prompt in one sweep."""
        is_alone = stage.has_embedding and stage.has_head  # else rows of passes go through there
        rows = n_ubatch if is_alone else stage.state.shape.pass_rows(n_ubatch)
        hidden = HiddenRows(stage, rows)
        super().__init__(stage, n_ubatch, hidden)
        self.sweeps = self.own(Sweeps(stage, self.graphs, self.results, n_ubatch, n_sweep, hidden))
        self._n_nodes = n_nodes_whole(stage)
        self._built: BuiltGraph | None = None  # graph of the pass that is launched next

    def _get(self, shape: PassShape, results: Results) -> BuiltGraph:
        longest = self.shapes.longest(shape)
        built = self.graphs.get(
            (longest, results),
            self._n_nodes,
            lambda b: build_whole(b, self.stage, self._inputs, self.hidden, longest, results),
        )
        built.set_length(shape.n_kv)
        return built

    def build(self, shape: PassShape, kind: Kind, results: Results) -> None:
        """Build the graph of a pass."""
        self._get(shape, results)

    def _prepare(self, shape: PassShape, batch: Batch) -> None:
        self._built = self._get(shape, batch.results)

    def _launch(
        self, shape: PassShape, cancelled: Predicate, begins: Callback, may_pause: Predicate | None
    ) -> Iterable[None]:
        if cancelled():
            raise Cancelled("cancelled")
        built, self._built = self._built, None
        if built is None:
            raise InternalError("a pass was launched before it was prepared")
        reads, n_reads = self.results.reads(built.outputs)
        begins()
        status = C.mg_launch(self.device.compute.ptr, built.graph, reads, n_reads)
        if status != C.GGML_STATUS_SUCCESS:
            self.device.check(status, f"a pass of {shape.n_tokens} rows")
        return ()  # the host never waits within a launch, so there is no pause
