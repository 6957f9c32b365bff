"""What a drafter reads of the target: outputs of some layers, for the rows of one pass."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InternalError
from ..ggml.device import Device
from ..ggml.handles import Buffer, Context, closed_on_failure
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, Builder, Tensor
from ..modelfile.hparams import HParams
from .layout import tap_bytes


class TapRows:
    """Device memory for the outputs of tapped layers in one pass, F32 [n_embd, n_rows] each.

    Tap il is l_out of layer il, complete with all its experts; tap n_layer is h_nextn, the normed
    rows that the head reads. All rows of a pass are kept, padding included, in the order of the
    pass. The next pass overwrites them, so a drafter enqueues what it wants of them before.

    There is no memory, and graphs keep nothing, before `reserve`.

    layers: the taps, ascending. n_rows: the most rows of a pass that keeps them; a longer pass
    leaves what was there. words: all of the memory, F32; `offset` says where a tap begins.
    """

    def __init__(self, device: Device, hp: HParams) -> None:
        self._device, self._hp = device, hp
        self._buffer: Buffer | None = None
        self._context: Context | None = None
        self.words: Tensor
        self.layers: tuple[int, ...] = ()
        self.n_rows = 0
        self._offsets: dict[int, int] = {}  # first bytes of taps

    def reserve(self, layers: Sequence[int], n_rows: int) -> None:
        """Have later graphs keep these taps, of passes of up to n_rows rows.

        The device must be idle, and graphs that were built before must be dropped.

        Raises:
            InternalError: there is no such layer.
            OutOfDeviceMemory: there is no room; what was there stays.
        """
        wanted = tuple(sorted(set(layers)))
        if wanted and not 0 <= wanted[0] <= wanted[-1] <= self._hp.n_layer:
            raise InternalError(f"taps {list(wanted)} of a model of {self._hp.n_layer} layers")
        size = tap_bytes(self._hp.n_embd, len(wanted), n_rows)
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
        self._offsets = {il: self.offset(il) for il in wanted}

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

    def leaf(self, b: Builder, il: int, n_tokens: int = 0) -> Tensor:
        """Return a leaf that reads tap il of the last pass, F32 [n_embd, n_tokens].

        n_tokens: the first rows of the pass; 0: n_rows.
        """
        leaf = b.leaf(F32, (self._hp.n_embd, n_tokens or self.n_rows), f"tap-{il}")
        place(self._memory, leaf, self.offset(il))
        return leaf

    def copy(self, il: int, row: int, n: int, to: Tensor, to_row: int) -> None:
        """Enqueue a copy of rows [row, row + n) of tap il to F32 [n_embd, ...], from to_row on."""
        size, source = 4 * self._hp.n_embd, self._offsets[il]
        C.mg_copy_bytes(
            self._device.compute.ptr, self.words, source + size * row, to, size * to_row, size * n
        )

    def offset(self, il: int) -> int:
        """Return the first byte of tap il."""
        return tap_bytes(self._hp.n_embd, self.layers.index(il), self.n_rows)

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
        self._buffer, self._context, self.layers, self.n_rows = None, None, (), 0
