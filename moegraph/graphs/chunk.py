"""The inputs of a chunk of a prompt: positions, KV rows, and what its mask is made from.

A sweep computes every chunk once for each layer. So the inputs of all its chunks are uploaded once
and stay on the device; before a graph of an attention layer, those of its chunk are copied to where
graphs read them.

The mask of n rows over n_kv positions is made on the device. Within a page, a row sees the first
positions and not the others, so each piece of the mask is one of PAGE + 1 patterns, and the host
sends the numbers of the patterns. Layers with a window have patterns of their own, in which the
positions before the window are hidden too, and fewer columns (`Window`). With --deterministic on
CUDA, attention reads pages as decode passes do (paged.py): then the bits of a row do not depend on
its chunk, and there is no mask.

A chunk may have rows of several sequences (`JointRows`). Then the sequences and the KV rows that
they attend to are inputs of the chunk too; otherwise all chunks share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PAGED, JointRows, PassInputs, PassShape
from ..ggml.choose import DRAW_WORDS
from ..ggml.handles import Owner
from ..ggml.lib import C
from ..ggml.memory import Block, Sender
from ..ggml.ops import F16, I32, I64, Builder, Tensor
from ..pictures import PictureRows
from ..resident.layout import MORE_CHUNKS, PAGE
from ..resident.stage import Stage
from ..resident.state import State
from ..resident.weights import TokenEmbedding
from ..units import round_up
from .paged import ROW_WORDS, can_page, prompt_rows
from .rows import Window, gathered_rows

_ALIGN = 64  # words
# Sequences of a chunk, at most.
MAX_SEQS = _ALIGN
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
    """Rows of one sequence in a chunk: n of them, from position `first` on.

    has_axes: all of them are rows of a picture; else none is.
    """

    slot: int
    first: int
    n: int
    has_axes: bool = False

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.first + self.n


class Form(Enum):
    """How the rows of chunks are given to graphs.

    PLAIN: those of one sequence, as many as there are. JOINT: of several (`JointRows`).
    ROUNDED: of one or several; rows, places and sequences are rounded up, as far as there is room.
    """

    PLAIN = "plain"
    JOINT = "joint"
    ROUNDED = "rounded"


class _Sizes:
    """Words of the parts of the block: the chunk that graphs read, KV rows, and all chunks."""

    def __init__(
        self, state: State, is_paged: bool, window: Window | None, max_rows: int, n_rows: int,
        n_axes: int,
    ) -> None:  # fmt: skip
        n_ctx, n_seq = state.n_ctx, state.n_seq
        n_parts = 7 if n_seq > 1 else 3  # of a chunk; each is rounded up
        self.row = n_axes + n_parts - (n_seq > 1) + (ROW_WORDS if is_paged else n_ctx // PAGE)
        n_columns = n_first = n_more = 0
        most_seqs, n_pages = min(rounded_seqs(n_seq), MAX_SEQS), state.pool.table.shape[1]
        if window:  # patterns, rows and indices; a single row may have a mask in place of patterns
            self.row += 2 if is_paged else n_ctx // PAGE + 2
            n_more, n_first = 3, n_pages if is_paged else window.most_columns(0, 1) * 3 // 2
            n_columns = most_seqs * n_pages if is_paged else window.most_columns(0, most_seqs)
            n_columns = max(n_first, n_columns) + max_rows
        n_more += n_axes > 0
        n_parts += n_more
        self.current = round_up(max_rows * self.row, _ALIGN) + n_parts * _ALIGN + n_columns
        self.slot = _ALIGN
        self.draws = round_up(DRAW_WORDS, _ALIGN)
        self.kv_rows = n_ctx if n_seq > 1 else 0  # or lists of pages
        if is_paged:
            self.kv_rows = most_seqs * n_pages
        self.n_chunks = -(-n_rows // max_rows) + MORE_CHUNKS
        self.all = round_up(n_rows * self.row, _ALIGN) + (3 + n_more) * _ALIGN * self.n_chunks
        if window:
            self.all += self.n_chunks * n_first + n_rows
        # sequences and KV rows of chunks of several sequences
        self.all += _JOINT_CHUNKS * (self.slot + self.kv_rows + n_columns) if n_seq > 1 else 0
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
    axes: int
    mask: int  # or the rows that attention over pages reads

    @classmethod
    def of(cls, n: int, shape: PassShape) -> _Parts:
        """Return those of n rows, in a rectangle of that shape if it is ragged."""
        offsets, joint, axes = [0], (0, 0, 0, 0), 4 * n * shape.has_axes
        if shape.is_ragged:
            joint = shape.n_tokens, n, shape.n_seqs, n
        for words in (n, 2 * n, *joint, axes):
            offsets.append(offsets[-1] + round_up(words, _ALIGN))
        return cls(*offsets)


def _patterns(window: int | None) -> npt.NDArray[np.bool_]:
    """Return what rows see of a page: bool numpy [n_patterns, PAGE].

    Pattern i shows the first i positions. Those after PAGE are of layers with a window.
    """
    inside, ends = np.arange(PAGE)[None, :], np.arange(PAGE + 1)[:, None]
    if not window:
        return inside < ends
    shown = min(window, PAGE)
    ends = np.concatenate([ends, np.arange(PAGE + shown + 1)[:, None]])
    firsts = ends - shown
    firsts[: PAGE + 1] = 0
    found: npt.NDArray[np.bool_] = (firsts <= inside) & (inside < ends)
    return found


def _window_patterns(ends: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """Return the patterns of pages for rows whose windows end at `ends`, counted from the page."""
    shown = min(window, PAGE)
    ends = ends - np.clip(ends - PAGE, 0, window - shown)  # the page is all inside the window
    return np.clip(ends, 0, PAGE + shown) + PAGE + 1


class ChunkInputs(Owner):
    """Device memory for the inputs of all chunks of a sweep, and for those of one chunk at a time.

    A part of a sweep has at most n_rows rows in n_chunks chunks of at most max_rows rows.
    """

    def __init__(self, stage: Stage, max_rows: int, n_rows: int) -> None:
        device, hp, state = stage.device, stage.hp, stage.state
        self._device, self._state, self._n_embd = device, state, hp.n_embd
        self._is_paged = device.is_invariant and can_page(stage)
        self._window = window = Window(state) if state.rings else None
        n_axes = len(hp.rope_sections)
        sizes = self._sizes = _Sizes(state, self._is_paged, window, max_rows, n_rows, n_axes)
        self.n_chunks = sizes.n_chunks
        self._slot_at = sizes.current
        self._draws_at = self._slot_at + sizes.slot
        self._kv_rows_at = self._draws_at + sizes.draws
        self._chunks_at = self._kv_rows_at + sizes.kv_rows
        patterns = _patterns(state.window if window else None)
        shapes = {"words": (1, sizes.total), "patterns": (PAGE // 2, len(patterns))}
        self._block = self.own(Block(device, shapes, "the inputs of a prompt", "lower -ub or -c"))
        self._words, self.n_bytes = self._block.tensors["words"], self._block.n_bytes
        self._block.set("patterns", np.where(patterns, np.float16(0), np.float16(-np.inf)))
        most = max(sizes.current + sizes.slot + sizes.kv_rows, sizes.draws)
        self._sender = self.own(Sender(device, 4 * most))
        self._rows = self.own(Sender(device, 4 * hp.n_embd * max_rows))
        # of each chunk: first word, words, and those after them with its sequences and KV rows
        self._chunks: list[tuple[int, int, int]] = []
        self._max_rows, self._form = max_rows, Form.PLAIN

    def shape_of(self, segments: Sequence[Segment], form: Form) -> tuple[int, PassShape]:
        """Return the rows of a chunk, with copies of the first one, and its rectangle."""
        n, t = sum(segment.n for segment in segments), max(segment.n for segment in segments)
        n_kv, n_seqs = max(self.n_kv(one.end) for one in segments), len(segments)
        axes = any(one.has_axes for one in segments)
        if form is Form.ROUNDED:
            n, n_seqs = min(_rounded(n, _ROWS), self._max_rows), rounded_seqs(n_seqs)
            t = n if n_seqs == 1 else min(_rounded(t, _ROWS), self._max_rows // n_seqs)
        return n, PassShape(t, n_seqs, n_kv, 0, False, form is not Form.PLAIN, axes)

    def n_kv(self, n_used: int) -> int:
        """Return the KV length of graphs for n_used positions; PAGED: they serve any."""
        return PAGED if self._is_paged else kv_length(self._state, n_used)

    def fits(self, segments: Sequence[Segment], form: Form) -> bool:
        """Return whether there is room for what a chunk of several sequences attends to."""
        _, shape = self.shape_of(segments, form)
        return self._n_kv_words(shape) <= self._sizes.kv_rows

    def fit(self, chunks: Sequence[Sequence[Segment]], form: Form) -> bool:
        """Return whether there is room for the inputs of such chunks together."""
        n = sum(sum(self._n_words(*self.shape_of(each, form))) for each in chunks)
        return n <= self._sizes.all

    def _n_kv_words(self, shape: PassShape) -> int:
        """Return the words of what says where a rectangle's keys are: their rows, or pages."""
        each = self._state.pool.table.shape[1] if self._is_paged else shape.n_kv
        return each * shape.n_seqs if self._sizes.kv_rows else 0

    def _n_words(self, n: int, shape: PassShape) -> tuple[int, int]:
        """Return the words of a chunk that graphs read at the start of the block, and of others."""
        n_seen = ROW_WORDS * n if self._is_paged else shape.n_kv // PAGE * shape.n_tokens
        words = _Parts.of(n, shape).mask + round_up(n_seen, _ALIGN)
        if self._window:
            words += sum(self._window_words(n, shape))
        return words, _ALIGN + self._n_kv_words(shape) if shape.is_ragged else 0

    def _window_words(self, n: int, shape: PassShape) -> tuple[int, int, int]:
        """Return the words of masks, rows and indices of layers with a window; see `_n_words`."""
        if not self._window:
            return 0, 0, 0
        if self._is_paged:
            n_pages = self._window.pages.shape[1]
            return 0, round_up(n_pages * shape.n_seqs, _ALIGN), round_up(2 * n, _ALIGN)
        n_columns = self._window.columns(shape)[0]
        n_seen = n_columns // PAGE * shape.n_tokens
        if self._window.is_split(shape):
            n_seen = -(-n_columns // 2)  # the mask itself
        n_rows = round_up(n_columns * shape.n_seqs, _ALIGN)
        return round_up(n_seen, _ALIGN), n_rows, round_up(2 * n, _ALIGN)

    def _kv_words(self, slots: Sequence[int], n_kv: int) -> npt.NDArray[np.int32]:
        """Return where the keys of sequences are, I32 numpy [`_n_kv_words`]."""
        pool = self._state.pool
        rows = pool.table[[*slots]] if self._is_paged else gathered_rows(pool, (*slots,), n_kv)
        return rows.reshape(-1)

    def begin(self, form: Form, last: Segment) -> None:
        """Begin chunks of a form; last: the last rows of PLAIN ones.

        What those chunks share is uploaded: their sequence, and where its keys are.
        """
        self._chunks, self._form = [], form
        if form is Form.PLAIN:
            self._sender.put(self._words, np.array([last.slot], np.int32), 4 * self._slot_at)
            if self._sizes.kv_rows:
                where = self._kv_words([last.slot], self.n_kv(last.end))
                self._sender.put(self._words, where, 4 * self._kv_rows_at)

    def _seen(
        self, seqs: npt.NDArray[np.int64], places: npt.NDArray[np.int64],
        in_rect: npt.NDArray[np.int64], n: int, shape: PassShape,
    ) -> npt.NDArray[np.int32]:  # fmt: skip
        """Return what says which keys a row attends to: patterns of masks, or rows over pages.

        seqs, places, in_rect: of each row its sequence in the chunk, its position, and its place in
        the rectangle. n: rows of the chunk, copies included.
        """
        if self._is_paged:
            return prompt_rows(seqs, places, n).reshape(-1)
        n_pages = shape.n_kv // PAGE
        # a mask leaves something
        seen = np.full((shape.n_tokens, n_pages), PAGE, dtype=np.int32)
        seen[in_rect] = np.clip(places[:, None] + 1 - PAGE * np.arange(n_pages), 0, PAGE)
        return seen.reshape(-1)

    def _fill_window(
        self, words: npt.NDArray[np.int32], seqs: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64], in_rect: npt.NDArray[np.int64],
        segments: Sequence[Segment], n: int, shape: PassShape,
    ) -> None:  # fmt: skip
        """Write what layers with a window read; the rest as in `_seen`."""
        if not (window := self._window):
            return
        padded = [*segments, *[segments[0]] * (shape.n_seqs - len(segments))]
        slots, firsts = tuple(one.slot for one in padded), [one.first for one in padded]
        n_seen, n_rows, _ = self._window_words(n, shape)
        columns = window.positions(shape, firsts)
        rows = window.pages[[*slots]] if self._is_paged else window.rows(slots, columns)
        words[n_seen:][: rows.size] = rows.reshape(-1)
        idx = words[n_seen + n_rows :][: 2 * n].view(np.int64)
        idx[:] = self._state.ring_spare_row
        idx[: len(places)] = self._state.ring_rows(np.array(slots)[seqs], places)
        if self._is_paged:
            return
        if window.is_split(shape):
            words[:n_seen].view(np.float16)[: columns.size] = window.mask(columns[0], firsts[0])
            return
        n_pages = columns.shape[1] // PAGE
        seen = words[: shape.n_tokens * n_pages].reshape(-1, n_pages)
        seen[:] = PAGE
        ends = places[:, None] + 1 - columns[seqs][:, ::PAGE]
        seen[in_rect] = _window_patterns(ends, window.n)

    def add(
        self, segments: Sequence[Segment], tokens: npt.NDArray[np.int32],
        embedding: TokenEmbedding | None, hidden: Tensor, row: int,
        pictures: Mapping[int, PictureRows],
    ) -> None:  # fmt: skip
        """Upload the inputs of the next chunk, and its embeddings to a row of hidden.

        segments: the rows, one for each sequence. embedding: None if the rows are there already.
        hidden: F32 [n_embd, n], at least row + n rows. pictures: of sequences that have any.
        """
        n, shape = self.shape_of(segments, self._form)
        n_real, lengths = len(tokens), [segment.n for segment in segments]
        places = np.concatenate([np.arange(one.first, one.end) for one in segments])
        seqs = np.repeat(np.arange(len(segments)), lengths)
        in_rect = np.concatenate([np.arange(m) for m in lengths]) + seqs * shape.n_seq_tokens
        own = [segment.slot for segment in segments]
        n_first, n_rest = self._n_words(n, shape)
        words, parts = np.zeros(n_first + n_rest, dtype=np.int32), _Parts.of(n, shape)
        at, n_axes = (parts.axes, 3) if shape.has_axes else (parts.pos, 1)
        axes = words[at:][: n_axes * n].reshape(n_axes, n)[:, :n_real]
        axes[:] = places - np.repeat([self._state.saved[slot] for slot in own], lengths)
        starts = np.cumsum([0, *lengths])
        for one, at in zip(segments, starts):
            if one.slot in pictures:
                found = pictures[one.slot].positions[:n_axes, one.first : one.end]
                axes[:, at : at + one.n] = found
        kv_idx = words[parts.idx :][: 2 * n].view(np.int64)
        kv_idx[:n_real] = self._state.pool.rows(np.repeat(own, lengths), places)
        kv_idx[n_real:] = self._state.spare_row
        seen = self._seen(seqs, places, in_rect, n, shape)
        words[parts.mask :][: seen.size] = seen
        at = parts.mask + round_up(seen.size, _ALIGN)
        self._fill_window(words[at:], seqs, places, in_rect, segments, n, shape)
        if shape.is_ragged:
            words[parts.places + in_rect] = np.arange(n_real)
            words[parts.real :][:n_real] = np.arange(n_real)
            words[parts.rows :][:n_real] = in_rect
            words[parts.lengths :][: len(lengths)] = lengths
            words[n_first : n_first + _ALIGN] = -1  # no sequence
            words[n_first : n_first + len(own)] = own
            if self._sizes.kv_rows:
                own += own[:1] * (shape.n_seqs - len(own))
                words[n_first + _ALIGN :] = self._kv_words(own, shape.n_kv)
        at = sum(self._chunks[-1]) if self._chunks else self._chunks_at
        self._chunks.append((at, n_first, n_rest))
        self._sender.put(self._words, words, 4 * at)
        if embedding:
            size = 4 * self._n_embd
            rows = self._rows.begin()[: size * n_real].view(np.float32)
            each = rows.reshape(n_real, self._n_embd)
            embedding.rows(np.maximum(tokens, 0), each)
            for one, at in zip(segments, starts):
                if one.has_axes:
                    pictures[one.slot].fill(one.first, each[at : at + one.n])
            self._rows.send(hidden, rows.nbytes, size * row)

    def select(self, chunk: int) -> None:
        """Enqueue the copy of a chunk's inputs to where graphs read them."""
        at, n, n_rest = self._chunks[chunk]
        parts, kv_at = [(at, 0, n)], at + n + _ALIGN
        if n_rest:
            parts.append((at + n, self._slot_at, _ALIGN))
        if n_rest > _ALIGN:
            parts.append((kv_at, self._kv_rows_at, n_rest - _ALIGN))
        stream, words = self._device.compute.ptr, self._words
        for source, to, n_words in parts:
            C.mg_copy_bytes(stream, words, 4 * source, words, 4 * to, 4 * n_words)

    def send_draws(self, draws: npt.NDArray[np.int32]) -> None:
        """Upload what the candidates of one row depend on, I32 numpy [1, DRAW_WORDS]."""
        self._sender.put(self._words, draws, 4 * self._draws_at)

    def draws(self, b: Builder) -> Tensor:
        """Return the leaf that reads them, I32 [DRAW_WORDS, 1]."""
        return self._block.leaf(b, "words", I32, DRAW_WORDS, 1, at=4 * self._draws_at)

    def leaves(self, b: Builder, n: int, shape: PassShape) -> PassInputs:
        """Return the inputs of a layer for n rows; shape: the rectangle of the chunk.

        n_kv matters to attention only.
        """
        t, n_seqs, n_kv = shape[:3]
        parts = _Parts.of(n, shape)
        kq_mask = kv_rows = pages = rows = joint = None

        def leaf(at: int, dtype: int, *ne: int) -> Tensor:
            return self._block.leaf(b, "words", dtype, *ne, at=4 * at)

        slots = leaf(self._slot_at, I32, n_seqs)
        C.ggml_set_input(slots)  # kernels read it early
        if self._is_paged:
            pages = leaf(self._kv_rows_at, I32, self._state.pool.table.shape[1], n_seqs)
            rows = leaf(parts.mask, I32, ROW_WORDS, n)
        else:
            n_kv = n_kv or PAGE

            kq_mask = self._mask(b, parts.mask, n_kv, shape)
            if self._sizes.kv_rows:
                kv_rows = leaf(self._kv_rows_at, I32, n_kv * n_seqs)
        if shape.is_ragged:
            joint = JointRows(
                leaf(parts.places, I32, t * n_seqs),
                leaf(parts.rows, I32, n),
                leaf(parts.lengths, I32, n_seqs),
                leaf(parts.real, I32, n),
            )
        inp = PassInputs(
            leaf(parts.axes, I32, 4 * n) if shape.has_axes else leaf(parts.pos, I32, n),
            leaf(parts.idx, I64, n), slots, kq_mask=kq_mask, kv_rows=kv_rows, pages=pages,
            rows=rows, joint=joint,
        )  # fmt: skip
        window = self._window
        if not window:
            return inp
        shape = shape._replace(n_kv=n_kv)
        n_seen, n_rows, _ = self._window_words(n, shape)
        if pages is not None:
            at = parts.mask + round_up(ROW_WORDS * n, _ALIGN)
            pages = leaf(at, I32, window.pages.shape[1], n_seqs)
            kv_idx = leaf(at + n_rows, I64, n)
            return replace(inp, window=replace(inp, kv_idx=kv_idx, pages=pages))
        at = parts.mask + round_up(n_kv // PAGE * shape.n_tokens, _ALIGN)
        n_columns, n_parts = window.columns(shape)
        if window.is_split(shape):
            kq_mask = leaf(at, F16, n_columns, 1, 1, 1)
        else:
            kq_mask = self._mask(b, at, n_columns, shape)
        kv_rows = leaf(at + n_seen, I32, n_columns * n_seqs)
        kv_idx = leaf(at + n_seen + n_rows, I64, n)
        own = replace(inp, kv_idx=kv_idx, kv_rows=kv_rows, kq_mask=kq_mask, n_parts=n_parts)
        return replace(inp, window=own)

    def _mask(self, b: Builder, at: int, n_columns: int, shape: PassShape) -> Tensor:
        """Append the mask over n_columns of the rows of a rectangle; at: word of its patterns."""
        n = n_columns // PAGE * shape.n_tokens
        seen = self._block.leaf(b, "words", I32, n, at=4 * at)
        patterns = b.retype(b.get_rows(self._block.tensors["patterns"], seen), F16, PAGE)
        return b.reshape(patterns, n_columns, shape.n_seq_tokens, 1, shape.n_seqs)
