"""The inputs of a pass: one device block, filled by one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch.blocks.length import bound, spans
from ..arch.inputs import PAGED, PassInputs, PassShape
from ..ggml.choose import DRAW_ROWS, DRAW_WORDS
from ..ggml.handles import Owner
from ..ggml.lib import C
from ..ggml.memory import Block
from ..ggml.ops import F16, F32, I32, I64, Builder, Tensor
from ..resident.layout import MAX_PAGED_ROWS
from ..resident.stage import Stage
from ..resident.state import HiddenStates, State
from ..units import round_up
from .paged import ROW_WORDS, fill_rows
from .rows import Tree, Window, WindowRow, fill_mask, fill_window, gathered_rows


class HiddenRows(Owner):
    """Fixed device memory for the outputs of a layer, l_out, of passes of at most max_rows rows.

    A stage without the embedding finds the rows of a pass here, and a stage without the head leaves
    them here.

    all: the memory, F32 [n_embd, max_rows]; the rows of a pass come first.
    """

    def __init__(self, stage: Stage, max_rows: int) -> None:
        shapes, what = {"l_out": (stage.hp.n_embd, max_rows)}, "rows between layers"
        self._block = self.own(Block(stage.device, shapes, what, "lower -ub"))
        self.all, self.n_bytes = self._block.tensors["l_out"], self._block.n_bytes

    def put(self, tensor: Tensor) -> Tensor:
        """Make a node [n_embd, n_tokens] write its result here; return the node."""
        return self._block.put(tensor, "l_out")

    def leaf(self, b: Builder, n_tokens: int) -> Tensor:
        """Return a leaf that reads the rows, F32 [n_embd, n_tokens]."""
        return self._block.leaf(b, "l_out", F32, self.all.ne[0], n_tokens)


_ALIGN = 256


@dataclass(frozen=True)
class _Layout:
    """Byte offsets of the inputs in the block.

    out_ids has room for all rows, so that all depend on n_tokens alone, except for what attention
    needs, which comes last.
    """

    embd: int
    pos: int
    kv_idx: int
    out_ids: int
    slots: int
    parents: int
    hidden_rows: int
    padding: int
    absent: int
    draws: int
    attention: int

    @classmethod
    @cache
    def of(cls, n_embd: int, n_expert_used: int, n_tokens: int) -> _Layout:
        """Return the layout of passes of n_tokens rows; n_embd is 0 if embd is elsewhere.

        A single row is no padding.
        """
        padding = (1, n_expert_used) if n_tokens > 1 else (0, 0)
        offsets = [0]
        for n in (n_embd, 1, 2, 1, 1, 1, 1, *padding):
            offsets.append(round_up(offsets[-1] + 4 * n * n_tokens, _ALIGN))
        n_draws = min(n_tokens, DRAW_ROWS)
        offsets.append(round_up(offsets[-1] + 4 * DRAW_WORDS * n_draws, _ALIGN))
        return cls(*offsets)

    def mask(self, n_gathered: int) -> int:
        """Return the offset of the mask, which follows kv_rows; n_gathered: the most of them."""
        return round_up(self.attention + 4 * n_gathered, _ALIGN)

    def rows(self, shape: PassShape, n_pages: int) -> int:
        """Return the offset of the rows of a pass with pages, which follow the lists of pages."""
        return round_up(self.attention + 4 * n_pages * shape.n_seqs, _ALIGN)


def _n_gathered(state: State, shape: PassShape) -> int:
    """Return the most KV rows that passes over as many sequences gather.

    That is 0 if the engine has one sequence, which reads the caches in place.
    """
    return state.shape.most_kv(shape.n_seqs) * shape.n_seqs if state.n_seq > 1 else 0


class InputBlock(Owner):
    """Fixed memory for the inputs of any pass over a stage, of n_ubatch rows of each sequence.

    hidden: where the stage finds its rows if it has no embedding.
    """

    def __init__(self, stage: Stage, n_ubatch: int, hidden: HiddenRows | None) -> None:
        self._device = device = stage.device
        self._embedding = stage.weights.embedding
        self._hidden = hidden
        self._n_embd = stage.hp.n_embd if self._embedding else 0
        self._n_expert_used = stage.hp.n_expert_used
        self._state = state = stage.state
        self._n_pages = state.pool.table.shape[1]
        self._window = Window(state) if state.rings else None
        self._kept = stage.hidden_states
        n_rows = state.shape.n_rows
        at = self._layout(state.shape.pass_rows(n_ubatch))
        masked = at.mask(n_rows if state.n_seq > 1 else 0) + 2 * n_rows * n_ubatch
        if self._window:
            masked += (
                self._window.most_bytes(n_ubatch, state.shape.pass_rows(n_ubatch)) + 4 * _ALIGN
            )
        paged = PassShape(1, MAX_PAGED_ROWS, PAGED, 0)
        self.n_bytes = round_up(max(masked, self._end(at, paged)), _ALIGN)
        shapes = {"inputs": (1, self.n_bytes // 4)}
        self._block = self.own(Block(device, shapes, "the inputs of a pass", "lower -ub or -c"))
        self._all = self._block.tensors["inputs"]
        self._host = self.own(device.host_buffer(self.n_bytes))
        self._one: _OneRow | None = None  # valid until a pass of several rows overwrites the block

    def _layout(self, n_tokens: int) -> _Layout:
        return _Layout.of(self._n_embd, self._n_expert_used, n_tokens)

    def embd(self, b: Builder, n_tokens: int) -> Tensor:
        """Return what the stage's first layer takes, F32 [n_embd, n_tokens].

        That is the embeddings of tokens, or what the stage before left.
        """
        if self._hidden and not self._embedding:
            return self._hidden.leaf(b, n_tokens)
        at = self._layout(n_tokens).embd
        return self._block.leaf(b, "inputs", F32, self._n_embd, n_tokens, at=at)

    def leaves(self, b: Builder, shape: PassShape) -> PassInputs:
        """Return the input tensors of a pass, placed in the block."""
        at, n_tokens = self._layout(shape.n_tokens), shape.n_tokens

        def leaf(dtype: int, ne: tuple[int, ...], name: str, offset: int) -> Tensor:
            return self._block.put(b.leaf(dtype, ne, name), "inputs", offset)

        slots = leaf(I32, (shape.n_seqs,), "inp_slots", at.slots)
        pos = leaf(I32, (n_tokens,), "inp_pos", at.pos)
        kv_idx = leaf(I64, (n_tokens,), "inp_kv_idx", at.kv_idx)
        for tensor in (slots, pos, kv_idx):
            C.ggml_set_input(tensor)  # kernels read it early
        found: dict[str, Any] = {}
        if 0 < shape.n_out < n_tokens:
            found["out_ids"] = leaf(I32, (shape.n_out,), "inp_out_ids", at.out_ids)
        if 0 < shape.n_out <= DRAW_ROWS:
            found["draws"] = leaf(I32, (DRAW_WORDS, shape.n_out), "inp_draws", at.draws)
        if shape.is_tree:
            parents_ne = (shape.n_seq_tokens, shape.n_seqs)
            found["parents"] = leaf(I32, parents_ne, "inp_parents", at.parents)
        if shape.is_ragged:
            absent_ne = (self._n_expert_used, n_tokens)
            found["padding"] = leaf(I32, (n_tokens,), "inp_padding", at.padding)
            found["absent"] = leaf(F32, absent_ne, "inp_absent", at.absent)
        if self._keeps(shape):
            found["hidden_rows"] = leaf(I32, (n_tokens,), "inp_hidden_rows", at.hidden_rows)
        if shape.is_paged:
            found["pages"] = leaf(I32, (self._n_pages, shape.n_seqs), "inp_pages", at.attention)
            rows_at = at.rows(shape, self._n_pages)
            found["rows"] = leaf(I32, (ROW_WORDS, n_tokens), "inp_rows", rows_at)
        else:
            mask_ne = (shape.n_kv, shape.n_seq_tokens, 1, shape.n_seqs)
            n_gathered = _n_gathered(self._state, shape)
            mask = leaf(F16, mask_ne, "inp_kq_mask", at.mask(n_gathered))
            found["kq_mask"] = spans(b, shape.n_kv, mask, 0, 1, 2, 3)
            if n_gathered:
                kv_rows = leaf(I32, (shape.n_kv * shape.n_seqs,), "inp_kv_rows", at.attention)
                found["kv_rows"] = spans(b, shape.n_kv, kv_rows, 0, 1, 2, 3)
        inp = PassInputs(pos, kv_idx, slots, **found)
        if not self._window:
            return inp
        mask_at, rows_at, idx_at, _ = self._window_at(at, shape)
        idx = leaf(I64, (n_tokens,), "inp_window_idx", idx_at)
        if shape.is_paged:
            pages = leaf(I32, (self._n_pages, shape.n_seqs), "inp_window_pages", rows_at)
            return replace(inp, window=replace(inp, kv_idx=idx, pages=pages))
        (n, n_parts), n_spans = self._window.columns(shape), len(b.spans)
        mask = leaf(F16, (n, shape.n_seq_tokens, 1, shape.n_seqs), "inp_window_mask", mask_at)
        rows = leaf(I32, (n * shape.n_seqs,), "inp_window_rows", rows_at)
        spans(b, n, mask, 0, 1, 2, 3)
        spans(b, n, rows, 0, 1, 2, 3)
        bound(b, n_spans, n)
        window = replace(inp, kv_idx=idx, kv_rows=rows, kq_mask=mask, n_parts=n_parts)
        return replace(inp, window=window)

    def _keeps(self, shape: PassShape) -> bool:
        """Return whether the rows of a pass go to the ring of hidden states."""
        kept = self._kept
        return not shape.is_tree and kept.n_kept > 0 and shape.n_tokens <= kept.n_rows

    def fill(
        self, shape: PassShape, tokens: npt.NDArray[np.int32], slots: tuple[int, ...],
        tree: Tree | None, draws: npt.NDArray[np.int32] | None = None,
    ) -> None:  # fmt: skip
        """Write the inputs of a pass and enqueue their upload.

        tokens: numpy shape [n_seqs, n_seq_tokens]. slots: the sequence of each row of tokens; they
        have pages for the rows. If the pass has more sequences, the others are padding. draws:
        numpy shape [n_out, DRAW_WORDS], without padding. The pass before has ended.
        """
        n_tokens = shape.n_seqs * shape.n_seq_tokens
        if n_tokens > 1 or tree:
            self._one = None
            at = self._layout(n_tokens)
            self._fill_rows(at, shape, slots, tree)
            if len(slots) < shape.n_seqs:
                tokens = tokens[np.minimum(np.arange(shape.n_seqs), len(slots) - 1)]
            if self._embedding:
                rows = self._region(at.embd, n_tokens * self._n_embd, np.float32)
                self._embedding.rows(tokens.reshape(-1), rows.reshape(n_tokens, self._n_embd))
            if draws is not None:
                self._region(at.draws, draws.size, np.int32)[:] = draws.reshape(-1)
            end = self._end(at, shape)
        else:
            one = self._one
            if one is None or one.shape != shape:
                at = self._layout(1)
                one = _OneRow(self._region, at, shape, self._n_embd, self._state, self._kept)
                if self._window:
                    one.window = WindowRow(self._window, shape, *self._window_parts(at, shape))
                self._one, one.end = one, self._end(at, shape)
            if self._embedding:
                self._embedding.rows(tokens.reshape(-1), one.embd)
            one.move_to(slots[0])
            if draws is not None:
                one.draws[:] = draws
            end = one.end
        self._device.send(self._all, self._host, 0, end)

    def _end(self, at: _Layout, shape: PassShape) -> int:
        """Return how many bytes the inputs take."""
        if self._window:
            return self._window_at(at, shape)[-1]
        return self._attention_end(at, shape, shape.n_kv)

    def _attention_end(self, at: _Layout, shape: PassShape, n_kv: int) -> int:
        """Return where the inputs of layers without a window end."""
        n_tokens = shape.n_seqs * shape.n_seq_tokens
        if shape.n_kv == PAGED:
            return at.rows(shape, self._n_pages) + 4 * ROW_WORDS * n_tokens
        return at.mask(_n_gathered(self._state, shape)) + 2 * n_kv * n_tokens

    def _window_at(self, at: _Layout, shape: PassShape) -> tuple[int, int, int, int]:
        """Return where mask, rows and indices of layers with a window begin, and where they end.

        They follow the mask of other layers, or their rows; with pages, lists of them are in place
        of mask and rows. Where one graph serves all KV lengths, they are in the same place for all
        of them.
        """
        n_kv = shape.n_kv
        if not (self._device.can.streams or shape.is_paged):
            n_kv = self._state.shape.most_kv(shape.n_seqs)
        n, n_rows = 0, self._n_pages
        if self._window and not shape.is_paged:
            is_split = self._window.is_split(shape)
            at_most = shape if is_split else shape._replace(n_kv=n_kv)
            n = n_rows = self._window.columns(at_most)[0]
        starts = [round_up(self._attention_end(at, shape, n_kv), _ALIGN)]
        for n_bytes in (2 * n * shape.n_tokens, 4 * n_rows * shape.n_seqs, 8 * shape.n_tokens):
            starts.append(round_up(starts[-1] + n_bytes, _ALIGN))
        return starts[0], starts[1], starts[2], starts[3]

    def _window_parts(
        self, at: _Layout, shape: PassShape
    ) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return mask, rows and indices of layers with a window, in the host block."""
        mask_at, rows_at, idx_at, _ = self._window_at(at, shape)
        n = self._window.columns(shape)[0] if self._window and not shape.is_paged else 0
        mask = self._region(mask_at, n * shape.n_tokens, np.float16)
        rows = self._region(rows_at, (n or self._n_pages) * shape.n_seqs, np.int32)
        return mask, rows, self._region(idx_at, shape.n_tokens, np.int64)

    def _region(self, start: int, n: int, dtype: type) -> npt.NDArray[Any]:
        """View n numbers of the host block from byte `start`."""
        return self._host.array[start : start + n * np.dtype(dtype).itemsize].view(dtype)

    def _fill_rows(
        self, at: _Layout, shape: PassShape, slots: tuple[int, ...], tree: Tree | None
    ) -> None:
        """Write all inputs but the embeddings."""
        region, state, n = self._region, self._state, shape.n_seq_tokens
        n_pad, n_real, n_tokens = shape.n_seqs - len(slots), n * len(slots), n * shape.n_seqs
        padded, slots = slots + (-1,) * n_pad, slots + slots[:1] * n_pad
        pos0 = [state.n_past[slot] for slot in slots]
        first, steps = np.array(pos0)[:, None], np.arange(n)
        pos = first + (steps if tree is None else tree.depths)
        pos = pos - np.array([state.saved[slot] for slot in slots])[:, None]
        region(at.pos, n_tokens, np.int32)[:] = pos.reshape(-1)
        kv_idx = region(at.kv_idx, n_tokens, np.int64)
        kv_idx[:] = self._kv_idx(slots, first + steps, tree, state.pool.rows, state.spare_row)
        kv_idx[n_real:] = state.spare_row
        if 0 < shape.n_out < n_tokens:
            region(at.out_ids, shape.n_out, np.int32)[:] = np.arange(1, shape.n_seqs + 1) * n - 1
        if tree is not None:
            region(at.parents, n_tokens, np.int32)[:] = tree.parents.reshape(-1)
        if shape.is_ragged:
            padding = tree.padding if tree else np.maximum(np.arange(n_tokens), n_real)
            region(at.padding, n_tokens, np.int32)[:] = padding
            region(at.absent, self._n_expert_used * n_tokens, np.int32)[:] = -1
        region(at.slots, shape.n_seqs, np.int32)[:] = padded
        if self._keeps(shape):
            ring = region(at.hidden_rows, n_tokens, np.int32)
            kept = [self._kept.ring_rows(slot, past, n) for slot, past in zip(slots, pos0)]
            ring[:] = np.concatenate(kept)
            ring[n_real:] = self._kept.spare_row
        if self._window:
            seen, window_rows, idx = self._window_parts(at, shape)
            idx[:] = self._kv_idx(slots, first + steps, tree, state.ring_rows, state.ring_spare_row)
            idx[n_real:] = state.ring_spare_row
        if shape.n_kv == PAGED:
            pages = region(at.attention, self._n_pages * shape.n_seqs, np.int32)
            pages[:] = state.pool.table[[*slots]].reshape(-1)
            rows = region(at.rows(shape, self._n_pages), ROW_WORDS * n_tokens, np.int32)
            fill_rows(rows, pos0, n, tree, n_pad)
            if self._window:
                window_rows[:] = self._window.pages[[*slots]].reshape(-1)
            return
        n_gathered = _n_gathered(state, shape)
        mask = region(at.mask(n_gathered), shape.n_kv * n_tokens, np.float16)
        mask = mask.reshape(-1, n, shape.n_kv)
        fill_mask(mask, pos0, None if tree is None else tree.sees)
        if self._window:
            places = self._window.positions(shape, pos0)
            window_rows[:] = self._window.rows(slots, places).reshape(-1)
            seen = seen.reshape(*mask.shape[:2], -1)
            depths = None if tree is None else tree.depths
            fill_window(seen, mask, pos0, self._window.n, places, depths)
        if n_gathered:
            rows = region(at.attention, shape.n_kv * shape.n_seqs, np.int32)
            rows[:] = gathered_rows(state.pool, slots, shape.n_kv).reshape(-1)

    def _kv_idx(
        self, slots: tuple[int, ...], places: npt.NDArray[np.int64], tree: Tree | None,
        rows_of: Callable[..., npt.NDArray[np.int64]], spare_row: int,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        """Return where K and V of each row are written; places: [n_seqs, n_seq_tokens]."""
        if tree is None or not tree.is_ragged:
            return rows_of(np.array(slots)[:, None], places).reshape(-1)
        rows = np.full(places.shape, spare_row)
        seqs, _ = np.nonzero(tree.real)
        rows[tree.real] = rows_of(np.array(slots)[seqs], places[tree.real])
        return rows.reshape(-1)


class _OneRow:
    """The inputs of one-row passes in the host block; writes only what changes between passes.

    embd: F32, numpy shape [1, n_embd] or empty, and draws: I32 [1, DRAW_WORDS]; the caller writes
    them. end: bytes of all inputs. window: what layers with one read. The device is idle meanwhile,
    so this must be fast.
    """

    end = 0
    window: WindowRow | None = None

    def __init__(
        self, region: Callable[..., npt.NDArray[Any]], at: _Layout, shape: PassShape, n_embd: int,
        state: State, hidden_states: HiddenStates,
    ) -> None:  # fmt: skip
        self.shape, self._is_paged = shape, shape.n_kv == PAGED
        self._state, self._pool = state, state.pool
        self._kept, self._hidden_row = hidden_states, region(at.hidden_rows, 1, np.int32)
        self.embd = region(at.embd, n_embd, np.float32).reshape(1, n_embd)
        self.draws = region(at.draws, DRAW_WORDS, np.int32).reshape(1, DRAW_WORDS)
        self._pos, self._kv_idx = region(at.pos, 1, np.int32), region(at.kv_idx, 1, np.int64)
        self._slot = region(at.slots, 1, np.int32)
        n_pages = state.pool.table.shape[1]
        self._pages = region(at.attention, n_pages, np.int32)
        self._row = region(at.rows(shape, n_pages), ROW_WORDS, np.int32)
        n_gathered = _n_gathered(state, shape)
        self._mask = region(at.mask(n_gathered), shape.n_kv, np.float16)
        self._kv_rows: npt.NDArray[np.int32] | None = None
        if n_gathered:
            self._kv_rows = region(at.attention, shape.n_kv, np.int32)
        # position and sequence of the row that was written last, and the pages that it had
        self._last: tuple[int, int, int] = (-2, -1, -1)

    def move_to(self, slot: int) -> None:
        """Write all inputs but the embedding, for the next row of a sequence."""
        pool, first = self._pool, self._state.n_past[slot]
        self._pos[0] = first - self._state.saved[slot]
        self._kv_idx[0] = pool.row(slot, first)
        n_kept = self._kept.n_kept
        if n_kept:
            self._hidden_row[0] = slot * n_kept + first % n_kept
        goes_on = self._last == (first - 1, slot, pool.version)
        if not goes_on:
            self._slot[0] = slot
        if self._is_paged:
            fill_rows(self._row, [first], 1, None)
            if not goes_on:
                self._pages[:] = pool.table[slot]
        elif goes_on:
            self._mask[first] = 0.0
        else:
            mask = self._mask.reshape(1, 1, -1)
            fill_mask(mask, [first])
            if self._kv_rows is not None:
                self._kv_rows[:] = gathered_rows(pool, (slot,), self.shape.n_kv)[0]
        if self.window:
            self.window.move_to(slot, first, goes_on)
        self._last = (first, slot, pool.version)
