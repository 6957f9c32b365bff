"""The inputs of a chunk of a prompt: positions, KV rows, and what its mask is made from.

A sweep computes every chunk once for each layer. So the inputs of all its chunks are uploaded once
and stay on the device; before a graph of an attention layer, those of its chunk are copied to where
graphs read them.

The mask of n rows over n_kv positions is made on the device. Within a page, a row sees the first
positions and not the others, so each piece of the mask is one of PAGE + 1 patterns, and the host
sends the numbers of the patterns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..ggml.choose import DRAW_WORDS
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F16, F32, I32, I64, Builder, Tensor
from ..resident.layout import PAGE
from ..resident.stage import Stage
from ..resident.state import State
from ..resident.weights import TokenEmbedding
from ..units import round_up
from .inputs import PassInputs
from .rows import gathered_rows

_ALIGN = 64  # words
# Chunks that a sweep may have beyond the fewest: those beside other requests are short.
_MORE_CHUNKS = 512


def kv_length(state: State, n_used: int) -> int:
    """Return the KV length of a graph for n_used positions.

    Its steps grow with the length, so that a long context needs few different graphs.
    """
    step = max(PAGE, (1 << (n_used - 1).bit_length()) // 16)
    return min(state.n_ctx, round_up(n_used, step))


class _Sizes:
    """Words of the parts of the block: the chunk that graphs read, KV rows, and all chunks."""

    def __init__(self, n_ctx: int, n_seq: int, max_rows: int, n_rows: int) -> None:
        self.row = 3 + n_ctx // PAGE
        self.current = round_up(max_rows * self.row + 3 * _ALIGN, _ALIGN)
        self.slot = _ALIGN
        self.draws = round_up(DRAW_WORDS, _ALIGN)
        self.kv_rows = n_ctx if n_seq > 1 else 0
        # every chunk is rounded up
        self.n_chunks = -(-n_rows // max_rows) + _MORE_CHUNKS
        self.all = round_up(n_rows * self.row, _ALIGN) + 3 * _ALIGN * self.n_chunks
        self.total = self.current + self.slot + self.draws + self.kv_rows + self.all


class ChunkInputs:
    """Device memory for the inputs of all chunks of a sweep, and for those of one chunk at a time.

    A part of a sweep has at most n_rows rows in n_chunks chunks of at most max_rows rows.
    """

    def __init__(self, stage: Stage, max_rows: int, n_rows: int) -> None:
        device, hp, state = stage.device, stage.hp, stage.state
        self._device, self._state, self._n_embd = device, state, hp.n_embd
        sizes = self._sizes = _Sizes(state.n_ctx, state.n_seq, max_rows, n_rows)
        self.n_chunks = sizes.n_chunks
        self._slot_at = sizes.current
        self._draws_at = self._slot_at + sizes.slot
        self._kv_rows_at = self._draws_at + sizes.draws
        self._chunks_at = self._kv_rows_at + sizes.kv_rows
        self._context = Context(2)
        self._buffer = device.buffer(4 * sizes.total, "the inputs of a prompt", "lower -ub or -c")
        self._words = C.ggml_new_tensor_1d(self._context.ptr, I32, sizes.total)
        place(self._buffer, self._words, 0)
        self._patterns = C.ggml_new_tensor_2d(self._context.ptr, F32, PAGE // 2, PAGE + 1)
        n_bytes = C.ggml_nbytes(self._patterns)
        self._pattern_buffer = device.buffer(n_bytes, "the patterns of masks", "lower -c")
        place(self._pattern_buffer, self._patterns, 0)
        sees = np.arange(PAGE)[None, :] < np.arange(PAGE + 1)[:, None]
        patterns = np.where(sees, np.float16(0), np.float16(-np.inf))
        C.ggml_backend_tensor_set(self._patterns, ffi.from_buffer(patterns), 0, n_bytes)
        self.n_bytes = 4 * sizes.total + n_bytes
        self._host = device.host_buffer(4 * max(sizes.current, sizes.kv_rows, sizes.draws))
        self._rows = device.host_buffer(4 * hp.n_embd * max_rows)
        self._uploaded = device.event()
        self._at: list[tuple[int, int]] = []  # (first word, words) of each chunk

    def begin(self, slot: int, n_kv: int) -> None:
        """Upload what all chunks of a sequence share; n_kv: the longest of its chunks."""
        self._at = []
        self._send(np.array([slot], dtype=np.int32), self._slot_at)
        if self._sizes.kv_rows:
            rows = gathered_rows(self._state.pool, (slot,), n_kv)[0]
            self._send(rows, self._kv_rows_at)

    def add(
        self,
        slot: int,
        first: int,
        tokens: npt.NDArray[np.int32],
        embedding: TokenEmbedding | None,
        hidden: Tensor,
        row: int,
    ) -> None:
        """Upload the inputs of the next chunk, and its embeddings to a row of hidden.

        first: position of the first row. embedding: None if the rows are there already. hidden: F32
        [n_embd, n], at least row + n rows.
        """
        n, state = len(tokens), self._state
        places = first + np.arange(n)
        n_pages = kv_length(state, first + n) // PAGE
        seen = np.clip(places[:, None] + 1 - PAGE * np.arange(n_pages), 0, PAGE)
        words = np.zeros(self._n_words(n, n_pages), dtype=np.int32)
        pos, idx, mask = self._parts(n)
        words[pos : pos + n] = places
        words[idx : idx + 2 * n].view(np.int64)[:] = state.pool.rows(np.array(slot), places)
        words[mask : mask + seen.size] = seen.reshape(-1)
        at = sum(self._at[-1]) if self._at else self._chunks_at
        self._at.append((at, len(words)))
        self._send(words, at)
        if embedding is None:
            return
        rows = self._rows.array[: 4 * self._n_embd * n].view(np.float32)
        embedding.rows(tokens, rows.reshape(n, self._n_embd))
        C.ggml_backend_tensor_set_async(
            self._device.compute.ptr,
            hidden,
            self._rows.address(),
            row * 4 * self._n_embd,
            rows.nbytes,
        )
        self._record()

    def _parts(self, n: int) -> tuple[int, int, int]:
        """Return where positions, KV rows and patterns of a chunk of n rows begin, in words."""
        idx = round_up(n, _ALIGN)
        return 0, idx, idx + round_up(2 * n, _ALIGN)

    def _n_words(self, n: int, n_pages: int) -> int:
        return round_up(self._parts(n)[2] + n * n_pages, _ALIGN)

    def _send(self, words: npt.NDArray[np.int32], at: int) -> None:
        if self._uploaded:
            self._uploaded.wait()
        self._host.array[: words.nbytes].view(np.int32)[:] = words
        C.ggml_backend_tensor_set_async(
            self._device.compute.ptr, self._words, self._host.address(), 4 * at, words.nbytes
        )
        self._record()

    def _record(self) -> None:
        if self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.compute.ptr)

    def select(self, chunk: int) -> None:
        """Enqueue the copy of a chunk's inputs to where graphs read them."""
        at, n = self._at[chunk]
        words = self._words
        C.mg_copy_bytes(self._device.compute.ptr, words, 4 * at, words, 0, 4 * n)

    def send_draws(self, draws: npt.NDArray[np.int32]) -> None:
        """Upload what the candidates of one row depend on, I32 numpy [1, DRAW_WORDS]."""
        self._send(draws.reshape(-1), self._draws_at)

    def draws(self, b: Builder) -> Tensor:
        """Return the leaf that reads them, I32 [DRAW_WORDS, 1]."""
        return self._leaf(b, I32, (DRAW_WORDS, 1), "inp_draws", self._draws_at)

    def slots(self, b: Builder) -> Tensor:
        """Return the leaf that names the sequence, I32 [1]."""
        slots = self._leaf(b, I32, (1,), "inp_slots", self._slot_at)
        C.ggml_set_input(slots)  # kernels read it early
        return slots

    def leaves(self, b: Builder, x: Tensor, n_kv: int) -> PassInputs:
        """Return the inputs of an attention layer for rows x [n_embd, n] over n_kv positions."""
        n = x.ne[1]
        pos, idx, mask = self._parts(n)
        n_pages = n_kv // PAGE
        seen = self._leaf(b, I32, (n_pages * n,), "inp_seen", mask)
        patterns = b.retype(b.get_rows(self._patterns, seen), F16, PAGE)
        leaf = self._leaf
        kv_rows = None
        if self._sizes.kv_rows:
            kv_rows = leaf(b, I32, (n_kv,), "inp_kv_rows", self._kv_rows_at)
        return PassInputs(
            embd=x,
            pos=leaf(b, I32, (n,), "inp_pos", pos),
            kv_idx=leaf(b, I64, (n,), "inp_kv_idx", idx),
            out_ids=None,
            draws=None,
            kq_mask=b.reshape(patterns, n_kv, n, 1, 1),
            slots=self.slots(b),
            kv_rows=kv_rows,
            parents=None,
            padding=None,
            absent=None,
            pages=None,
            rows=None,
        )

    def _leaf(self, b: Builder, dtype: int, ne: tuple[int, ...], name: str, at: int) -> Tensor:
        tensor = b.leaf(dtype, ne, name)
        place(self._buffer, tensor, 4 * at)
        return tensor

    def close(self) -> None:
        """Free all memory."""
        parts: list[Any] = [
            self._uploaded, self._host, self._rows, self._buffer, self._pattern_buffer,
            self._context,
        ]  # fmt: skip
        for part in parts:
            if part:
                part.close()
