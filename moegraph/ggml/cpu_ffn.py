"""Expert FFN on the CPU (native/py/cpu_ffn.c), for the experts that a decode pass misses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, InternalError
from .handles import Handle
from .lib import C, ffi
from .ops import Tensor

if TYPE_CHECKING:
    from . import _native


class CpuFfn(Handle["_native.mg_cpu_ffn_ptr"]):
    """Threads and work buffers for expert FFNs of up to max_rows rows.

    n_threads: includes the calling thread. Not reentrant: one call at a time.
    """

    def __init__(
        self, n_threads: int, n_embd: int, n_ff_exp: int, n_expert_used: int, max_rows: int
    ) -> None:
        sizes = (n_threads, n_embd, n_ff_exp, n_expert_used, max_rows)
        if min(sizes) < 1:
            raise InternalError(f"expert FFN of sizes {sizes}: each must be at least 1")
        self._n_embd, self._n_ff, self._max_rows = n_embd, n_ff_exp, max_rows
        ptr: _native.mg_cpu_ffn_ptr = C.mg_cpu_ffn_new(*sizes)
        if ptr == ffi.NULL:
            raise ConfigError(
                f"cannot start {n_threads} CPU threads for missing experts; "
                "lower --threads or use --miss stream"
            )
        super().__init__(ptr, C.mg_cpu_ffn_free)

    def layer(self, parts: Mapping[str, Tensor]) -> Any:
        """Describe a layer's expert stacks for `begin`.

        parts: gate and up [n_embd, n_ff_exp, n_expert] each, or gate_up [n_embd, 2 * n_ff_exp,
            n_expert]; down [n_ff_exp, n_embd, n_expert]. Rows are contiguous, in host memory that
            outlives the result.
        """
        n_ff, merged = self._n_ff, parts.get("gate_up")
        gate = merged if merged is not None else parts["gate"]
        up = merged if merged is not None else parts["up"]
        down = parts["down"]
        n_rows = 2 * n_ff if merged is not None else n_ff
        for tensor, ne in ((gate, (self._n_embd, n_rows)), (up, (self._n_embd, n_rows)),
                           (down, (n_ff, self._n_embd))):  # fmt: skip
            _check(tensor, (*ne, gate.ne[2]))
        up_offset = n_ff * gate.nb[1] if merged is not None else 0
        return ffi.new("struct mg_cpu_ffn_layer *", {
            "gate": gate.data, "up": ffi.cast("char *", up.data) + up_offset, "down": down.data,
            "gate_stride": gate.nb[2], "up_stride": up.nb[2], "down_stride": down.nb[2],
            "gate_type": gate.type, "up_type": up.type, "down_type": down.type,
            "n_expert": gate.ne[2],
        })  # fmt: skip

    def begin(self, layer: Any, x: Any, ids: Any, weights: Any, n_rows: int, y: Any) -> None:
        """Have the threads write to y the sum over k of weights[k] times expert ids[k] of x.

        The caller is free until `end`, and leaves all memory as it is.

        Shapes: x, y F32 [n_embd, n_rows]; ids I32, weights F32 [n_expert_used, n_rows]; all four
        are addresses of contiguous memory. An id outside [0, n_expert) adds nothing.
        """
        if not 0 < n_rows <= self._max_rows:
            raise InternalError(f"expert FFN of {n_rows} rows; made for 1 to {self._max_rows}")
        C.mg_cpu_ffn_begin(self.ptr, layer, x, ids, weights, n_rows, y)

    def end(self) -> None:
        """Compute what is left of the job, if there is one, and wait until y is there."""
        C.mg_cpu_ffn_end(self.ptr)


def _check(tensor: Tensor, ne: tuple[int, ...]) -> None:
    """Refuse a stack that C would read with another layout."""
    row = C.ggml_row_size(tensor.type, ne[0])
    if tuple(tensor.ne)[:3] != ne or tensor.nb[1] != row or tensor.data == ffi.NULL:
        raise InternalError(
            f"expert stack {list(tensor.ne)}, rows of {tensor.nb[1]} bytes; "
            f"expected {list(ne)} with rows of {row}"
        )
