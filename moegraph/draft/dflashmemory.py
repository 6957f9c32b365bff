"""Fixed memory of a DFlash drafter: inputs of its graphs, features of a prompt, and results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..ggml.choose import DRAW_WORDS
from ..ggml.device import Device, HostBuffer
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F16, F32, I32, Builder, Tensor
from ..graphs.dflash import MAX_TOP, BlockInputs
from ..modelfile.drafter import DFlashHParams
from ..resident.draftring import Mask, RingShape
from ..units import round_up

_ALIGN = 256
# Most rows of a pass that one sequence takes.
MAX_ROWS = 128
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class _Layout:
    """Byte offsets in the device memory.

    The inputs of a draft end with the embedding of the anchor, and those of the masks follow it, so
    one copy brings all that changes.
    """

    def __init__(
        self, hp: DFlashHParams, shapes: Sequence[RingShape], n_sweep: int
    ) -> None:
        n, self.n_embd = hp.block_size, hp.n_embd
        self.words = round_up(4 * (n + 1), _ALIGN)  # positions, then the anchor
        self.masks = sum(round_up(2 * n * shape.n_rows, _ALIGN) for shape in shapes)
        self.anchor = self.masks + self.words
        self.draws = round_up(self.anchor + 4 * hp.n_embd * n, _ALIGN)
        self.rows = self.draws + 4 * DRAW_WORDS * n
        self.n_row_words = (2 + len(shapes)) * MAX_ROWS
        self.prompt = self.rows + 4 * self.n_row_words
        self.n_prompt_words = (1 + len(shapes)) * n_sweep
        self.fused = round_up(self.prompt + 4 * self.n_prompt_words, _ALIGN)
        self.d2t = self.fused + 4 * hp.n_embd * n_sweep
        self.size = self.d2t + 4 * hp.n_vocab_draft

    def mask(self, lengths: Sequence[int], n_rows: int) -> list[int]:
        """Return where the masks of a draft begin; they end where the words begin."""
        sizes = [round_up(2 * n_rows * length, _ALIGN) for length in lengths]
        return [self.masks - sum(sizes[i:]) for i in range(len(sizes))]


def draft_memory_bytes(hp: DFlashHParams, n_ctx: int, n_sweep: int) -> int:
    """Return the device bytes of `DraftMemory`."""
    from ..resident.draftring import ring_shapes

    return _Layout(hp, ring_shapes(hp, n_ctx), n_sweep).size


class DraftMemory:
    """Fixed memory for the inputs and results of a drafter's graphs.

    n_bytes: device memory.
    """

    def __init__(
        self, device: Device, hp: DFlashHParams, shapes: Sequence[RingShape], n_sweep: int
    ) -> None:
        """n_sweep: most rows of a part of a prompt.

        Raises:
            OutOfDeviceMemory: there is no room.
        """
        self._device, self._hp, self._shapes, self._n_sweep = device, hp, shapes, n_sweep
        at = self._at = _Layout(hp, shapes, n_sweep)
        what = "the inputs of drafts and features of prompts"
        self._buffer = device.buffer(at.size, what, "lower -c or use --spec off")
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        self._context = Context(2)
        self._all = C.ggml_new_tensor_1d(self._context.ptr, F32, at.size // 4)
        place(self._buffer, self._all, 0)
        self._host = device.host_buffer(at.draws)
        n_words = max(at.n_row_words, at.n_prompt_words)
        self._rows_host = device.host_buffer(4 * n_words)
        self._rows_sent = device.event()
        self._results = device.host_buffer(4 * (5 + 2 * MAX_TOP) * hp.block_size)
        self.n_bytes = at.size
        draws = np.full((hp.block_size, DRAW_WORDS), -1, np.int32)
        draws[:, 0] = 0  # no race
        self._set(at.draws, draws)

    def _set(self, offset: int, values: npt.NDArray[np.generic]) -> None:
        """Write values to the device, and wait."""
        data = np.ascontiguousarray(values)
        C.ggml_backend_tensor_set(self._all, ffi.from_buffer(data), offset, data.nbytes)

    def _leaf(self, b: Builder, offset: int, dtype: int, *ne: int) -> Tensor:
        leaf = b.leaf(dtype, ne, "draft_input")
        place(self._buffer, leaf, offset)
        return leaf

    def send_mask(self, embedding: Floats) -> None:
        """Write the embedding of the mask token to all rows of a block but the first."""
        rows = np.tile(embedding, (self._hp.block_size - 1, 1))
        self._set(self._at.anchor + 4 * self._hp.n_embd, rows)

    def send_d2t(self, d2t: Ints) -> Tensor:
        """Write the target's token of each token of a reduced vocabulary; return I32 [1, n]."""
        self._set(self._at.d2t, d2t)
        tensor = C.ggml_new_tensor_2d(self._context.ptr, I32, 1, len(d2t))
        place(self._buffer, tensor, self._at.d2t)
        return tensor

    def block_leaves(self, b: Builder, n_rows: int, lengths: Sequence[int]) -> BlockInputs:
        """Return the inputs of a block."""
        at, n_embd = self._at, self._hp.n_embd
        words = at.masks
        masks = [
            self._leaf(b, offset, F16, length, n_rows)
            for offset, length in zip(at.mask(lengths, n_rows), lengths)
        ]
        return BlockInputs(
            self._leaf(b, at.anchor, F32, n_embd, n_rows),
            self._leaf(b, words, I32, n_rows),
            self._leaf(b, words + 4 * self._hp.block_size, I32, 1),
            masks,
            self._leaf(b, at.draws, I32, DRAW_WORDS, self._hp.block_size),
        )

    def begin(
        self, embedding: Floats, anchor: int, n_past: int, n_rows: int, lengths: Sequence[int]
    ) -> list[Mask]:
        """Write the inputs of a block; return its masks to fill, numpy shape [n_rows, length]."""
        at, host = self._at, self._host.array
        host[at.anchor : at.anchor + embedding.nbytes].view(np.float32)[:] = embedding
        words = host[at.masks : at.masks + at.words].view(np.int32)
        words[:n_rows] = n_past + np.arange(n_rows)
        words[self._hp.block_size] = anchor
        return [
            host[offset : offset + 2 * n_rows * length].view(np.float16).reshape(n_rows, length)
            for offset, length in zip(at.mask(lengths, n_rows), lengths)
        ]

    def send(self, lengths: Sequence[int], n_rows: int) -> None:
        """Enqueue the upload of the inputs of a block."""
        first = self._at.mask(lengths, n_rows)[0]
        end = self._at.anchor + 4 * self._hp.n_embd
        self._upload(self._host, first, first, end - first)

    def _upload(self, host: HostBuffer, source: int, to: int, size: int) -> None:
        C.ggml_backend_tensor_set_async(
            self._device.compute.ptr, self._all, host.address(source), to, size
        )

    def results(
        self, ids: Tensor, logits: Tensor, confidence: Tensor | None
    ) -> tuple[Ints, Floats, Floats | None]:
        """Wait for a draft; return its results: [n, words], [n, MAX_TOP] and perhaps [n]."""
        n, compute = ids.ne[1], self._device.compute.ptr
        found, at = [], 0
        for tensor in (ids, logits, confidence):
            size = C.ggml_nbytes(tensor) if tensor is not None else 0
            if tensor is not None:
                address = self._results.address(at)
                C.ggml_backend_tensor_get_async(compute, tensor, address, 0, size)
            found.append(self._results.array[at : at + size])
            at += size
        C.ggml_backend_synchronize(compute)
        words = found[0].view(np.int32).reshape(n, -1).copy()
        values = found[1].view(np.float32).reshape(n, -1).copy()
        sure = found[2].view(np.float32).copy() if confidence is not None else None
        return words, values, sure

    def send_rows(
        self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], cells: Sequence[Ints]
    ) -> None:
        """Enqueue the upload of rows of a pass, their positions, and where K and V go."""
        self._send_words(self._at.rows, [rows, places, *cells])

    def row_leaves(self, b: Builder, n: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return what `send_rows` sends, I32 [n] each."""
        ids, pos, *rows = self._word_leaves(b, self._at.rows, 0, n, n, 2 + len(self._shapes))
        return ids, pos, rows

    def send_prompt(self, places: npt.NDArray[np.int64], cells: Sequence[Ints]) -> None:
        """Enqueue the upload of positions of rows of a prompt, and where K and V go."""
        n = self._n_sweep
        padded = [np.resize(part, n) for part in (places, *cells)]
        self._send_words(self._at.prompt, padded)

    def prompt_leaves(self, b: Builder, row: int, n: int) -> tuple[Tensor, list[Tensor]]:
        """Return what `send_prompt` sends of rows [row, row + n), I32 [n] each."""
        n_parts = 1 + len(self._shapes)
        pos, *rows = self._word_leaves(b, self._at.prompt, row, n, self._n_sweep, n_parts)
        return pos, rows

    def _send_words(self, to: int, parts: Sequence[npt.NDArray[np.integer]]) -> None:
        if self._rows_sent:
            self._rows_sent.wait()
        words = np.concatenate(parts).astype(np.int32)
        self._rows_host.array[: words.nbytes].view(np.int32)[:] = words
        self._upload(self._rows_host, 0, to, words.nbytes)
        if self._rows_sent:
            C.ggml_backend_event_record(self._rows_sent.ptr, self._device.compute.ptr)

    def _word_leaves(
        self, b: Builder, at: int, row: int, n: int, stride: int, n_parts: int
    ) -> list[Tensor]:
        return [self._leaf(b, at + 4 * (i * stride + row), I32, n) for i in range(n_parts)]

    def fused(self, b: Builder, row: int, n: int) -> Tensor:
        """Return a leaf of rows [row, row + n) of a prompt's fused features, F32 [n_embd, n]."""
        n_embd = self._hp.n_embd
        return self._leaf(b, self._at.fused + 4 * n_embd * row, F32, n_embd, n)

    def close(self) -> None:
        """Free the memory."""
        handles = self._rows_sent, self._results, self._rows_host, self._host
        for handle in (*handles, self._buffer, self._context):
            if handle:
                handle.close()
