"""KV caches and recurrent states.

A sequence has a slot: a row of every recurrent state, and a list of pages of the KV caches
(kvpool.py). Passes over any slots run with the same graphs. An engine with one sequence has its
state at row 0 and its positions in order, so its graphs read both in place.

These are the bytes of some layers, on one device. Which sequence has which positions is the same on
all devices, and `Sequences` decides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..arch.base import Architecture
from ..errors import ConfigError, InternalError
from ..ggml.device import Device
from ..ggml.handles import Buffer, Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, Builder, Tensor, type_id
from ..units import round_up
from .kvpool import KVPool, PoolShape, Positions
from .layout import PAGE, draft_room, zeros_bytes


class DraftRows:
    """Device memory for what layers with states keep of the rows of one verify pass.

    `Layer.drafts` has the widths, which are the same in all these layers. There is no memory before
    the first verify pass.
    """

    def __init__(self, device: Device, hp: Architecture, layers: range) -> None:
        self._device = device
        kept = {il: hp.layer(il).drafts for il in layers if hp.layer(il).drafts}
        self._widths = next(iter(kept.values()), ())
        self._layers = {il: i for i, il in enumerate(kept)}
        self._buffer: Buffer | None = None
        self.n_rows = 0

    def reserve(self, n_rows: int) -> None:
        """Make room for n_rows rows; the device is idle, and no graph uses the old memory."""
        if n_rows <= self.n_rows:
            return
        n = draft_room(n_rows)
        if not self._layers:
            self.n_rows = n
            return
        size = self._stride(n) * len(self._layers)
        larger = self._device.buffer(size, f"{n} rows of verify passes", "draft fewer tokens")
        C.ggml_backend_buffer_clear(larger.ptr, 0)
        smaller, self._buffer, self.n_rows = self._buffer, larger, n
        if smaller:
            smaller.close()

    @property
    def n_bytes(self) -> int:
        """Bytes of the memory."""
        return self._buffer.size if self._buffer else 0

    def _offsets(self, n_rows: int) -> list[int]:
        """Return where each kind of rows begins in the memory of a layer, and its size."""
        offsets = [0]
        for width in self._widths:
            offsets.append(round_up(offsets[-1] + 4 * width * n_rows, self._device.alignment))
        return offsets

    def _stride(self, n_rows: int) -> int:
        return self._offsets(n_rows)[-1]

    def keep(self, b: Builder, rows: Sequence[Tensor], il: int) -> None:
        """Have a graph leave the rows of layer il here: F32, each kind's width times the rows."""
        for tensor, width, offset in zip(rows, self._widths, self._offsets_of(il)):
            base = tensor if tensor.view_src == ffi.NULL else tensor.view_src
            if C.ggml_nbytes(base) == C.ggml_nbytes(tensor) and base.data == ffi.NULL:
                # no copy: the node that computes the rows writes them here
                place(self._memory, base, offset)
            else:
                n_rows = C.ggml_nelements(tensor) // width
                b.expand(b.cpy(tensor, self._leaf(b, width, n_rows, offset)))

    def leaves(self, b: Builder, il: int) -> list[Tensor]:
        """Return the rows of layer il: F32 [width, n_rows] of each kind."""
        offsets = self._offsets_of(il)
        return [self._leaf(b, w, self.n_rows, at) for w, at in zip(self._widths, offsets)]

    def _leaf(self, b: Builder, width: int, n_rows: int, offset: int) -> Tensor:
        leaf = b.leaf(F32, (width, n_rows), "draft_rows")
        place(self._memory, leaf, offset)
        return leaf

    @property
    def _memory(self) -> Buffer:
        if self._buffer is None:
            raise InternalError("a graph keeps rows that no memory was reserved for")
        return self._buffer

    def _offsets_of(self, il: int) -> list[int]:
        first = self._layers[il] * self._stride(self.n_rows)
        return [first + offset for offset in self._offsets(self.n_rows)]

    def close(self) -> None:
        """Free the memory."""
        if self._buffer:
            self._buffer.close()


