"""Drafts with DFlash and DSpark: one graph proposes all tokens of a block at once.

The drafter reads outputs of some of the target's layers, the taps. Of every token that a sequence
takes, it fuses the taps and makes K and V for each of its own layers (`DraftRings`). A draft is a
block: the anchor, then mask tokens. Its rows attend to these K and V and to one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..ggml.choose import DRAW_WORDS
from ..ggml.handles import Context, closed_on_failure
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.cache import GraphCache
from ..graphs.dflash import MAX_TOP, BlockInputs, Head, build_context, build_draft
from ..modelfile.draftfile import DraftFile
from ..modelfile.drafter import DFlashHParams
from ..resident.draftring import DraftRings, draft_ring_bytes
from ..resident.draftweights import DraftWeights, draft_weight_bytes
from ..resident.stage import Stage
from ..runner.sweep_batch import Tap
from .drafter import Draft, Ids
from .dflashmemory import DraftMemory, draft_memory_bytes

# Rows of a prompt in one graph.
_CHUNK = 512
_LISTED = 384  # most tokens that the device lists of a row; of more it lists none
_N_LIKELY = 3  # word of a row's result that says how many there are


def dflash_bytes(file: DraftFile, n_ctx: int, n_seq: int, n_sweep: int, as_stored: bool) -> int:
    """Return the device bytes of a `DFlashDrafter`, without its graphs' intermediates."""
    rings = draft_ring_bytes(file.hparams, n_ctx, n_seq)
    fixed = draft_memory_bytes(file.hparams, n_ctx, n_sweep)
    return draft_weight_bytes(file, as_stored) + rings + fixed


