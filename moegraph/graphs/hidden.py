"""Memory for the rows that go from layer to layer, where one graph or stage follows another."""

from __future__ import annotations

from ..ggml.handles import Owner
from ..ggml.memory import Block
from ..ggml.ops import F32, Builder, Tensor
from ..resident.stage import Stage


class HiddenRows(Owner):
    """Fixed device memory for the outputs of a layer, l_out, of passes of at most max_rows rows.

    A stage without the embedding finds the rows of a pass here, and a stage without the head leaves
    them here.

    all: the memory, F32 [n_embd, max_rows]; the rows of a pass come first.
    """

    def __init__(self, stage: Stage, max_rows: int) -> None:
        shapes, what = {"l_out": (stage.hp.n_embd, max_rows)}, "rows between layers"
        self._block = self.own(Block(stage.device, shapes, what, "lower -ub"))
        self.all, self.n_bytes = self._block.tensors["l_out"], self._block.n_bytes

    def put(self, tensor: Tensor) -> Tensor:
        """Make a node [n_embd, n_tokens] write its result here; return the node."""
        return self._block.put(tensor, "l_out")

    def leaf(self, b: Builder, n_tokens: int) -> Tensor:
        """Return a leaf that reads the rows, F32 [n_embd, n_tokens]."""
        return self._block.leaf(b, "l_out", F32, self.all.ne[0], n_tokens)
