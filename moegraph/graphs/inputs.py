"""The inputs of a pass: one device block, filled by one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F16, F32, I32, I64, Builder, Tensor
from ..modelfile.hparams import HParams
from ..resident.state import State
from ..resident.weights import TokenEmbedding
from ..units import round_up

_ALIGN = 256


@dataclass(frozen=True)
class PassShape:
    """Everything that determines the graphs of a pass.

    n_seq_tokens rows for each of n_seqs consecutive sequences from seq0. Rows attend to n_kv
    positions. n_out rows reach the head: none, the last of each sequence, or all.
    """

    n_seq_tokens: int
    n_seqs: int
    seq0: int
    n_kv: int
    n_out: int

    @property
    def n_tokens(self) -> int:
        """Rows of the pass."""
        return self.n_seq_tokens * self.n_seqs


@dataclass(frozen=True)
class PassInputs:
    """The input tensors of one pass.

    embd F32 [n_embd, n_tokens]; pos I32 [n_tokens]; kv_idx I64 [n_tokens], rows of the KV caches;
    out_ids I32 [n_out], or None if n_out is 0; slots I32 [n_seqs], the recurrent states of the
    sequences; kq_mask F16 [n_kv, n_seq_tokens, 1, n_seqs].
    """

    embd: Tensor
    pos: Tensor
    kv_idx: Tensor
    out_ids: Tensor | None
    slots: Tensor
    kq_mask: Tensor


class InputBlock:
    """Fixed memory for the inputs of any pass of at most max_rows rows and n_ctx positions."""

    def __init__(self, device: Device, hp: HParams, max_rows: int, n_ctx: int) -> None:
        self._device = device
        self._n_embd = hp.n_embd
        self._max_rows = max_rows
        size = self._offsets(max_rows)[-1] + 2 * n_ctx * max_rows
        self._size = round_up(size, _ALIGN)
        self._buffer = device.buffer(self._size, "the inputs of a pass", "lower -ub or -c")
        self._host = device.host_buffer(self._size)
        self._uploaded = device.event()
        self._context = Context(1)
        self._all = C.ggml_new_tensor_1d(self._context.ptr, F32, self._size // 4)
        place(self._buffer, self._all, 0)
        self.n_bytes = self._size
        self._one: _OneRow | None = None  # valid until a pass of several rows overwrites the block

    def _offsets(self, n_tokens: int) -> tuple[int, ...]:
        # out_ids has room for all rows, so that the mask is at one offset for every n_out
        row = 4 * n_tokens
        sizes = (self._n_embd * row, row, 2 * row, row, row)
        offsets = [0]
        for size in sizes:
            offsets.append(round_up(offsets[-1] + size, _ALIGN))
        return tuple(offsets)

    def leaves(self, b: Builder, shape: PassShape) -> PassInputs:
        """Return the input tensors of a pass, placed in the block."""
        at = self._offsets(shape.n_tokens)

        def leaf(dtype: int, ne: tuple[int, ...], name: str, offset: int) -> Tensor:
            tensor = b.leaf(dtype, ne, name)
            place(self._buffer, tensor, offset)
            return tensor

        mask_ne = (shape.n_kv, shape.n_seq_tokens, 1, shape.n_seqs)
        slots = leaf(I32, (shape.n_seqs,), "inp_slots", at[4])
        C.ggml_set_input(slots)  # kernels read it early
        return PassInputs(
            embd=leaf(F32, (self._n_embd, shape.n_tokens), "inp_embd", at[0]),
            pos=leaf(I32, (shape.n_tokens,), "inp_pos", at[1]),
            kv_idx=leaf(I64, (shape.n_tokens,), "inp_kv_idx", at[2]),
            out_ids=leaf(I32, (shape.n_out,), "inp_out_ids", at[3]) if shape.n_out else None,
            slots=slots,
            kq_mask=leaf(F16, mask_ne, "inp_kq_mask", at[5]),
        )

    def fill(
        self,
        shape: PassShape,
        tokens: npt.NDArray[np.int32],
        pos0: list[int],
        embedding: TokenEmbedding,
        state: State,
    ) -> None:
        """Write the inputs of a pass and enqueue their upload.

        tokens: [n_seqs, n_seq_tokens] (numpy order); pos0: first position of each sequence.
        """
        if self._uploaded:
            self._uploaded.wait()  # the last upload may still be reading the host block
        at = self._offsets(shape.n_tokens)
        if shape.n_tokens > 1:
            self._one = None
            self._fill_rows(at, shape, tokens, pos0, embedding, state)
        else:
            if self._one is None or self._one.shape != shape:
                self._one = _OneRow(self._region, at, shape, self._n_embd)
            embedding.rows(tokens.reshape(-1), self._one.embd)
            self._one.move_to(pos0[0], state.n_ctx)
        self._device.send(self._all, self._host, 0, at[5] + 2 * shape.n_kv * shape.n_tokens)
        if self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.compute.ptr)

    def _region(self, start: int, n: int, dtype: type) -> npt.NDArray[Any]:
        """View n numbers of the host block from byte `start`."""
        return self._host.array[start : start + n * np.dtype(dtype).itemsize].view(dtype)

    def _fill_rows(
        self, at: Sequence[int], shape: PassShape, tokens: npt.NDArray[np.int32],
        pos0: list[int], embedding: TokenEmbedding, state: State,
    ) -> None:  # fmt: skip
        region, n_tokens, n_seq_tokens = self._region, shape.n_tokens, shape.n_seq_tokens
        rows = region(at[0], n_tokens * self._n_embd, np.float32).reshape(n_tokens, self._n_embd)
        embedding.rows(tokens.reshape(-1), rows)
        steps = np.arange(n_seq_tokens)
        pos = np.asarray(pos0)[:, None] + steps[None, :]
        seqs = np.arange(shape.seq0, shape.seq0 + shape.n_seqs)[:, None]
        region(at[1], n_tokens, np.int32)[:] = pos.reshape(-1)
        region(at[2], n_tokens, np.int64)[:] = (seqs * state.n_ctx + pos).reshape(-1)
        if shape.n_out == n_tokens:
            region(at[3], n_tokens, np.int32)[:] = np.arange(n_tokens)
        elif shape.n_out:
            region(at[3], shape.n_out, np.int32)[:] = (
                np.arange(1, shape.n_seqs + 1) * n_seq_tokens - 1
            )
        region(at[4], shape.n_seqs, np.int32)[:] = seqs.reshape(-1)
        mask = region(at[5], shape.n_kv * n_tokens, np.float16).reshape(
            -1, n_seq_tokens, shape.n_kv
        )
        _fill_mask(mask, pos0)

    def close(self) -> None:
        """Free both blocks."""
        for handle in (self._uploaded, self._host, self._buffer, self._context):
            if handle:
                handle.close()


class _OneRow:
    """The inputs of one-row passes in the host block; writes only what changes between passes.

    embd: F32, numpy shape [1, n_embd]; the caller writes it. The device is idle meanwhile, so this
    must be fast.
    """

    def __init__(
        self,
        region: Callable[..., npt.NDArray[Any]],
        at: Sequence[int],
        shape: PassShape,
        n_embd: int,
    ) -> None:
        self.shape = shape
        self.embd = region(at[0], n_embd, np.float32).reshape(1, n_embd)
        self._pos, self._kv_idx = region(at[1], 1, np.int32), region(at[2], 1, np.int64)
        region(at[3], 1, np.int32)[:] = 0
        region(at[4], 1, np.int32)[:] = shape.seq0
        self._mask = region(at[5], shape.n_kv, np.float16)
        self._first = -2  # position of the row that the mask is for

    def move_to(self, first: int, n_ctx: int) -> None:
        """Write all inputs but the embedding, for a row at position `first`."""
        self._pos[0] = first
        self._kv_idx[0] = self.shape.seq0 * n_ctx + first
        if first == self._first + 1:
            self._mask[first] = 0.0
        else:
            _fill_mask(self._mask.reshape(1, 1, -1), [first])
        self._first = first


def _fill_mask(mask: npt.NDArray[np.float16], pos0: list[int]) -> None:
    """Fill the causal mask, numpy shape [n_seqs, n_seq_tokens, n_kv]; pos0: first positions."""
    n_seq_tokens = mask.shape[1]
    for seq, first in enumerate(pos0):
        mask[seq, :, :first] = 0.0
        mask[seq, :, first:] = -np.inf
        if n_seq_tokens == 1:
            mask[seq, 0, first] = 0.0
        else:
            square = mask[seq, :, first : first + n_seq_tokens]
            square[np.tril_indices(n_seq_tokens)] = 0.0
