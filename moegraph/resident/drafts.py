"""What a verify pass keeps of its rows on the device, so that some of them can be committed."""

from __future__ import annotations

from collections.abc import Sequence

from ..arch.base import Architecture
from ..errors import InternalError
from ..ggml.device import Device
from ..ggml.handles import Buffer
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, Builder, Tensor
from ..units import round_up
from .layout import draft_room


class DraftRows:
    """Device memory for what layers with states keep of the rows of one verify pass.

    `Layer.drafts` has the widths, which are the same in all these layers. There is no
    memory before the first verify pass.
    """

    def __init__(self, device: Device, hp: Architecture, layers: range) -> None:
        self._device = device
        kept = {il: hp.layer(il).drafts for il in layers if hp.layer(il).drafts}
        self._widths = next(iter(kept.values()), ())
        self._layers = {il: i for i, il in enumerate(kept)}
        self._buffer: Buffer | None = None
        self.n_rows = 0

    def reserve(self, n_rows: int) -> None:
        """Make room for n_rows rows. The device must be idle, and no graph may use the old memory.

        Raises:
            OutOfDeviceMemory: there is no room; what was there stays.
        """
        if n_rows <= self.n_rows:
            return
        n = draft_room(n_rows)
        size = self._stride(n) * max(len(self._layers), 1)
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
