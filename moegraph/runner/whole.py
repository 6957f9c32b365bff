"""Runs a pass as one graph, which CUDA replays as one launch; every expert is resident."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import Cancelled, InternalError
from ..ggml.device import Device
from ..ggml.lib import C
from ..ggml.ops import Builder
from ..graphs.cache import BuiltGraph
from ..graphs.head import HeadOutputs, build_head
from ..graphs.inputs import InputBlock, PassShape
from ..graphs.layer import Model, build_input_norm, build_mixer_router, build_moe
from .base import Runner
from .batch import Batch
from .layer_graphs import CarryBuffers
from .sweeps import Sweeps


def build_whole(
    b: Builder, m: Model, inputs: InputBlock, shape: PassShape, greedy: bool
) -> HeadOutputs:
    """Append every layer and the head; the slot of an expert is its id."""
    inp = inputs.leaves(b, shape)
    x = inp.embeddings
    norm = build_input_norm(b, m, x, 0)
    for il in range(m.hp.n_layer):
        r = build_mixer_router(b, m, inp, shape, x, norm, il)
        x = build_moe(b, m, r.residual, r.post_norm, r.routing.topk, r.routing.weights, il)
        norm = build_input_norm(b, m, x, il + 1)
    return build_head(b, m.weights, norm, inp.out_ids, greedy)


def n_nodes_whole(m: Model) -> int:
    """Return an upper bound on the nodes of a pass in one graph."""
    return m.hp.n_layer * (96 + 3 * m.hp.n_expert_used) + 64


class WholeRunner(Runner):
    """Runs a pass as one graph."""

    mode = "whole"

    def __init__(self, device: Device, model: Model, n_ubatch: int, n_sweep: int) -> None:
        """n_sweep: most rows of a prompt in one sweep."""
        super().__init__(device, model, n_ubatch)
        self._carry = CarryBuffers(device, {"l_out": model.hp.n_embd}, n_ubatch)
        self.sweeps = Sweeps(
            device, model, self.graphs, self._carry, self._results, n_ubatch, n_sweep
        )
        self._built: BuiltGraph | None = None  # graph of the pass that is launched next

    def _get(self, shape: PassShape, greedy: bool) -> BuiltGraph:
        return self.graphs.get(
            (shape, greedy),
            n_nodes_whole(self.model),
            lambda b: build_whole(b, self.model, self._inputs, shape, greedy),
        )

    def reserve_graphs(self) -> None:
        """Build the graphs of the largest pass, so that the shared block never grows later.

        Raises:
            OutOfDeviceMemory: the intermediates do not fit.
        """
        state = self.model.state
        self._get(PassShape(self.n_ubatch, state.n_seq, state.n_ctx, state.n_seq), True)
        self.sweeps.reserve()

    def _prepare(self, shape: PassShape, batch: Batch) -> None:
        self._built = self._get(shape, batch.greedy)

    def _launch(self, shape: PassShape, batch: Batch, cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise Cancelled("cancelled")
        built = self._built
        if built is None:
            raise InternalError("a pass was launched before it was prepared")
        reads = self._result_reads(shape, built.outputs, batch.greedy)
        status = C.mg_launch(self.device.compute.ptr, built.graph, reads, 2)
        self.device.check(status, f"a pass of {shape.n_tokens} rows")

    def close(self) -> None:
        """Wait for the device, then free graphs and transfer memory."""
        self._built = None
        super().close()
        self._carry.buffer.close()
