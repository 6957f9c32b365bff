"""Computes missing experts with ggml graphs, where the main device is the CPU.

The aim is not speed: results must not depend on what is resident. So every expert goes through the
kernels that `moe` uses, reference kernels included, and `sum_rows` sums all rows in routing order.
"""

from __future__ import annotations

from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.cache import BuiltGraph, GraphCache
from ..resident.stage import Stage
from .cpu_experts import CpuExperts


class GraphCpuExperts(CpuExperts):
    """Computes experts with a ggml graph for each layer and number of rows.

    y: the experts' weighted rows, [n_embd, n_expert_used, n_tokens]; zeros for other experts.
    """

    def __init__(self, stage: Stage, max_rows: int) -> None:
        super().__init__(stage, max_rows, y_rows=stage.hp.n_expert_used)
        self._device = stage.device
        self._graphs = GraphCache(stage.device)

    def _graph(self, il: int, n_tokens: int) -> BuiltGraph:
        return self._graphs.get((il, n_tokens), 64, lambda b: self._build(b, il, n_tokens))

    def _build(self, b: Builder, il: int, n_tokens: int) -> Tensor:
        hp, k = self._hp, self._hp.n_expert_used

        def put(tensor: Tensor, name: str) -> Tensor:
            place(self._block, tensor, self._offsets[name])
            return tensor

        x = put(b.leaf(F32, (hp.n_embd, n_tokens), "x"), "x")
        ids = put(b.leaf(I32, (k, n_tokens), "ids"), "ids")
        weights = put(b.leaf(F32, (1, k, n_tokens), "weights"), "weights")
        return put(hp.expert_rows(b, self._banks[il].parts, x, ids, weights, il), "y")

    def _prepare(self, il: int, n_tokens: int) -> None:
        self._graph(il, n_tokens)

    def _begin(self, il: int, n_tokens: int) -> None:
        graph = self._graph(il, n_tokens).graph
        status = C.mg_launch(self._device.compute.ptr, graph, ffi.NULL, 0)
        self._device.check(status, f"the experts of layer {il} on the CPU")

    def close(self) -> None:
        """Free graphs and host memory."""
        self._graphs.close()
        super().close()
