"""What a drafter reads of the target: outputs of some layers, for each token of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..arch.base import Architecture
from ..errors import InternalError
from ..ggml.device import Device
from ..ggml.handles import Buffer, Context, closed_on_failure
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, Builder, Tensor
from ..kinds import MOST_BEHIND
from .layout import ring_room, tap_bytes, tap_room


class TapRows:
    """Device memory for the outputs of tapped layers: of the last pass, and a ring of tokens.

    Tap il is l_out of layer il, complete with all its experts; tap n_layer is h_nextn, the normed
    rows that the head reads. All rows of a pass are kept, padding included, in the order of the
    pass. The next pass overwrites them.

    The ring has what sequences took last: graphs of passes write their rows there themselves, and
    those of commits the rows of accepted paths. Position p of a sequence is in row p modulo
    n_kept of its part. So a drafter can compute a token long after its pass: at most MOST_BEHIND
    positions later, so that another pass fits.

    There is no memory, and graphs keep nothing, before `reserve`.

    layers: the taps, ascending. n_rows: the most rows of a pass that keeps them; a longer pass
    leaves what was there. n_kept: rows of a sequence in the ring; 0 without a ring. words: all of
    the memory, F32; `offset` says where a tap begins.
    """

    def __init__(self, device: Device, hp: Architecture) -> None:
        self._device, self._hp = device, hp
        self._buffer: Buffer | None = None
        self._context: Context | None = None
        self.words: Tensor
        self.layers: tuple[int, ...] = ()
        self.n_rows = self.n_kept = self._n_ring = 0

    def reserve(self, layers: Sequence[int], n_rows: int, n_seq: int = 0) -> None:
        """Have later graphs keep these taps, of passes of up to n_rows rows.

        n_seq: make a ring for so many sequences; 0: none. The device must be idle, and graphs that
        were built before must be dropped.
        """
        wanted = tuple(sorted(set(layers)))
        if wanted and not 0 <= wanted[0] <= wanted[-1] <= self._hp.n_layer:
            raise InternalError(f"taps {list(wanted)} of a model of {self._hp.n_layer} layers")
        size = tap_bytes(self._hp.n_embd, len(wanted), n_rows, n_seq)
        larger, context = None, None
        if size:
            with closed_on_failure():
                what = f"{n_rows} rows for drafting"
                larger = self._device.buffer(size, what, "draft fewer tokens")
                C.ggml_backend_buffer_clear(larger.ptr, 0)
                context = Context(1)
                words: Tensor = C.ggml_new_tensor_1d(context.ptr, F32, size // 4)
                place(larger, words, 0)
        self.close()
        if context:
            self.words = words
        self._buffer, self._context = larger, context
        self.layers, self.n_rows = wanted, n_rows
        if wanted and n_seq:
            self.n_kept, self._n_ring = MOST_BEHIND + n_rows, ring_room(n_rows, n_seq)

    @property
    def n_bytes(self) -> int:
        """Bytes of the memory."""
        return self._buffer.size if self._buffer else 0

    def keep(self, b: Builder, x: Tensor, il: int) -> None:
        """Have a graph leave tap il here, if it is wanted: x, F32 [n_embd, n_tokens].

        Call this after the norm that reads x is appended, because CUDA computes x and its norm as
        one kernel.
        """
        n_tokens = x.ne[1]
        if il not in self.layers or n_tokens > self.n_rows:
            return
        if x.data == ffi.NULL and x.view_src == ffi.NULL:
            place(self._memory, x, self.offset(il))  # no copy: the node writes its result here
        else:
            b.expand(b.cpy(x, self.leaf(b, il, n_tokens)))

    def append(self, b: Builder, rows: Tensor, n_tokens: int) -> None:
        """Append the copy of a pass's taps to the ring, if there is one; all taps are appended.

        rows: I32 [n_tokens], see `ring_rows`.
        """
        if self.n_kept and n_tokens <= self.n_rows:
            size = 4 * self._hp.n_embd
            shape, strides = (self._hp.n_embd, n_tokens, len(self.layers)), (size, self._stride)
            b.expand(b.set_rows(self._ring(b), b.view(self._taps(b), shape, strides), rows))

    def append_path(self, b: Builder, path: Tensor, rows: Tensor) -> None:
        """Append the copy of some of the last pass's rows to the ring, if there is one.

        path: I32 [n], rows of the pass. rows: I32 [n], see `ring_rows`.
        """
        if self.n_kept:
            b.expand(b.set_rows(self._ring(b), self._gather(b, self._taps(b), path), rows))

    def kept(self, b: Builder, rows: Tensor) -> list[Tensor]:
        """Append reading rows of the ring, I32 [n]: F32 [n_embd, n] of each tap, see `layers`."""
        n_embd, n = self._hp.n_embd, rows.ne[0]
        found, size = self._gather(b, self._ring(b), rows), 4 * n_embd
        return [
            b.view(found, (n_embd, n), (size,), size * n * at) for at in range(len(self.layers))
        ]

    def _gather(self, b: Builder, taps: Tensor, rows: Tensor) -> Tensor:
        """Append the same rows of all taps: F32 [n_embd, n, n_taps]."""
        same = b.view(rows, (rows.ne[0],))
        # ggml checks the size of a view as if its columns were not the same bytes
        same.ne[1], same.nb[1], same.nb[2], same.nb[3] = len(self.layers), 0, 0, 0
        return b.get_rows(taps, same)

    def ring_rows(self, slot: int, first: int, n: int) -> npt.NDArray[np.int64]:
        """Return the rows of the ring of n positions of a sequence, from position first on."""
        rows: npt.NDArray[np.int64] = slot * self.n_kept + (first + np.arange(n)) % self.n_kept
        return rows

    @property
    def spare_row(self) -> int:
        """A row of the ring that padding may overwrite."""
        return self._n_ring - 1

    def _taps(self, b: Builder) -> Tensor:
        """Return a leaf of the taps of the last pass, F32 [n_embd, rows, n_taps]."""
        room = tap_room(self.n_rows)
        leaf = b.leaf(F32, (self._hp.n_embd, room, len(self.layers)), "taps")
        place(self._memory, leaf, 0)
        return leaf

    def _ring(self, b: Builder) -> Tensor:
        """Return a leaf of the ring, F32 [n_embd, rows, n_taps]."""
        leaf = b.leaf(F32, (self._hp.n_embd, self._n_ring, len(self.layers)), "kept_taps")
        place(self._memory, leaf, len(self.layers) * self._stride)
        return leaf

    def leaf(self, b: Builder, il: int, n_tokens: int = 0) -> Tensor:
        """Return a leaf that reads tap il of the last pass, F32 [n_embd, n_tokens].

        n_tokens: the first rows of the pass; 0: n_rows.
        """
        leaf = b.leaf(F32, (self._hp.n_embd, n_tokens or self.n_rows), f"tap-{il}")
        place(self._memory, leaf, self.offset(il))
        return leaf

    def offset(self, il: int) -> int:
        """Return the first byte of tap il."""
        return self._stride * self.layers.index(il)

    @property
    def _stride(self) -> int:
        """Bytes from one tap of the last pass to the next."""
        return 4 * self._hp.n_embd * tap_room(self.n_rows)

    @property
    def _memory(self) -> Buffer:
        if self._buffer is None:
            raise InternalError("a graph reads taps that no memory was reserved for")
        return self._buffer

    def close(self) -> None:
        """Free the memory; graphs that use it must be dropped before."""
        for part in (self._buffer, self._context):
            if part:
                part.close()
        self._buffer, self._context, self.layers = None, None, ()
        self.n_rows = self.n_kept = self._n_ring = 0
