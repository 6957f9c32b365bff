"""Fixed memory of a DFlash drafter, and its drafts for several sequences at once.

One graph drafts for several: it depends neither on which sequences these are nor on how long they
are, because attention reads K and V through lists of pages. The first rows of all blocks come
first, then all second ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch.dflash import (
    BlockInputs,
    DFlashHParams,
    build_block,
    build_keys,
    build_outputs,
    build_queries,
)
from ..arch.dspark import DraftResults, HeadMatrix, Scratch
from ..ggml.choose import DRAW_WORDS
from ..ggml.device import Device
from ..ggml.handles import Context, Owner
from ..ggml.lib import C
from ..ggml.memory import Block, Sender
from ..ggml.ops import ATTN_WORDS, F16, F32, I32, Builder, Tensor
from ..resident.draftlayout import MOST_JOINT, N_TAKEN, RING_PAGE, Mask, RingShape
from ..resident.draftring import DraftRings
from ..resident.draftweights import DraftWeights
from ..resident.layout import MAX_PAGED_ROWS
from ..units import round_up
from .head import no_races, race_words
from .paged import describe_path, pages_are_supported

_ALIGN = 256
# Most tokens of a depth of which it is known what follows them.
BEAM = 4
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class _Layout:
    """Byte offsets in the device memory.

    The inputs of a draft end with the embedding of the anchor, and those of the masks follow it, so
    one copy brings all that changes.
    """

    def __init__(self, hp: DFlashHParams, shapes: Sequence[RingShape], n_sweep: int) -> None:
        n, row = hp.block_size, 4 * hp.n_embd
        self._masks_end = sum(round_up(2 * n * shape.n_rows, _ALIGN) for shape in shapes)
        self.pos = self._masks_end
        self.token = self.pos + 4 * n
        self.anchor = round_up(self.token + 4, _ALIGN)
        self.masks = self.anchor + row  # embeddings of the mask token
        self.draws = round_up(self.anchor + row * n, _ALIGN)
        self.n_draws = max(n, BEAM)
        self.races = self.draws + 4 * DRAW_WORDS * self.n_draws
        self.n_races = n if hp.markov_rank else 0
        self.rows = self.races + 4 * DRAW_WORDS * self.n_races
        self.n_row_words = (2 + len(shapes)) * N_TAKEN
        self.prompt = self.rows + 4 * self.n_row_words
        self.n_prompt_words = (1 + len(shapes)) * n_sweep
        self.fused = round_up(self.prompt + 4 * self.n_prompt_words, _ALIGN)
        self.scratch = self.fused + row * n_sweep
        # before the table there are zeros, which a look-up of -1 reads: that is the argmax of NaN
        self.d2t = self.scratch + round_up(8 * n * BEAM, _ALIGN) + _ALIGN
        self.size = self.d2t + 4 * hp.n_vocab_draft

    def kq_masks(self, n_rows: int, lengths: Sequence[int]) -> list[int]:
        """Return where the masks of a draft begin; the last one ends where positions begin."""
        sizes = [round_up(2 * n_rows * length, _ALIGN) for length in lengths]
        return [self._masks_end - sum(sizes[i:]) for i in range(len(sizes))]


class DraftMemory(Owner):
    """Fixed memory for the inputs of a drafter's graphs, and for fused features of a prompt.

    features: F32 [n_embd, n_sweep], fused outputs of the target layers for a part of a prompt.
    n_bytes: device memory.
    """

    def __init__(
        self, device: Device, hp: DFlashHParams, shapes: Sequence[RingShape], n_sweep: int
    ) -> None:
        """n_sweep: most rows of a part of a prompt."""
        self._hp, self._n_sweep, self._n_rings = hp, n_sweep, len(shapes)
        at = self._at = _Layout(hp, shapes, n_sweep)
        what, remedy = "the inputs of drafts and features of prompts", "lower -c or use --spec off"
        self._block = self.own(Block(device, {"all": (1, at.size // 4)}, what, remedy))
        self._all, self.n_bytes = self._block.tensors["all"], self._block.n_bytes
        self._context = self.own(Context(2))
        features = C.ggml_new_tensor_2d(self._context.ptr, F32, hp.n_embd, n_sweep)
        self.features: Tensor = self._block.put(features, "all", at.fused)
        self._inputs = self.own(Sender(device, at.masks))
        self._words = self.own(Sender(device, 4 * max(at.n_row_words, at.n_prompt_words)))
        self._races = self.own(Sender(device, 4 * DRAW_WORDS * max(1, at.n_races)))
        self._block.set("all", no_races(at.n_draws), at.draws)

    def _leaf(self, b: Builder, offset: int, dtype: int, *ne: int) -> Tensor:
        return self._block.leaf(b, "all", dtype, *ne, at=offset)

    def send_mask(self, embedding: Floats) -> None:
        """Write the embedding of the mask token to all rows of a block but the first."""
        self._block.set("all", np.tile(embedding, self._hp.block_size - 1), self._at.masks)

    def send_d2t(self, d2t: Ints) -> Tensor:
        """Write the target's token of each token of a reduced vocabulary; return I32 [1, n]."""
        self._block.set("all", d2t, self._at.d2t)
        tensor = C.ggml_new_tensor_2d(self._context.ptr, I32, 1, len(d2t))
        return self._block.put(tensor, "all", self._at.d2t)

    def block_leaves(
        self, b: Builder, n_rows: int, n_draft: int, lengths: Sequence[int]
    ) -> BlockInputs:
        """Return the inputs of a block of n_rows rows."""
        at = self._at
        starts = at.kq_masks(n_rows, lengths)
        return BlockInputs(
            embd=self._leaf(b, at.anchor, F32, self._hp.n_embd, n_rows),
            pos=self._leaf(b, at.pos, I32, n_rows),
            anchor=self._leaf(b, at.token, I32, 1),
            masks=[self._leaf(b, start, F16, n, n_rows) for start, n in zip(starts, lengths)],
            draws=self._leaf(b, at.draws, I32, DRAW_WORDS, n_draft),
        )

    def begin(
        self, embedding: Floats, anchor: int, n_past: int, n_rows: int, lengths: Sequence[int]
    ) -> list[Mask]:
        """Write the inputs of a block; return its masks to fill, numpy shape [n_rows, length]."""
        at, host = self._at, self._inputs.begin()
        host[at.anchor : at.anchor + embedding.nbytes].view(np.float32)[:] = embedding
        host[at.pos : at.pos + 4 * n_rows].view(np.int32)[:] = n_past + np.arange(n_rows)
        host[at.token : at.token + 4].view(np.int32)[0] = anchor
        return [
            host[start : start + 2 * n_rows * n].view(np.float16).reshape(n_rows, n)
            for start, n in zip(at.kq_masks(n_rows, lengths), lengths)
        ]

    def send(self, n_rows: int, lengths: Sequence[int]) -> None:
        """Enqueue the upload of the inputs of a block."""
        first = self._at.kq_masks(n_rows, lengths)[0]
        self._inputs.send(self._all, self._at.masks - first, first, first)

    def send_rows(self, places: Longs, taken: Longs, cells: Sequence[Ints]) -> None:
        """Enqueue the upload of positions of tokens that a sequence took.

        taken: their rows in the ring of hidden states. cells: where their K and V go.
        """
        self._send_words(self._at.rows, [places, taken, *cells])

    def row_leaves(self, b: Builder, n: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return what `send_rows` sends, I32 [n] each."""
        pos, taken, *cells = self._word_leaves(b, self._at.rows, n, n, 2)
        return pos, taken, cells

    def send_prompt(self, row: int, places: Longs, cells: Sequence[Ints]) -> None:
        """Enqueue the upload of positions of rows of a prompt, and where K and V go.

        row: the first of these rows.
        """
        words = np.zeros((1 + self._n_rings, self._n_sweep), np.int32)
        found = np.stack([places, *(cell.astype(np.int64) for cell in cells)])
        words[:, row : row + len(places)] = found
        self._send_words(self._at.prompt, [words.reshape(-1)])

    def prompt_leaves(self, b: Builder, row: int, n: int) -> tuple[Tensor, list[Tensor]]:
        """Return what `send_prompt` sends of rows [row, row + n), I32 [n] each."""
        pos, *cells = self._word_leaves(b, self._at.prompt + 4 * row, n, self._n_sweep, 1)
        return pos, cells

    def _send_words(self, to: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        self._words.put(self._all, np.concatenate(parts).astype(np.int32), to)

    def _word_leaves(self, b: Builder, at: int, n: int, stride: int, n_more: int) -> list[Tensor]:
        """Return leaves of n words each: n_more of them, and rows of each ring."""
        return [self._leaf(b, at + 4 * i * stride, I32, n) for i in range(n_more + self._n_rings)]

    def races_leaf(self, b: Builder, n: int) -> Tensor:
        """Return what `send_races` sends, I32 [DRAW_WORDS, n]."""
        return self._leaf(b, self._at.races, I32, DRAW_WORDS, n)

    def send_races(self, temperature: float, keys: Sequence[int]) -> None:
        """Enqueue the upload of what the races of some rows depend on; the last draft has ended."""
        self._races.put(self._all, race_words(temperature, keys), self._at.races)

    def scratch(self, b: Builder, i: int, m: int) -> Scratch:
        """Return memory for ids of m tokens, at most BEAM, after the i-th row of a block."""
        at = self._at.scratch + 8 * BEAM * i
        return Scratch(self._leaf(b, at, F32, m), self._leaf(b, at + 4 * BEAM, I32, m))

    def fused(self, b: Builder, row: int, n: int) -> Tensor:
        """Return a leaf of rows [row, row + n) of `features`, F32 [n_embd, n]."""
        n_embd = self._hp.n_embd
        return self._leaf(b, self._at.fused + 4 * n_embd * row, F32, n_embd, n)


@dataclass(frozen=True)
class JointInputs:
    """Inputs of the blocks of m sequences, n rows in all.

    embd F32 [n_embd, n]. pos I32 [n]. anchors I32 [m]. Of each ring: cells I32 [n], where K and V
    of the rows go; pages I32 [n_pages, m] and rows I32 [ATTN_WORDS, n], see `Builder.paged_attn`.
    draws I32 [DRAW_WORDS, m * n_draft]: for candidates.
    """

    embd: Tensor
    pos: Tensor
    anchors: Tensor
    cells: Sequence[Tensor]
    pages: Sequence[Tensor]
    rows: Sequence[Tensor]
    draws: Tensor


class JointMemory(Owner):
    """Fixed memory for the inputs of such graphs.

    n_bytes: device memory.
    """

    def __init__(self, device: Device, hp: DFlashHParams, rings: DraftRings, mask: Floats) -> None:
        """mask: the embedding of the mask token."""
        self._hp, self._rings = hp, rings
        # a page more, of which a window sees a part
        self._n_pages = [shape.n_rows // RING_PAGE + 1 for shape in rings.shapes]
        words = [MAX_PAGED_ROWS, MAX_PAGED_ROWS]
        for n_pages in self._n_pages:
            words += [MAX_PAGED_ROWS, ATTN_WORDS * MAX_PAGED_ROWS, MOST_JOINT * n_pages]
        self._at = [0, *accumulate(round_up(n, _ALIGN // 4) for n in words)]
        shapes = {
            "words": (1, self._at[-1]),
            "embd": (hp.n_embd, MOST_JOINT + MAX_PAGED_ROWS),  # of anchors, then of masks
            "draws": (DRAW_WORDS, MAX_PAGED_ROWS),
        }
        what, remedy = "the inputs of drafts of several sequences", "lower -np or use --spec off"
        self._block = self.own(Block(device, shapes, what, remedy))
        self.n_bytes, self._row = self._block.n_bytes, 4 * hp.n_embd
        self._block.set("embd", np.tile(mask, MAX_PAGED_ROWS), MOST_JOINT * self._row)
        self._block.set("draws", no_races(MAX_PAGED_ROWS))
        self._words = self.own(Sender(device, 4 * self._at[-1]))
        self._anchors = self.own(Sender(device, MOST_JOINT * self._row))

    def leaves(self, b: Builder, m: int, n_rows: int, n_draft: int) -> JointInputs:
        """Return the inputs of m blocks of n_rows rows."""
        n, kinds = m * n_rows, range(len(self._n_pages))

        def leaf(part: int, *ne: int) -> Tensor:
            return self._block.leaf(b, "words", I32, *ne, at=4 * self._at[part])

        first = (MOST_JOINT - m) * self._row
        return JointInputs(
            embd=self._block.leaf(b, "embd", F32, self._hp.n_embd, n, at=first),
            pos=leaf(0, n),
            anchors=leaf(1, m),
            cells=[leaf(2 + 3 * kind, n) for kind in kinds],
            rows=[leaf(3 + 3 * kind, ATTN_WORDS, n) for kind in kinds],
            pages=[leaf(4 + 3 * kind, self._n_pages[kind], m) for kind in kinds],
            draws=self._block.leaf(b, "draws", I32, DRAW_WORDS, m * n_draft),
        )

    def send(self, anchors: Mapping[int, int], embeddings: Sequence[Floats], n_rows: int) -> None:
        """Enqueue the upload of the inputs of blocks of n_rows rows after anchors, by sequence."""
        m, slots = len(anchors), list(anchors)
        words = self._words.begin().view(np.int32)
        parts = [words[begin:end] for begin, end in zip(self._at, self._at[1:])]
        n_past = np.array([self._rings.spans[slot].n_past for slot in slots])
        depths = np.arange(n_rows)[:, None]
        parts[0][: m * n_rows] = (n_past + depths).reshape(-1)
        parts[1][:m] = list(anchors.values())
        for kind, n_pages in enumerate(self._n_pages):
            cells, rows, pages = parts[2 + 3 * kind : 5 + 3 * kind]
            blocks = np.array(slots) * self._rings.shapes[kind].n_rows + depths
            cells[: m * n_rows] = blocks.reshape(-1)
            described = rows[: ATTN_WORDS * m * n_rows].reshape(n_rows, m, ATTN_WORDS)
            for i, slot in enumerate(slots):
                listed = pages[i * n_pages : (i + 1) * n_pages]
                n_seen, others = self._rings.list_pages(listed, kind, slot, n_rows)
                n_keys = np.full(n_rows, n_seen + len(others), np.int64)
                if self._hp.is_causal:
                    n_keys -= np.arange(n_rows)[::-1]
                describe_path(described[:, i], i, n_seen, n_keys, others)
        tensors = self._block.tensors
        self._words.send(tensors["words"], words.nbytes)
        self._anchors.put(tensors["embd"], np.stack(embeddings), (MOST_JOINT - m) * self._row)


def can_join(device: Device, hp: DFlashHParams, rings: DraftRings) -> bool:
    """Return whether a device can draft for several sequences at once."""
    d = hp.n_embd_head
    if len(rings.spans) < 2 or d % 32 or d > C.MOEGRAPH_ATTN_HEAD or hp.n_embd % 64:
        return False
    if max(shape.n_rows for shape in rings.shapes) >= C.MOEGRAPH_ATTN_CAPACITY:
        return False
    return pages_are_supported(device, d, hp.n_head, rings.k[0], rings.v[0], 1, RING_PAGE)


def build_joint_draft(
    b: Builder, hp: DFlashHParams, w: DraftWeights, rings: DraftRings, inp: JointInputs,
    head: HeadMatrix,
) -> DraftResults:  # fmt: skip
    """Append drafts after all anchors: results of the first token of each, then the second ones."""
    attend = partial(_attend, b, hp, w, rings, inp)
    cur = build_block(b, hp, w, inp.embd, attend)
    n = inp.draws.ne[1]
    rows = b.view(cur, (hp.n_embd, n), (cur.nb[1],), (cur.ne[1] - n) * cur.nb[1])
    logits = b.name(b.mul_mat(head.output, rows), "draft_logits")
    return build_outputs(b, hp, w, rows, logits, inp.anchors, head, inp.draws)


def _attend(
    b: Builder, hp: DFlashHParams, w: DraftWeights, rings: DraftRings, inp: JointInputs,
    cur: Tensor, il: int,
) -> Tensor:  # fmt: skip
    """Append the attention of a layer: each block attends to what its sequence has, and itself."""
    q = build_queries(b, hp, w, cur, inp.pos, il)
    kind = rings.kind[il]
    for cache, new in zip((rings.k[il], rings.v[il]), build_keys(b, hp, w, cur, inp.pos, il)):
        b.expand(b.set_rows(cache, new, inp.cells[kind]))
    pages, rows, scale = inp.pages[kind], inp.rows[kind], 1.0 / math.sqrt(hp.n_embd_head)
    out = b.paged_attn(q, rings.k[il], rings.v[il], pages, rows, RING_PAGE, scale)
    return b.mul_mat(w.layers[il]["attn_output.weight"], out)
