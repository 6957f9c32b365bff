"""K and V that a DFlash drafter makes of what the target's layers put out.

The drafter reads the outputs of some layers, the taps. For tokens of a prompt, a sweep calls
`prompt` with the output of each such layer; for tokens that texts take, the ring of `TapRows` has
them. Both are fused and become K and V of each of the drafter's own layers (`DraftRings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..arch.dflash import DFlashHParams, build_context
from ..errors import InternalError
from ..ggml.lib import ffi
from ..ggml.ops import Builder, Tensor
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.dflash_memory import DraftMemory, Longs
from ..resident.draftlayout import CHUNK, N_TAKEN
from ..resident.draftring import DraftRings
from ..resident.draftweights import DraftWeights
from ..resident.stage import Stage
from .drafter import N_NODES, Ids, Taken


class DraftContext:
    """Graphs and rings of a drafter's K and V, of the sequences of a stage.

    taps: layers of the target that the drafter reads, in order.
    """

    def __init__(
        self, stage: Stage, hp: DFlashHParams, weights: DraftWeights, rings: DraftRings,
        memory: DraftMemory, graphs: GraphCache,
    ) -> None:  # fmt: skip
        """memory: for inputs. graphs: of the drafter."""
        self.taps = tuple(sorted(set(hp.taps)))
        self.hparams, self._stage, self._weights = hp, stage, weights
        self._rings, self._memory, self._graphs = rings, memory, graphs
        self._chunk = min(CHUNK, *(shape.n_cells for shape in rings.shapes))

    def reserve(self) -> None:
        """Build the largest graphs, so that their memory never grows later."""
        self.keys_graph(N_TAKEN)
        n = min(self._chunk, self._memory.features.ne[1])
        self._fuse_graph(self._memory.features, self.taps[-1], 0, n)
        self._prompt_graph(0, n)

    def prompt(self, slot: int, il: int, hidden: Tensor, row: int, n: int, first: int) -> None:
        """Fuse the outputs of a tapped layer for rows of a prompt; after the last, make K and V."""
        chunks = [(row + at, min(self._chunk, n - at)) for at in range(0, n, self._chunk)]
        for at, m in chunks:
            built = self._fuse_graph(hidden, il, at, m)
            self._graphs.launch(built, "the drafter's features of a prompt")
        if il != self.taps[-1]:
            return
        places = first + np.arange(n)
        self._memory.send_prompt(row, places, self._cells(slot, places))
        self._rings.truncate(slot, first)
        self._rings.spans[slot].grow(n)  # before the rows are written, so that they are cleared
        for at, m in chunks:
            self._graphs.launch(self._prompt_graph(at, m), "the drafter's K and V of a prompt")

    def _fuse_graph(self, hidden: Tensor, il: int, row: int, n: int) -> BuiltGraph:
        """Return the graph that adds rows [row, row + n) of a tap, hidden, to the features."""
        key = "fuse", int(ffi.cast("intptr_t", hidden.data)), il, row, n
        build = partial(self._build_fuse, il=il, hidden=hidden, row=row, n=n)
        return self._graphs.get(key, 8 * len(self._weights.fc), build)

    def _prompt_graph(self, row: int, n: int) -> BuiltGraph:
        """Return the graph of K and V of rows [row, row + n) of the features."""
        build = partial(self._build_prompt, row=row, n=n)
        return self._graphs.get(("prompt", row, n), N_NODES * self.hparams.n_layer + 16, build)

    def _cells(self, slot: int, places: Longs) -> list[Ids]:
        """Return where K and V of positions go in each ring."""
        kinds = range(len(self._rings.shapes))
        return [self._rings.rows(kind, slot, places) for kind in kinds]

    def _build_fuse(self, b: Builder, il: int, hidden: Tensor, row: int, n: int) -> None:
        """Append: rows [row, row + n) of the features += fc of a tap times its output."""
        x = b.view(hidden, (hidden.ne[0], n), (hidden.nb[1],), row * hidden.nb[1])
        total = None if il == self.taps[0] else self._memory.fused(b, row, n)
        total = self._add_tap(b, total, x, il)
        b.expand(b.cpy(total, self._memory.fused(b, row, n)))

    def _add_tap(self, b: Builder, total: Tensor | None, x: Tensor, il: int) -> Tensor:
        """Append total + fc of a tap times its output x, F32 [n_embd, n] each."""
        for k, tap in enumerate(self.hparams.taps):
            if tap == il:
                part = b.mul_mat(self._weights.fc[k], x)
                total = part if total is None else b.add(total, part)
        if total is None:
            raise InternalError(f"layer {il} is no tap of the drafter")
        return total

    def _build_prompt(self, b: Builder, row: int, n: int) -> None:
        """Append K and V of rows [row, row + n) of the features."""
        pos, cells = self._memory.prompt_leaves(b, row, n)
        fused = self._memory.fused(b, row, n)
        build_context(b, self.hparams, self._weights, self._rings, fused, pos, cells)

    def take(self, taken: Sequence[Taken]) -> None:
        """Enqueue K and V of tokens that several sequences took."""
        most = min(N_TAKEN, self._chunk)
        parts, room = list[tuple[int, int, int]](), most
        for slot, first, tokens in taken:
            n_left = len(tokens)
            while n_left:
                n = min(room, n_left)
                parts.append((slot, first, n))
                first, n_left, room = first + n, n_left - n, room - n
                if not room:
                    self._make_keys(parts)
                    parts, room = [], most
        if parts:
            self._make_keys(parts)

    def _make_keys(self, parts: Sequence[tuple[int, int, int]]) -> None:
        """Enqueue K and V of positions whose taps the ring has: sequence, first one, and number."""
        n = sum(m for _, _, m in parts)
        n_padded = min(N_TAKEN, 1 << (n - 1).bit_length())
        built, places = self.keys_graph(n_padded), np.zeros(n_padded, np.int64)
        taken = np.zeros(n_padded, np.int64)
        kinds, spare = range(len(self._rings.shapes)), parts[0][0]
        cells = [np.full(n_padded, self._rings.spare_row(kind, spare), np.int32) for kind in kinds]
        at = 0
        for slot, first, m in parts:
            here = slice(at, at + m)
            places[here] = first + np.arange(m)
            taken[here] = self._stage.taps.ring_rows(slot, first, m)
            for rows, mine in zip(cells, self._cells(slot, places[here])):
                rows[here] = mine
            self._rings.spans[slot].grow(m)
            at += m
        self._memory.send_rows(places, taken, cells)
        self._graphs.launch(built, "the drafter over accepted tokens")

    def keys_graph(self, n: int) -> BuiltGraph:
        """Return the graph of K and V of n tokens that sequences took."""
        n_nodes = N_NODES * self.hparams.n_layer + 4 * len(self._weights.fc) + 16
        n_nodes += len(self._stage.taps.layers)
        return self._graphs.get(("keys", n), n_nodes, lambda b: self._build_keys(b, n))

    def _build_keys(self, b: Builder, n: int) -> None:
        """Append: fuse the taps of tokens that sequences took, and make K and V of them."""
        pos, taken, cells = self._memory.row_leaves(b, n)
        taps, total = self._stage.taps, None
        kept = dict(zip(taps.layers, taps.kept(b, taken)))
        for il in self.taps:  # in the order of a prompt, so that sums are the same
            total = self._add_tap(b, total, kept[il], il)
        if total is None:
            raise InternalError("a drafter without taps")
        build_context(b, self.hparams, self._weights, self._rings, total, pos, cells)
