"""KV cache of full-attention layers and recurrent states of DeltaNet layers.

In every tensor a sequence is one contiguous block, so consecutive sequences are one view.
"""

from __future__ import annotations

import numpy as np

from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, Tensor, type_id
from ..modelfile.hparams import HParams
from ..units import round_up
from .layout import KV_PAD

_ROT_MIN = 64


class State:
    """KV cache and recurrent states of `n_seq` sequences on one device.

    k, v: of each full-attention layer, [n_embd_gqa, n_ctx * n_seq]; row `seq * n_ctx + pos`.
    conv: of each DeltaNet layer, F32 [(d_conv - 1) * conv_dim, n_seq].
    ssm: of each DeltaNet layer, F32 [head_v_dim^2 * n_v_heads, n_seq].
    rot_k, rot_v: Walsh-Hadamard matrices F32 [n, n]; None unless K or V is quantized and 64 divides
        head_dim.
    n_past: positions that each sequence holds.
    n_written: positions that may have been written; more than n_past after a failed pass.
    n_attention_parts: see `Device`.

    Raises:
        OutOfDeviceMemory: the tensors do not fit.
    """

    def __init__(
        self, device: Device, hp: HParams, n_ctx: int, n_seq: int, type_k: str, type_v: str
    ) -> None:
        self.n_ctx = round_up(n_ctx, KV_PAD)
        self.n_seq = n_seq
        self.n_attention_parts = device.n_attention_parts
        self.n_past = [0] * n_seq
        self.n_written = [0] * n_seq
        self._context = Context(2 * hp.n_layer + 2)
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        self.conv: dict[int, Tensor] = {}
        self.ssm: dict[int, Tensor] = {}
        rows = self.n_ctx * n_seq
        for il in range(hp.n_layer):
            if hp.is_recurrent(il):
                self.conv[il] = self._new(F32, (hp.ssm_d_conv - 1) * hp.conv_dim, n_seq)
                self.ssm[il] = self._new(F32, hp.head_v_dim**2 * hp.n_v_heads, n_seq)
            else:
                self.k[il] = self._new(type_id(type_k), hp.n_embd_head_k * hp.n_head_kv, rows)
                self.v[il] = self._new(type_id(type_v), hp.n_embd_head_v * hp.n_head_kv, rows)
        self.rot_k = self._rotation(type_k, hp.n_embd_head_k, largest=True)
        self.rot_v = self._rotation(type_v, hp.n_embd_head_v, largest=False)
        self._place(device)

    def _new(self, dtype: int, ne0: int, ne1: int) -> Tensor:
        return C.ggml_new_tensor_2d(self._context.ptr, dtype, ne0, ne1)

    def _rotation(self, type_name: str, head_dim: int, largest: bool) -> Tensor | None:
        # Upstream rotates K by the largest power of two that divides the head, V by the smallest.
        if type_name == "f16" or head_dim % _ROT_MIN:
            return None
        n = _ROT_MIN
        while largest and head_dim % (2 * n) == 0:
            n *= 2
        return self._new(F32, n, n)

    def _place(self, device: Device) -> None:
        recurrent = [*self.conv.values(), *self.ssm.values()]
        cache = [*self.k.values(), *self.v.values()]
        constants = [rot for rot in (self.rot_k, self.rot_v) if rot is not None]
        offsets, size = [], 0
        for tensor in recurrent + cache + constants:
            offsets.append(size)
            needed = C.ggml_backend_buft_get_alloc_size(device.buft, tensor)
            size = round_up(size + needed, device.alignment)
        self._buffer = device.buffer(
            size,
            f"the KV cache and states ({self.n_ctx} positions)",
            "lower -c or use -ctk q8_0 -ctv q8_0",
        )
        for tensor, offset in zip(recurrent + cache + constants, offsets):
            place(self._buffer, tensor, offset)
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        for rot in constants:
            matrix = hadamard(rot.ne[0])
            C.ggml_backend_tensor_set(rot, ffi.from_buffer(matrix), 0, matrix.nbytes)
        self.kv_bytes = sum(C.ggml_nbytes(t) for t in cache)
        self.recurrent_bytes = sum(C.ggml_nbytes(t) for t in recurrent)

    def n_kv(self, n_used: int) -> int:
        """Return the KV length of a graph for n_used positions: a multiple of KV_PAD."""
        return min(self.n_ctx, max(KV_PAD, round_up(n_used, KV_PAD)))

    def reset(self, seq: int) -> None:
        """Empty a sequence. The device must be idle.

        KV rows are cleared too: a failed pass may have left NaN in a row, and masking it would not
        help, because NaN times zero is NaN.
        """
        for tensor in (*self.conv.values(), *self.ssm.values()):
            C.ggml_backend_tensor_memset(tensor, 0, seq * tensor.nb[1], tensor.nb[1])
        used = self.n_kv(self.n_written[seq])
        for tensor in (*self.k.values(), *self.v.values()):
            start = seq * self.n_ctx * tensor.nb[1]
            C.ggml_backend_tensor_memset(tensor, 0, start, used * tensor.nb[1])
        self.n_past[seq] = self.n_written[seq] = 0

    def close(self) -> None:
        """Free the caches."""
        self._buffer.close()
        self._context.close()


def hadamard(n: int) -> np.ndarray:
    """Return the orthonormal Walsh-Hadamard matrix F32 [n, n]; n: a power of two."""
    matrix = np.array([[np.float32(1.0 / np.sqrt(np.float32(n)))]], dtype=np.float32)
    while matrix.shape[0] < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.ascontiguousarray(matrix)
