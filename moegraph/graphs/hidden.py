"""Memory for the rows that go from layer to layer, where one graph or stage follows another."""

from __future__ import annotations

from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32, Builder, Tensor
from ..resident.stage import Stage


class HiddenRows:
    """Fixed device memory for the outputs of a layer, l_out, of passes of at most max_rows rows.

    A stage without the embedding finds the rows of a pass here, and a stage without the head leaves
    them here.

    all: the memory, F32 [n_embd, max_rows]; the rows of a pass come first.
    """

    def __init__(self, stage: Stage, max_rows: int) -> None:
        self._n_embd = stage.hp.n_embd
        n_bytes = 4 * self._n_embd * max_rows
        self._buffer = stage.device.buffer(n_bytes, "rows between layers", "lower -ub")
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        self._context = Context(1)
        self.all = C.ggml_new_tensor_2d(self._context.ptr, F32, self._n_embd, max_rows)
        self.put(self.all)
        self.n_bytes = self._buffer.size

    def put(self, tensor: Tensor) -> Tensor:
        """Make a node [n_embd, n_tokens] write its result here; return the node."""
        place(self._buffer, tensor, 0)
        return tensor

    def leaf(self, b: Builder, n_tokens: int) -> Tensor:
        """Return a leaf that reads the rows, F32 [n_embd, n_tokens]."""
        return self.put(b.leaf(F32, (self._n_embd, n_tokens), "l_out"))

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()
        self._context.close()
