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

from ..arch.dflash import DFlashHParams, DraftOutputs, build_block, build_keys, build_queries
from ..arch.dspark import HeadMatrix, build_markov
from ..ggml.choose import DRAW_WORDS
from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import ATTN_WORDS, F32, I32, Builder, Tensor
from ..resident.draftlayout import MOST_JOINT, RING_PAGE
from ..resident.draftring import DraftRings
from ..resident.draftweights import DraftWeights
from ..resident.layout import MAX_PAGED_ROWS
from ..units import round_up
from .dflash_memory import Floats
from .paged import describe_path

_ALIGN = 256


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


class JointMemory:
    """Fixed memory for the inputs of such graphs.

    n_bytes: device memory.
    """

    def __init__(self, device: Device, hp: DFlashHParams, rings: DraftRings, mask: Floats) -> None:
        """mask: the embedding of the mask token."""
        self._device, self._hp, self._rings = device, hp, rings
        # a page more, of which a window sees a part
        self._n_pages = [shape.n_rows // RING_PAGE + 1 for shape in rings.shapes]
        kinds = range(len(rings.shapes))
        words = [MAX_PAGED_ROWS, MAX_PAGED_ROWS]
        for kind in kinds:
            words += [MAX_PAGED_ROWS, ATTN_WORDS * MAX_PAGED_ROWS, MOST_JOINT * self._n_pages[kind]]
        sizes = [round_up(4 * n, _ALIGN) for n in words]
        self._at = [0, *accumulate(sizes)]
        self._row = 4 * hp.n_embd
        self._n_words = self._at[-1]
        self._masks = round_up(self._n_words + MOST_JOINT * self._row, _ALIGN)
        self._draws = round_up(self._masks + MAX_PAGED_ROWS * self._row, _ALIGN)
        self.n_bytes = self._draws + 4 * DRAW_WORDS * MAX_PAGED_ROWS
        what = "the inputs of drafts of several sequences"
        self._buffer = device.buffer(self.n_bytes, what, "lower -np or use --spec off")
        self._context = Context(1)
        self._all = C.ggml_new_tensor_1d(self._context.ptr, F32, self.n_bytes // 4)
        place(self._buffer, self._all, 0)
        self._host = device.host_buffer(self._masks)
        draws = np.full((MAX_PAGED_ROWS, DRAW_WORDS), -1, np.int32)
        draws[:, 0] = 0  # no temperature, no race
        for offset, values in (
            (self._masks, np.tile(mask.astype(np.float32), (MAX_PAGED_ROWS, 1))),
            (self._draws, draws),
        ):
            data = np.ascontiguousarray(values)
            C.ggml_backend_tensor_set(self._all, ffi.from_buffer(data), offset, data.nbytes)

    def _leaf(self, b: Builder, offset: int, dtype: int, *ne: int) -> Tensor:
        leaf = b.leaf(dtype, ne, "draft_input")
        place(self._buffer, leaf, offset)
        return leaf

    def leaves(self, b: Builder, m: int, n_rows: int, n_draft: int) -> JointInputs:
        """Return the inputs of m blocks of n_rows rows."""
        at, n, kinds = self._at, m * n_rows, range(len(self._n_pages))
        return JointInputs(
            embd=self._leaf(b, self._masks - m * self._row, F32, self._hp.n_embd, n),
            pos=self._leaf(b, at[0], I32, n),
            anchors=self._leaf(b, at[1], I32, m),
            cells=[self._leaf(b, at[2 + 3 * kind], I32, n) for kind in kinds],
            rows=[self._leaf(b, at[3 + 3 * kind], I32, ATTN_WORDS, n) for kind in kinds],
            pages=[self._leaf(b, at[4 + 3 * kind], I32, self._n_pages[kind], m) for kind in kinds],
            draws=self._leaf(b, self._draws, I32, DRAW_WORDS, m * n_draft),
        )

    def send(self, anchors: Mapping[int, int], embeddings: Sequence[Floats], n_rows: int) -> None:
        """Enqueue the upload of the inputs of blocks of n_rows rows after anchors, by sequence."""
        m, slots, host = len(anchors), list(anchors), self._host.array
        words = host[: self._n_words].view(np.int32)
        parts = [words[begin // 4 : end // 4] for begin, end in zip(self._at, self._at[1:])]
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
        first = self._masks - m * self._row
        rows_to = host[first : self._masks].view(np.float32).reshape(m, -1)
        for to, embedding in zip(rows_to, embeddings):
            to[:] = embedding
        for begin, end in ((0, self._n_words), (first, self._masks)):
            C.ggml_backend_tensor_set_async(
                self._device.compute.ptr, self._all, self._host.address(begin), begin, end - begin
            )

    def close(self) -> None:
        """Free the memory."""
        for part in (self._host, self._buffer, self._context):
            part.close()


def can_join(device: Device, hp: DFlashHParams, rings: DraftRings) -> bool:
    """Return whether a device can draft for several sequences at once."""
    d = hp.n_embd_head
    if len(rings.spans) < 2 or d % 32 or d > C.MOEGRAPH_ATTN_HEAD or hp.n_embd % 64:
        return False
    if max(shape.n_rows for shape in rings.shapes) >= C.MOEGRAPH_ATTN_CAPACITY:
        return False
    with Context(16, 16) as context:
        b = Builder(context, 16)
        q, pages = b.leaf(F32, (d, hp.n_head, 1), "q"), b.leaf(I32, (1, 1), "pages")
        rows = b.leaf(I32, (ATTN_WORDS, 1), "rows")
        out = b.paged_attn(q, rings.k[0], rings.v[0], pages, rows, RING_PAGE, 1.0)
        return bool(C.ggml_backend_supports_op(device.compute.ptr, out))


def build_joint_draft(
    b: Builder, hp: DFlashHParams, w: DraftWeights, rings: DraftRings, inp: JointInputs,
    head: HeadMatrix,
) -> DraftOutputs:  # fmt: skip
    """Append drafts after all anchors: results of the first token of each, then the second ones."""
    attend = partial(_attend, b, hp, w, rings, inp)
    cur = build_block(b, hp, w, inp.embd, attend)
    n = inp.draws.ne[1]
    rows = b.view(cur, (hp.n_embd, n), (cur.nb[1],), (cur.ne[1] - n) * cur.nb[1])
    logits, confidence = b.name(b.mul_mat(head.output, rows), "draft_logits"), None
    if hp.markov_rank:
        logits, confidence = build_markov(b, w, logits, rows, inp.anchors, head)
    candidates = b.expand(b.name(b.candidates(logits, inp.draws), "draft_candidates"))
    C.ggml_set_output(candidates)
    return DraftOutputs(candidates, confidence)


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