class DFlashDrafter:
    """A `Drafter` of DFlash or DSpark files; see the protocol."""

    def __init__(
        self, stage: Stage, graphs: GraphCache, file: DraftFile, n_sweep: int,
        n_ctx: int | None = None, as_stored: bool = False,
    ) -> None:  # fmt: skip
        """Load a drafter that fits the target (`DraftFile.require_target`).

        stage: of the whole target. graphs: of its runner. n_sweep: most rows of a part of a prompt.
        n_ctx: most positions that layers without a window see; None for the target's context.
        as_stored: BF16 weights stay BF16.

        Raises:
            OutOfDeviceMemory: it does not fit.
            ModelFileError: the file is shorter than its header says.
        """
        self.hparams: DFlashHParams = file.hparams
        hp, state = self.hparams, stage.state
        self.name, self.max_draft = hp.name, hp.max_draft
        self.taps = tuple(sorted(set(hp.taps)))
        self._stage, self._device, self._graphs = stage, stage.device, graphs
        n_ctx = min(n_ctx or state.n_ctx, state.n_ctx)
        with closed_on_failure():
            self._weights = DraftWeights(stage.device, file, as_stored)
            self._rings = DraftRings(stage.device, hp, n_ctx, state.n_seq)
            self._memory = DraftMemory(stage.device, hp, self._rings.shapes, n_sweep)
            self._head = self._open_head(file)
            embedding = self._weights.embedding or stage.weights.embedding
            if embedding is None:
                raise InternalError("a drafter needs a stage with all layers")
            self._embedding = embedding
            self._memory.send_mask(self._embed(hp.mask_id))
        self._chunk = min(_CHUNK, *(shape.n_cells for shape in self._rings.shapes))
        parts = self._weights, self._rings, self._memory
        self.n_bytes = sum(part.n_bytes for part in parts)

    def _open_head(self, file: DraftFile) -> Head:
        """Return what gives logits: the drafter's own head, or the target's."""
        target = self._stage.weights.head
        own = self._weights.output
        if own is None and target is None:
            raise InternalError("a drafter needs a stage with all layers")
        self._d2t: Ids | None = None
        leaf = None
        if self.hparams.n_vocab_draft:
            self._d2t = file.d2t(self._stage.hp.n_vocab)
            leaf = self._memory.send_d2t(self._d2t)
        return Head(own or target.output if target else own, leaf)  # type: ignore[arg-type]

    def _embed(self, token: int) -> npt.NDArray[np.float32]:
        """Return the embedding of a token, F32 [n_embd]."""
        row = np.empty((1, self.hparams.n_embd), np.float32)
        self._embedding.rows(np.array([token], np.int32), row)
        return row[0]

    def describe(self) -> list[str]:
        """Return what the file says of the drafter, a line each."""
        hp = self.hparams
        windows = f"{sum(hp.sliding)} of {hp.n_layer} layers see {hp.n_swa} positions"
        return [
            f"{hp.name} ({hp.dialect}): block {hp.block_size}, mask token {hp.mask_id}",
            f"taps: outputs of layers {', '.join(map(str, hp.taps))}",
            f"window: {windows if hp.n_swa else 'none'}; rope: {hp.rope.text}, base "
            f"{hp.rope.rope_freq_base:g}, {hp.rope.n_rot} of {hp.n_embd_head} dimensions",
        ]

    def reserve(self) -> None:
        """Build the largest graphs, so that the shared block of intermediates never grows later.

        Raises:
            OutOfDeviceMemory: the intermediates do not fit.
        """
        lengths = tuple(shape.n_rows for shape in self._rings.shapes)
        self._draft_graph(0, self.max_draft, lengths)

    def restart(self, slot: int, ids: Ids) -> None:
        """Forget a sequence; see the protocol."""
        self._rings.spans[slot].restart(len(ids))

    def truncate(self, slot: int, n_past: int) -> None:
        """Forget what a sequence held from position n_past on."""
        self._rings.spans[slot].truncate(n_past)

    def prompt_taps(self, slot: int, ids: Ids, first: int) -> dict[int, Tap]:
        """Return what a sweep calls with the taps of a prompt; see the protocol."""
        span = self._rings.spans[slot]
        span.truncate(first)
        if span.n_past < first:
            span.restart(first)
        return {il: partial(self._take, slot, il) for il in self.taps}

    def _take(self, slot: int, il: int, hidden: Tensor, n: int, first: int) -> None:
        """Fuse the outputs of a tapped layer for rows of a prompt; after the last, make K and V."""
        for row in range(0, n, self._chunk):
            rows = min(self._chunk, n - row)
            key = ("draft fuse", il, row, rows, int(ffi.cast("intptr_t", hidden.data)))
            build = partial(self._build_fuse, il=il, hidden=hidden, row=row, n=rows)
            self._launch(key, 8 * len(self.hparams.taps), build)
        if il != self.taps[-1]:
            return
        span, places = self._rings.spans[slot], first + np.arange(n)
        self._memory.send_prompt(places, self._ring_rows(slot, places))
        for row in range(0, n, self._chunk):
            rows = min(self._chunk, n - row)
            build = partial(self._build_prompt, row=row, n=rows)
            self._launch(("draft prompt", row, rows), 32 * self.hparams.n_layer + 8, build)
        span.truncate(first)
        span.grow(n)

    def _ring_rows(self, slot: int, places: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int32]]:
        kinds = range(len(self._rings.shapes))
        return [self._rings.rows(kind, slot, places) for kind in kinds]

    def _build_fuse(self, b: Builder, il: int, hidden: Tensor, row: int, n: int) -> None:
        """Append: fused rows [row, row + n) += fc of a tap times those rows of its output."""
        x = b.view(hidden, (hidden.ne[0], n), (hidden.nb[1],), row * hidden.nb[1])
        at = [k for k, tap in enumerate(self.hparams.taps) if tap == il]
        total = None if il == self.taps[0] else self._memory.fused(b, row, n)
        for k in at:
            part = b.mul_mat(self._weights.fc[k], x)
            total = part if total is None else b.add(total, part)
        if total is not None:
            b.expand(b.cpy(total, self._memory.fused(b, row, n)))

    def _build_prompt(self, b: Builder, row: int, n: int) -> None:
        pos, rows = self._memory.prompt_leaves(b, row, n)
        fused = self._memory.fused(b, row, n)
        build_context(b, self.hparams, self._weights, self._rings, fused, pos, rows)

    def committed(self, slot: int, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Make K and V of tokens that a sequence took; see the protocol."""
        n, span = len(rows), self._rings.spans[slot]
        if not n:
            return
        places = span.n_past + np.arange(n)
        self._memory.send_rows(np.array(rows), places, self._ring_rows(slot, places))
        n_nodes = 32 * self.hparams.n_layer + 8 * len(self.hparams.taps) + 8
        self._launch(("draft commit", n), n_nodes, partial(self._build_commit, n=n))
        span.grow(n)

    def _build_commit(self, b: Builder, n: int) -> None:
        """Append: fuse the taps of n rows of the last pass, and make K and V of them."""
        taps, total = self._stage.taps, None
        ids, pos, rows = self._memory.row_leaves(b, n)
        gathered = {il: b.get_rows(taps.leaf(b, il), ids) for il in self.taps}
        for il in self.taps:  # in the order of a prompt, so that the bits are the same
            for k in (k for k, tap in enumerate(self.hparams.taps) if tap == il):
                part = b.mul_mat(self._weights.fc[k], gathered[il])
                total = part if total is None else b.add(total, part)
        if total is None:
            raise InternalError("a drafter without taps")
        build_context(b, self.hparams, self._weights, self._rings, total, pos, rows)

    def draft(self, slot: int, anchor: int, n: int, n_top: int) -> Draft:
        """Propose at most n tokens after the anchor; see the protocol."""
        n = min(n, self.max_draft)
        rings, memory = self._rings, self._memory
        n_rows, lengths = self._n_rows(n), rings.lengths(slot)
        built = self._draft_graph(slot, n, lengths)
        masks = memory.begin(self._embed(anchor), anchor, rings.spans[slot].n_past, n_rows, lengths)
        rings.fill_masks(masks, slot, self.hparams.is_causal)
        memory.send(lengths, n_rows)
        ids, logits, confidence = built.outputs
        self._device.check(
            C.mg_launch(self._device.compute.ptr, built.graph, ffi.NULL, 0), "a draft"
        )
        return self._read(memory.results(ids, logits, confidence), min(n_top, MAX_TOP))

    def _n_rows(self, n: int) -> int:
        """Return the rows of a block that proposes n tokens."""
        return n if self.hparams.samples_anchor else n + 1

    def _draft_graph(self, slot: int, n: int, lengths: tuple[int, ...]):  # type: ignore[no-untyped-def]
        hp = self.hparams
        n_nodes = 48 * hp.n_layer + 16 * n + 64

        def build(b: Builder) -> object:
            inp = self._memory.block_leaves(b, self._n_rows(n), lengths)
            return build_draft(b, hp, self._weights, self._rings, inp, self._head, slot, n)

        return self._graphs.get(("draft", slot, n, lengths), n_nodes, build)

    def _read(self, results: tuple[Ids, npt.NDArray[np.float32], npt.NDArray[np.float32] | None],
              n_top: int) -> Draft:
        """Return a draft from what the device lists of each drafted token."""
        words, logits, confidence = results
        total, largest = words[:, :2].view(np.float32).T
        n_listed = words[:, _N_LIKELY]
        bad = np.flatnonzero((n_listed > _LISTED) | (n_listed < n_top))
        n = int(bad[0]) if bad.size else len(words)
        tokens = words[:n, 4 : 4 + n_top]
        if self._d2t is not None:
            tokens = self._d2t[tokens]
        log_p = logits[:n, :n_top] - (largest[:n] + np.log(total[:n]))[:, None]
        return Draft(tokens, log_p, None if confidence is None else confidence[:n])

    def _launch(self, key: tuple[object, ...], n_nodes: int, build: Callable[[Builder], None]) -> None:
        """Enqueue a graph, which is built at first use."""
        built = self._graphs.get(key, n_nodes, build)
        status = C.mg_launch(self._device.compute.ptr, built.graph, ffi.NULL, 0)
        self._device.check(status, "the drafter's features")

    def close(self) -> None:
        """Wait for the device, then free everything."""
        self._device.synchronize()
        for part in (self._weights, self._rings, self._memory):
            part.close()