_ROT_MIN = 64


class State:
    """KV cache and recurrent states of all sequences in some layers, on one device.

    positions: of the sequences; `shape`, `n_ctx`, `n_seq`, `pool` and `n_past` are its own.
    k, v: of each layer with a KV cache, [n_embd_gqa, shape.n_rows + 1]; `pool` knows which row has
        which position. Padding rows of a pass are written to the last row, which nothing reads.
    k_words, v_words: the same memory as F32, to move rows byte for byte; empty if a row is not a
        multiple of 4 bytes.
    drafts: what a verify pass keeps of its rows.
    page_size: positions of a page.
    layer_states: of each layer with recurrent states (`Layer.states`), F32 [size, n_seq] each.
    last_out: F32 [n_embd, n_seq], the output of the last layer at each sequence's last position,
        from which an MTP block drafts; None unless the layers have one, which is layer n_layer. It
        is zeros in an empty sequence, and who runs a pass keeps it up to date.
    recurrent: all tensors with a row for each sequence. caches: k, then v.
    rot_k, rot_v: Walsh-Hadamard matrices F32 [n, n]; None unless K or V is quantized and 64 divides
        head_dim.
    spare_row: the last row of the caches.
    kv_bytes, mtp_bytes, recurrent_bytes: of the caches of the model's layers, and of the MTP
        block; of the states.
    n_attention_parts: see `Device`.
    """

    def __init__(
        self, device: Device, hp: Architecture, layers: range, positions: Positions,
        type_k: str, type_v: str,
    ) -> None:  # fmt: skip
        self.positions, self.device = positions, device
        self.shape: PoolShape = positions.shape
        self.n_ctx, self.n_seq = self.shape.n_ctx, self.shape.n_seq
        self.pool: KVPool = positions.pool
        self.n_past = positions.n_past
        self.n_attention_parts = device.n_attention_parts
        n_seq = self.n_seq
        self._context = Context(4 * len(layers) + 4)
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        self.layer_states: dict[int, tuple[Tensor, ...]] = {}
        self.page_size = PAGE
        self.spare_row = positions.spare_row
        rows = self.spare_row + 1
        for il in layers:
            layer = hp.layer(il)
            if layer.states:
                self.layer_states[il] = tuple(self._new(F32, n, n_seq) for n in layer.state_sizes)
            if layer.kv:
                self.k[il] = self._new(type_id(type_k), layer.kv[0], rows)
                self.v[il] = self._new(type_id(type_v), layer.kv[1], rows)
        self._mtp = hp.n_layer
        has_mtp = self._mtp in layers
        self.last_out: Tensor | None = self._new(F32, hp.n_embd, n_seq) if has_mtp else None
        self.recurrent = [t for kind in zip(*self.layer_states.values()) for t in kind]
        if self.last_out is not None:
            self.recurrent.append(self.last_out)
        self.caches = [*self.k.values(), *self.v.values()]
        self.k_words, self.v_words = self._words(self.k), self._words(self.v)
        if n_seq > 1:
            self.require_words("several sequences (n_seq)")
        self.rot_k = self._rotation(type_k, hp.n_embd_head_k, largest=True)
        self.rot_v = self._rotation(type_v, hp.n_embd_head_v, largest=False)
        self._n_zeros = zeros_bytes(hp)
        self._place(device)
        self.drafts = DraftRows(device, hp, layers)

    def _new(self, dtype: int, ne0: int, ne1: int) -> Tensor:
        return C.ggml_new_tensor_2d(self._context.ptr, dtype, ne0, ne1)

    def _words(self, cache: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return tensors for the memory of KV caches as F32 [bytes of a row / 4, rows]."""
        fit = {il: t for il, t in cache.items() if t.nb[1] % 4 == 0}
        return {il: self._new(F32, t.nb[1] // 4, t.ne[1]) for il, t in fit.items()}

    def require_words(self, what: str) -> None:
        """Check that KV rows can be moved, which `what` needs."""
        odd = next((t.nb[1] for t in self.caches if t.nb[1] % 4), 0)
        if odd:
            raise ConfigError(
                f"{what} needs KV cache rows of a multiple of 4 bytes; this model's have "
                f"{odd}; use f16 for the cache"
            )

    def _rotation(self, type_name: str, head_dim: int, largest: bool) -> Tensor | None:
        # Upstream rotates K by the largest power of two that divides the head, V by the smallest.
        if type_name == "f16" or head_dim % _ROT_MIN:
            return None
        n = _ROT_MIN
        while largest and head_dim % (2 * n) == 0:
            n *= 2
        return self._new(F32, n, n)

    def _place(self, device: Device) -> None:
        recurrent, cache = self.recurrent, self.caches
        constants = [rot for rot in (self.rot_k, self.rot_v) if rot is not None]
        self._zeros = self._new(F32, self._n_zeros // 4, 1)
        offsets, size = {}, 0
        for tensor in (*recurrent, *cache, *constants, self._zeros):
            offsets[tensor] = size
            needed = C.ggml_backend_buft_get_alloc_size(device.buft, tensor)
            size = round_up(size + needed, device.alignment)
        self._buffer = device.buffer(
            size,
            f"the KV cache and states ({self.shape.n_rows} positions)",
            "lower -c or use -ctk q8_0 -ctv q8_0",
        )
        for tensor, offset in offsets.items():
            place(self._buffer, tensor, offset)
        for words, tensors in ((self.k_words, self.k), (self.v_words, self.v)):
            for il, tensor in words.items():
                place(self._buffer, tensor, offsets[tensors[il]])
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        for rot in constants:
            matrix = hadamard(rot.ne[0])
            C.ggml_backend_tensor_set(rot, ffi.from_buffer(matrix), 0, matrix.nbytes)
        mtp = (caches[il] for caches in (self.k, self.v) for il in caches if il == self._mtp)
        self.mtp_bytes = sum(C.ggml_nbytes(t) for t in mtp)
        self.kv_bytes = sum(C.ggml_nbytes(t) for t in cache) - self.mtp_bytes
        self.recurrent_bytes = sum(C.ggml_nbytes(t) for t in recurrent)

    def n_kv(self, n_used: int) -> int:
        """Return the KV length of a graph for n_used positions; see `Positions`."""
        return self.positions.n_kv(n_used)

    def clear_states(self, slot: int) -> None:
        """Enqueue zeros over the recurrent states of a sequence."""
        for tensor in self.recurrent:
            self._clear(tensor, slot * tensor.nb[1], tensor.nb[1])

    def clear_rows(self, runs: Iterable[tuple[int, int]]) -> None:
        """Enqueue zeros over KV rows, given as (first row, rows)."""
        for tensor in self.caches:
            for first, n in runs:
                self._clear(tensor, first * tensor.nb[1], n * tensor.nb[1])

    def copy_rows(self, source: int, to: int, n: int) -> None:
        """Enqueue copies of n KV rows."""
        stream = self.device.compute.ptr
        for tensor in self.caches:
            size = tensor.nb[1]
            C.mg_copy_bytes(stream, tensor, source * size, tensor, to * size, n * size)

    def _clear(self, tensor: Tensor, start: int, size: int) -> None:
        """Enqueue zeros over `size` bytes of a tensor from byte `start`."""
        most = self._zeros.nb[1]
        for at in range(start, start + size, most):
            n = min(most, start + size - at)
            C.mg_copy_bytes(self.device.compute.ptr, self._zeros, 0, tensor, at, n)

    def close(self) -> None:
        """Free the caches and drafts."""
        self.drafts.close()
        self._buffer.close()
        self._context.close()


def hadamard(n: int) -> np.ndarray:
    """Return the orthonormal Walsh-Hadamard matrix F32 [n, n]; n: a power of two."""
    matrix = np.array([[np.float32(1.0 / np.sqrt(np.float32(n)))]], dtype=np.float32)
    while matrix.shape[0] < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.ascontiguousarray(matrix)
