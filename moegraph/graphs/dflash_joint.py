"""Drafts of a DFlash drafter for several sequences at once: one graph for all their blocks.

The graph depends neither on which sequences these are nor on how long they are: attention reads K
and V through lists of pages. The first rows of all blocks come first, then all second ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from ..arch.dflash import DFlashHParams, build_block, build_keys, build_outputs, build_queries
from ..arch.dspark import DraftResults, HeadMatrix
from ..ggml.choose import DRAW_WORDS
from ..ggml.device import Device
from ..ggml.handles import Owner
from ..ggml.lib import C
from ..ggml.memory import Block, Sender
from ..ggml.ops import ATTN_WORDS, F32, I32, Builder, Tensor
from ..resident.draftlayout import MOST_JOINT, RING_PAGE
from ..resident.draftring import DraftRings
from ..resident.draftweights import DraftWeights
from ..resident.layout import MAX_PAGED_ROWS
from ..units import round_up
from .dflash_memory import Floats
from .paged import describe_path, pages_are_supported
from .races import no_races

_ALIGN = 64  # words


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
        self._at = [0, *accumulate(round_up(n, _ALIGN) for n in words)]
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
            blocks = self._rings.block_rows(kind, np.array(slots), n_rows)
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
