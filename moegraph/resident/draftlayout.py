"""Sizes of a DFlash drafter, and the rings where it keeps positions; the planner reads it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..arch.dflash import DFlashHParams
from ..arch.draftfile import DraftFile
from ..errors import UnsupportedModel
from ..gguf.tensorfile import TensorInfo
from ..units import round_up
from .layout import PAGE

# Rows of a page of a ring, where attention reads it through a list of pages.
RING_PAGE = 16
Mask = npt.NDArray[np.float16]
Ints = npt.NDArray[np.int32]
# Numbers that lists of pages are made of; no ring has half as many pages.
_COUNT: Ints = np.arange(1 << 17, dtype=np.int32)


@dataclass(frozen=True)
class RingShape:
    """Rows of a sequence in layers that reach back equally far.

    The first n_block rows are for the block that is drafted. Position p is in row
    n_block + p % n_cells, so the ring holds the last n_cells positions. window: positions that a
    row of the block reaches back, its own included; 0 for all that is held.
    """

    window: int
    n_block: int
    n_rows: int

    @classmethod
    def of(cls, window: int, n_block: int, n_ctx: int) -> RingShape:
        """Return a ring for a window in a context of n_ctx positions."""
        needed, n_block = min(window or n_ctx, n_ctx), round_up(n_block, RING_PAGE)
        return cls(window, n_block, round_up(n_block + needed, PAGE))

    @property
    def n_cells(self) -> int:
        """Positions that the ring holds."""
        return self.n_rows - self.n_block

    def length(self, n_past: int, least: int = 0) -> int:
        """Return how many rows a graph reads to see n_past positions, of few different numbers.

        least: rows that it reads if the ring has so many.
        """
        n = max(self.n_block + min(n_past, self.n_cells), least)
        step = max(PAGE, (1 << (n - 1).bit_length()) // 8)
        return min(self.n_rows, round_up(n, step))

    def rows(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows of positions."""
        return self.n_block + places % self.n_cells

    def list_pages(self, out: Ints, held: Span, n: int, base: int) -> tuple[int, Ints]:
        """Fill in what a block of n rows sees, for attention that reads pages of RING_PAGE rows.

        out: I32 numpy, gets the pages; base: that of the first row of the sequence. Returns how
        many rows of these pages, from the first on, are positions that the block sees, and after
        how many rows after them the others are: positions of a page that is not seen whole, and
        the block. Every row sees as far back as the first.
        """
        first = max(held.first, held.high - self.n_cells, 0)
        if self.window:
            first = max(first, held.n_past + 1 - self.window)
        begin = min(round_up(first, RING_PAGE), max(held.n_past, first))
        n_seen = held.n_past - begin if begin < held.n_past else 0
        n_whole, n_around = -(-n_seen // RING_PAGE), self.n_cells // RING_PAGE
        n_block = self.n_block // RING_PAGE
        at, cells = begin // RING_PAGE % n_around, base + n_block
        out[:n_whole] = _COUNT[at : at + n_whole] + cells
        if at + n_whole > n_around:  # around the end of the ring
            out[n_around - at : n_whole] -= n_around
        out[n_whole : n_whole + n_block] = _COUNT[:n_block] + base
        others = _COUNT[:n] + (RING_PAGE * n_whole - n_seen)
        if first < begin:
            out[n_whole + n_block] = cells + first // RING_PAGE % n_around
            at = RING_PAGE * (n_whole + n_block) + first % RING_PAGE - n_seen
            others = np.concatenate((_COUNT[: begin - first] + at, others))
        return n_seen, others

    def fill_mask(self, mask: Mask, held: Span, is_causal: bool) -> None:
        """Fill the mask of a block of n rows, numpy shape [n, length]."""
        n = len(mask)
        first = max(held.first, held.high - self.n_cells, 0)
        mask[:] = -np.inf
        block = mask[:, :n]
        reach = self.window or n + 1
        ahead = np.arange(n)[:, None] - np.arange(n)
        block[(ahead < reach) & ((ahead >= 0) | (not is_causal))] = 0.0
        if not self.window or held.n_past + n - self.window < first:
            self._show(mask, first, held.n_past)
            return
        for i in range(n):
            self._show(mask[i : i + 1], max(first, held.n_past + i + 1 - self.window), held.n_past)

    def _show(self, rows: Mask, first: int, end: int) -> None:
        if first >= end:
            return
        at, stop = first % self.n_cells, (end - 1) % self.n_cells + 1
        if at < stop:
            rows[:, self.n_block + at : self.n_block + stop] = 0.0
        else:
            rows[:, self.n_block + at : self.n_rows] = 0.0
            rows[:, self.n_block : self.n_block + stop] = 0.0


@dataclass
class Span:
    """Positions of a sequence that a drafter has seen: from first up to n_past.

    high: the most positions that it had; a ring has lost what is n_cells or more before. firsts:
    where each ring begins, if some begin later than `first`.
    """

    first: int = 0
    n_past: int = 0
    high: int = 0
    firsts: tuple[int, ...] = ()

    def restart(self, n_past: int) -> None:
        """Begin at a position, with nothing before it."""
        self.first = self.n_past = self.high = n_past
        self.firsts = ()

    def of_ring(self, kind: int) -> Span:
        """Return what a ring has."""
        return replace(self, first=max(self.first, self.firsts[kind])) if self.firsts else self

    def grow(self, n: int) -> None:
        """Take n more positions."""
        self.n_past += n
        self.high = max(self.high, self.n_past)

    def truncate(self, n_past: int) -> None:
        """Forget the positions from n_past on."""
        if n_past < self.first:
            self.restart(n_past)
        self.n_past = min(self.n_past, n_past)


def ring_shapes(hp: DFlashHParams, n_ctx: int) -> tuple[RingShape, ...]:
    """Return the different rings of a drafter's layers."""
    windows = dict.fromkeys(hp.window(il) for il in range(hp.n_layer))
    return tuple(RingShape.of(window, hp.block_size, n_ctx) for window in windows)


_Q = GGMLQuantizationType
# Bytes; no device aligns tensors to more.
_ALIGN = 128
EMBEDDING = "token_embd.weight"
# Rows of a prompt in one graph.
CHUNK = 512
# Tokens that a sequence took whose K and V one graph makes, at most.
N_TAKEN = 64
# Sequences and rows of a graph that drafts for several sequences, at most.
MOST_JOINT, JOINT_ROWS = 16, 32
# Lengths of drafts that have graphs, where graphs are expensive.
_LENGTHS = (3, 7, 11)
# Of inputs of candidates and alignment, for each row of a block, and in all.
_ROW_BYTES, _SMALL = 4096, 16 << 10


def built_length(n: int, most: int) -> int:
    """Return the length of the draft whose graph drafts n tokens, where graphs are expensive.

    A block takes nearly the same time for any length, and a device that captures graphs takes long
    for a new one. most: the longest draft.
    """
    return next((at for at in _LENGTHS if n <= at < most), most)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as it will be on the device: ne, of a type; from column `first` of a file's."""

    name: str
    type: GGMLQuantizationType
    ne: tuple[int, int]
    source: TensorInfo
    first: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.ne[0] // block * size


def plan_tensors(file: DraftFile, as_stored: bool) -> Iterator[PlannedTensor]:
    """Yield what goes to the device; fc is cut into one matrix for each target layer."""
    n_embd = file.hparams.n_embd
    has_head = "output.weight" in file.tensors
    for name, info in file.tensors.items():
        if name == "d2t" or (name == EMBEDDING and has_head):
            continue
        n_rows = info.ne[1] * info.ne[2] * info.ne[3]
        if name == "fc.weight":
            kind = _stored(info, n_embd, as_stored)
            for k in range(len(file.hparams.target_layers)):
                yield PlannedTensor(f"fc.{k}", kind, (n_embd, n_rows), info, k * n_embd)
        else:
            kind = _stored(info, info.ne[0], as_stored)
            yield PlannedTensor(name, kind, (info.ne[0], n_rows), info, 0)


def _stored(info: TensorInfo, n: int, as_stored: bool) -> GGMLQuantizationType:
    if info.n_dims == 1 or info.ne[1] == 1:
        return _Q.F32
    if n % GGML_QUANT_SIZES[info.type][0]:
        raise UnsupportedModel(f"tensor {info.name}: rows of {info.type.name} cannot be cut at {n}")
    return _Q.Q8_0 if info.type is _Q.BF16 and not as_stored and n % 32 == 0 else info.type


def dflash_bytes(
    file: DraftFile, n_vocab: int, n_ctx: int, n_seq: int, n_sweep: int, as_stored: bool = False
) -> int:
    """Return a bound on the device bytes of a `DFlashDrafter`; arguments as there.

    n_vocab: tokens of the target. n_ctx: most positions that layers without a window see.
    """
    hp, planned = file.hparams, plan_tensors(file, as_stored)
    weights = sum(round_up(p.row_bytes * p.ne[1], _ALIGN) for p in planned)
    rows = {shape.window: shape.n_rows for shape in ring_shapes(hp, n_ctx)}
    rings = 4 * hp.n_embd_gqa * n_seq * sum(rows[hp.window(il)] for il in range(hp.n_layer))
    memory = _memory_bytes(hp, n_ctx, n_seq, n_sweep)
    return weights + rings + memory + _graph_bytes(hp, n_vocab, n_seq, n_sweep)


def _memory_bytes(hp: DFlashHParams, n_ctx: int, n_seq: int, n_sweep: int) -> int:
    """Return a bound on what `DraftMemory` takes, and `JointMemory` of several sequences."""
    shapes = ring_shapes(hp, n_ctx)
    masks = 2 * hp.block_size * sum(shape.n_rows for shape in shapes)
    block = hp.block_size * (4 * hp.n_embd + _ROW_BYTES)
    words = 4 * ((2 + len(shapes)) * N_TAKEN + (1 + len(shapes)) * n_sweep)
    rows = 4 * hp.n_embd * n_sweep
    joint = 0
    if n_seq > 1:
        pages = 4 * MOST_JOINT * sum(shape.n_rows // RING_PAGE + 1 for shape in shapes)
        joint = JOINT_ROWS * (4 * hp.n_embd + _ROW_BYTES) + MOST_JOINT * 4 * hp.n_embd + pages
        joint += _SMALL
    return masks + block + words + rows + 4 * hp.n_vocab_draft + joint + _SMALL


def joint_lengths(most: int, n_seqs: int, has_anchor: bool) -> set[int]:
    """Return the lengths of drafts of several sequences that have graphs, where few should.

    most: the longest draft of one. has_anchor: a block has a row that drafts nothing.
    """
    longest = JOINT_ROWS // n_seqs - has_anchor
    return {min(built_length(n, most), longest) for n in range(1, min(most, longest) + 1)}


def _graph_bytes(hp: DFlashHParams, n_vocab: int, n_seq: int, n_sweep: int) -> int:
    """Return a bound on the intermediates of a drafter's graphs."""
    # of a chunk of a prompt: fused and normed rows, K and V; of a block: its widest layer, logits
    chunk = 4 * min(CHUNK, n_sweep) * (4 * hp.n_embd + 6 * hp.n_embd_gqa)
    widest = 4 * hp.n_embd_head * hp.n_head + 3 * hp.n_ff + 6 * hp.n_embd
    logits = (4 if hp.markov_rank else 2) * (hp.n_vocab_draft or n_vocab)
    n_rows = max(hp.block_size, JOINT_ROWS if n_seq > 1 else 0)
    return max(chunk, 4 * n_rows * (widest + logits))
