"""The inputs of a chunk of a prompt: positions, KV rows, and what its mask is made from.

A sweep computes every chunk once for each layer. So the inputs of all its chunks are uploaded once
and stay on the device; before a graph of an attention layer, those of its chunk are copied to where
graphs read them.

The mask of n rows over n_kv positions is made on the device. Within a page, a row sees the first
positions and not the others, so each piece of the mask is one of PAGE + 1 patterns, and the host
sends the numbers of the patterns. With --deterministic on CUDA, attention reads pages as decode
passes do (paged.py): then the bits of a row do not depend on its chunk, and there is no mask.

A chunk may have rows of several sequences (`JointRows`). Then the sequences and the KV rows that
they attend to are inputs of the chunk too; otherwise all chunks share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PAGED, JointRows, PassInputs, PassShape
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
from .paged import ROW_WORDS, can_page, prompt_rows
from .rows import gathered_rows

_ALIGN = 64  # words
# Sequences of a chunk, at most.
MAX_SEQS = _ALIGN
# Chunks that a sweep may have beyond the fewest: those beside other requests are short.
_MORE_CHUNKS = 512
# To what rows, places and sequences of chunks are rounded up if that is asked for.
_ROWS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_SEQS = (1, 2, 4, 8, 16, 32, MAX_SEQS)
# Chunks whose KV rows have room, if each attends to a whole context.
_JOINT_CHUNKS = 4


def kv_length(state: State, n_used: int) -> int:
    """Return the KV length of a graph for n_used positions.

    Its steps grow with the length, so that a long context needs few different graphs.
    """
    step = max(PAGE, (1 << (n_used - 1).bit_length()) // 16)
    return min(state.n_ctx, round_up(n_used, step))


class Segment(NamedTuple):
    """Rows of one sequence in a chunk: n of them, from position `first` on."""

    slot: int
    first: int
    n: int

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.first + self.n


class _Sizes:
    """Words of the parts of the block: the chunk that graphs read, KV rows, and all chunks."""

    def __init__(self, state: State, is_paged: bool, max_rows: int, n_rows: int) -> None:
        n_ctx, n_seq = state.n_ctx, state.n_seq
        n_parts = 7 if n_seq > 1 else 3  # of a chunk; each is rounded up
        self.row = n_parts - (n_seq > 1) + (ROW_WORDS if is_paged else n_ctx // PAGE)
        self.current = round_up(max_rows * self.row, _ALIGN) + n_parts * _ALIGN
        self.slot = _ALIGN
        self.draws = round_up(DRAW_WORDS, _ALIGN)
        self.kv_rows = n_ctx if n_seq > 1 else 0  # or lists of pages
        if is_paged:
            self.kv_rows = min(rounded_seqs(n_seq), MAX_SEQS) * state.pool.table.shape[1]
        self.n_chunks = -(-n_rows // max_rows) + _MORE_CHUNKS
        self.all = round_up(n_rows * self.row, _ALIGN) + 3 * _ALIGN * self.n_chunks
        # sequences and KV rows of chunks of several sequences
        self.all += _JOINT_CHUNKS * (self.slot + self.kv_rows) if n_seq > 1 else 0
        self.total = self.current + self.slot + self.draws + self.kv_rows + self.all


def _rounded(n: int, sizes: Sequence[int]) -> int:
    """Return the first size that is at least n, or n if it is larger than all of them."""
    return next((size for size in sizes if size >= n), n)


def rounded_seqs(n_seqs: int) -> int:
    """Return how many sequences a rounded chunk has, empty ones included."""
    return _rounded(n_seqs, _SEQS)


def rounded_places(most: int) -> int:
    """Return the largest rounded number of places that is not above most; 0: there is none."""
    return max((size for size in _ROWS if size <= most), default=0)


class _Parts(NamedTuple):
    """Where the inputs of a chunk begin, in words; the patterns of its mask come last."""

    pos: int
    idx: int
    places: int
    rows: int
    lengths: int
    real: int
    mask: int  # or the rows that attention over pages reads

    @classmethod
    def of(cls, n: int, shape: PassShape) -> _Parts:
        """Return those of n rows, in a rectangle of that shape if it is ragged."""
        offsets, joint = [0], (0, 0, 0, 0)
        if shape.is_ragged:
            joint = shape.n_tokens, n, shape.n_seqs, n
        for words in (n, 2 * n, *joint):
            offsets.append(offsets[-1] + round_up(words, _ALIGN))
        return cls(*offsets)


class ChunkInputs:
    """Device memory for the inputs of all chunks of a sweep, and for those of one chunk at a time.

    A part of a sweep has at most n_rows rows in n_chunks chunks of at most max_rows rows.
    """

    def __init__(self, stage: Stage, max_rows: int, n_rows: int) -> None:
        device, hp, state = stage.device, stage.hp, stage.state
        self._device, self._state, self._n_embd = device, state, hp.n_embd
        self._is_paged = device.is_invariant and can_page(stage)
        sizes = self._sizes = _Sizes(state, self._is_paged, max_rows, n_rows)
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
        most = max(sizes.current + sizes.slot + sizes.kv_rows, sizes.draws)
        self._host = device.host_buffer(4 * most)
        self._rows = device.host_buffer(4 * hp.n_embd * max_rows)
        self._uploaded = device.event()
        self._at: list[tuple[int, int]] = []  # (first word, words) of each chunk
        self._joint: list[tuple[int, int]] = []  # sequences and KV rows after that, if it has any
        self._max_rows, self._is_rounded = max_rows, False

    def shape_of(self, segments: Sequence[Segment], is_rounded: bool) -> tuple[int, PassShape]:
        """Return the rows of a chunk, with copies of the first one, and its rectangle.

        is_rounded: rows, places and sequences are rounded up, as far as there is room.
        """
        n, t = sum(segment.n for segment in segments), max(segment.n for segment in segments)
        n_kv, n_seqs = max(self.n_kv(one.end) for one in segments), len(segments)
        if is_rounded:
            n, n_seqs = min(_rounded(n, _ROWS), self._max_rows), rounded_seqs(n_seqs)
            t = n if n_seqs == 1 else min(_rounded(t, _ROWS), self._max_rows // n_seqs)
        return n, PassShape(t, n_seqs, n_kv, 0, is_ragged=True)

    def n_kv(self, n_used: int) -> int:
        """Return the KV length of graphs for n_used positions; PAGED: they serve any."""
        return PAGED if self._is_paged else kv_length(self._state, n_used)

    def _n_kv_words(self, shape: PassShape) -> int:
        """Return the words of what says where a rectangle's keys are: their rows, or pages."""
        each = self._state.pool.table.shape[1] if self._is_paged else shape.n_kv
        return each * shape.n_seqs if self._sizes.kv_rows else 0

    def _kv_words(self, slots: tuple[int, ...], n_kv: int) -> npt.NDArray[np.int32]:
        """Return these words for sequences, I32 numpy [`_n_kv_words`]."""
        pool = self._state.pool
        rows = pool.table[[*slots]] if self._is_paged else gathered_rows(pool, slots, n_kv)
        return rows.reshape(-1)

    def begin(self, slot: int, n_used: int) -> None:
        """Upload what all chunks of a sequence share; n_used: its positions after all of them."""
        self._at, self._joint = [], []
        self._send(np.array([slot], dtype=np.int32), self._slot_at)
        if self._sizes.kv_rows:
            self._send(self._kv_words((slot,), self.n_kv(n_used)), self._kv_rows_at)

    def _seen(
        self, seqs: npt.NDArray[np.int64], places: npt.NDArray[np.int64],
        in_rect: npt.NDArray[np.int64], n: int, shape: PassShape,
    ) -> npt.NDArray[np.int32]:  # fmt: skip
        """Return what says which keys a row attends to: patterns of a mask, or rows over pages.

        seqs, places, in_rect: of each row its sequence in the chunk, its position, and its place in
        the rectangle. n: rows of the chunk, copies included.
        """
        if self._is_paged:
            return prompt_rows(seqs, places, n).reshape(-1)
        n_pages = shape.n_kv // PAGE
        seen = np.full((shape.n_tokens, n_pages), PAGE, dtype=np.int32)  # a mask leaves something
        seen[in_rect] = np.clip(places[:, None] + 1 - PAGE * np.arange(n_pages), 0, PAGE)
        return seen.reshape(-1)

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
        i = np.arange(n)
        places, shape = first + i, PassShape(n, 1, self.n_kv(first + n), 0)
        seen, parts = self._seen(np.zeros_like(i), places, i, n, shape), _Parts.of(n, shape)
        words = np.zeros(round_up(parts.mask + seen.size, _ALIGN), dtype=np.int32)
        words[parts.pos :][:n] = places
        words[parts.idx :][: 2 * n].view(np.int64)[:] = state.pool.rows(np.array(slot), places)
        words[parts.mask :][: seen.size] = seen
        at = sum(self._at[-1]) if self._at else self._chunks_at
        self._at.append((at, len(words)))
        self._send(words, at)
        self._embed(tokens, embedding, hidden, row)

    def _embed(
        self,
        tokens: npt.NDArray[np.int32],
        embedding: TokenEmbedding | None,
        hidden: Tensor,
        row: int,
    ) -> None:
        n = len(tokens)
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

    # chunks of several sequences

    def begin_joint(self, is_rounded: bool) -> None:
        """Begin a sweep whose chunks come from `add_joint`; is_rounded: as in `shape_of`."""
        self._at, self._joint, self._is_rounded = [], [], is_rounded

    def fits(self, segments: Sequence[Segment], is_rounded: bool) -> bool:
        """Return whether there is room for what a chunk of several sequences attends to."""
        _, shape = self.shape_of(segments, is_rounded)
        return self._n_kv_words(shape) <= self._sizes.kv_rows

    def fit(self, chunks: Sequence[Sequence[Segment]], is_rounded: bool) -> bool:
        """Return whether there is room for the inputs of such chunks together."""
        n = sum(sum(self._joint_words(*self.shape_of(each, is_rounded))) for each in chunks)
        return n <= self._sizes.all

    def _joint_words(self, n: int, shape: PassShape) -> tuple[int, int]:
        """Return the words of a chunk that graphs read at the start of the block, and of others."""
        n_seen = ROW_WORDS * n if self._is_paged else shape.n_kv // PAGE * shape.n_tokens
        words = round_up(_Parts.of(n, shape).mask + n_seen, _ALIGN)
        return words, _ALIGN + self._n_kv_words(shape)

    def add_joint(
        self,
        segments: Sequence[Segment],
        tokens: npt.NDArray[np.int32],
        embedding: TokenEmbedding | None,
        hidden: Tensor,
        row: int,
    ) -> None:
        """Upload the inputs of the next chunk, whose rows are those of all segments.

        Each sequence has one segment. Others: as in `add`.
        """
        state, (n, shape) = self._state, self.shape_of(segments, self._is_rounded)
        n_real, t = len(tokens), shape.n_seq_tokens
        places = np.concatenate([np.arange(s.first, s.end) for s in segments])
        slots = np.concatenate([np.full(s.n, s.slot) for s in segments])
        in_rect = np.concatenate([np.arange(s.n) + i * t for i, s in enumerate(segments)])
        n_first, n_rest = self._joint_words(n, shape)
        words, parts = np.zeros(n_first + n_rest, dtype=np.int32), _Parts.of(n, shape)
        words[parts.pos :][:n_real] = places
        kv_idx = words[parts.idx :][: 2 * n].view(np.int64)
        kv_idx[:n_real], kv_idx[n_real:] = state.pool.rows(slots, places), state.spare_row
        words[parts.places + in_rect] = np.arange(n_real)
        words[parts.rows :][:n_real] = in_rect
        words[parts.lengths :][: len(segments)] = [s.n for s in segments]
        words[parts.real :][:n_real] = np.arange(n_real)
        seqs = np.repeat(np.arange(len(segments)), [s.n for s in segments])
        seen = self._seen(seqs, places, in_rect, n, shape)
        words[parts.mask :][: seen.size] = seen
        own = tuple(segment.slot for segment in segments)
        words[n_first : n_first + _ALIGN] = -1  # no sequence
        words[n_first : n_first + len(own)] = own
        if self._sizes.kv_rows:
            own += own[:1] * (shape.n_seqs - len(own))
            words[n_first + _ALIGN :] = self._kv_words(own, shape.n_kv)
        at = sum(self._joint[-1]) if self._joint else self._chunks_at
        self._at.append((at, n_first))
        self._joint.append((at + n_first, n_rest))
        self._send(words, at)
        self._embed(tokens, embedding, hidden, row)

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
        if self._joint:
            at, n = self._joint[chunk]
            stream = self._device.compute.ptr
            C.mg_copy_bytes(stream, words, 4 * at, words, 4 * self._slot_at, 4 * _ALIGN)
            if n > _ALIGN:
                size = 4 * (n - _ALIGN)
                C.mg_copy_bytes(stream, words, 4 * (at + _ALIGN), words, 4 * self._kv_rows_at, size)

    def send_draws(self, draws: npt.NDArray[np.int32]) -> None:
        """Upload what the candidates of one row depend on, I32 numpy [1, DRAW_WORDS]."""
        self._send(draws.reshape(-1), self._draws_at)

    def draws(self, b: Builder) -> Tensor:
        """Return the leaf that reads them, I32 [DRAW_WORDS, 1]."""
        return self._leaf(b, I32, (DRAW_WORDS, 1), "inp_draws", self._draws_at)

    def slots(self, b: Builder, n_seqs: int = 1) -> Tensor:
        """Return the leaf that names the sequences, I32 [n_seqs]."""
        slots = self._leaf(b, I32, (n_seqs,), "inp_slots", self._slot_at)
        C.ggml_set_input(slots)  # kernels read it early
        return slots

    def leaves(self, b: Builder, x: Tensor, shape: PassShape) -> PassInputs:
        """Return the inputs of a layer for rows x [n_embd, n]; shape: the rectangle of the chunk.

        n_kv matters to attention only.
        """
        n, (t, n_seqs, n_kv) = x.ne[1], shape[:3]
        parts, leaf = _Parts.of(n, shape), self._leaf
        kq_mask = kv_rows = pages = rows = joint = None
        if self._is_paged:
            n_pages = self._state.pool.table.shape[1]
            pages = leaf(b, I32, (n_pages, n_seqs), "inp_pages", self._kv_rows_at)
            rows = leaf(b, I32, (ROW_WORDS, n), "inp_rows", parts.mask)
        else:
            n_kv = n_kv or PAGE
            n_seen = n_kv // PAGE * shape.n_tokens
            seen = leaf(b, I32, (n_seen,), "inp_seen", parts.mask)
            patterns = b.retype(b.get_rows(self._patterns, seen), F16, PAGE)
            kq_mask = b.reshape(patterns, n_kv, t, 1, n_seqs)
            if self._sizes.kv_rows:
                kv_rows = leaf(b, I32, (n_kv * n_seqs,), "inp_kv_rows", self._kv_rows_at)
        if shape.is_ragged:
            joint = JointRows(
                leaf(b, I32, (t * n_seqs,), "inp_places", parts.places),
                leaf(b, I32, (n,), "inp_places_of", parts.rows),
                leaf(b, I32, (n_seqs,), "inp_lengths", parts.lengths),
                leaf(b, I32, (n,), "inp_real", parts.real),
            )
        return PassInputs(
            embd=x,
            pos=leaf(b, I32, (n,), "inp_pos", parts.pos),
            kv_idx=leaf(b, I64, (n,), "inp_kv_idx", parts.idx),
            out_ids=None,
            draws=None,
            kq_mask=kq_mask,
            slots=self.slots(b, n_seqs),
            kv_rows=kv_rows,
            parents=None,
            padding=None,
            absent=None,
            pages=pages,
            rows=rows,
            taps=None,
            joint=joint,
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
