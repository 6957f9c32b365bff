"""Drafts with DFlash and DSpark: one graph proposes all tokens of a block at once.

A draft is a block: the anchor, then mask tokens. Its rows attend to one another, and to K and V
that the drafter has made of hidden states of some layers of the target (`DraftContext`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from ..arch.dflash import DFlashHParams, build_context, build_outputs, build_rows
from ..arch.draftfile import DraftFile
from ..arch.dspark import HeadMatrix, build_drawn, build_lists
from ..errors import InternalError
from ..ggml.choose import WINNER_WORD, likeliest_rows
from ..ggml.device import HostBuffer
from ..ggml.handles import closed_on_failure
from ..ggml.lib import ffi
from ..ggml.ops import Builder, Tensor
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.dflash import (
    BEAM,
    DraftMemory,
    Floats,
    JointMemory,
    Longs,
    build_joint_draft,
    can_join,
)
from ..resident.draftlayout import CHUNK, JOINT_ROWS, MOST_JOINT, N_TAKEN, built_length
from ..resident.draftring import DraftRings
from ..resident.draftweights import DraftHead, DraftWeights
from ..resident.stage import Stage
from ..resident.weights import TokenEmbedding
from ..runner.sweep_batch import HiddenReader
from .drafter import N_CAPTURED, N_NODES, Draft, Drafter, DraftTree, Ids, Parts, Piece, Race, Taken
from .race import N_RUNNERS, raced_list
from .readback import Readback, drawn
from .tree import MOST_TOP, PathLists, best_paths


class DFlashDrafter(Drafter):
    """A drafter of DFlash files, which joins if its device can; hparams: what the file says."""

    def __init__(
        self, stage: Stage, file: DraftFile, n_sweep: int, n_ctx: int | None = None,
        as_stored: bool = False, part: DraftHead | None = None,
        embedding: TokenEmbedding | None = None,
    ) -> None:  # fmt: skip
        """Load a drafter that fits the target (`DraftFile.require_target`).

        stage: the target's last one. embedding: of the target, if the drafter has none and the
        stage neither. n_sweep: most rows of a part of a prompt. n_ctx: most positions
        that layers without a window see; None for a sequence's share of the target's. as_stored:
        BF16 weights stay BF16. part: the target's output matrix for some tokens, to propose no
        others; for a drafter that `takes_part`. The caller closes it.
        """
        hp, state, device = file.hparams, stage.state, stage.device
        self.hparams: DFlashHParams = hp
        self.name, self.max_draft = hp.name, hp.max_draft
        self._device = device
        # the length of the draft whose graph drafts 0, 1, ... tokens
        lengths, streams = range(hp.max_draft + 1), device.can.streams
        self._built = [built_length(n, hp.max_draft) if streams else n for n in lengths]
        with closed_on_failure():
            w = self._weights = DraftWeights(device, file, as_stored)
            n_seen = state.shape.most_seen(n_ctx or 0)
            self._rings = DraftRings(device, hp, n_seen, state.n_seq)
            self._memory = DraftMemory(device, hp, self._rings.shapes, n_sweep)
            self.graphs = GraphCache(device)
            self.context = DraftContext(stage, hp, w, self._rings, self._memory, self.graphs)
            self.target_layers = self.context.target_layers
            self._part = part
            self._d2t = file.d2t(stage.hp.n_vocab) if hp.n_vocab_draft else None
            if part:
                self._d2t, self._head = part.ids, HeadMatrix(part.output, part.table)
            else:
                head, output = stage.weights.head, w.output
                if output is None and head:
                    output = head.output
                if output is None:
                    raise InternalError("a drafter needs the stage with the head")
                d2t = None if self._d2t is None else self._memory.send_d2t(self._d2t)
                self._head = HeadMatrix(output, d2t)
            table = w.embedding or stage.weights.embedding or embedding
            if table is None:
                raise InternalError("a drafter needs an embedding")
            self._embed = partial(_embed, table, hp.n_embd)
            mask = self._embed(hp.mask_id)
            self._memory.send_mask(mask)
            self.joins = can_join(device, hp, self._rings)
            self._joint = JointMemory(device, hp, self._rings, mask) if self.joins else None
        self._host: HostBuffer | None = None  # for results of the longest draft

    @property
    def n_bytes(self) -> int:
        """Device memory of weights, K and V, and graphs."""
        parts = self._weights, self._rings, self._memory, self.graphs
        return sum(part.n_bytes for part in (*parts, self._joint, self._part) if part)

    def reserve(self) -> None:
        """Build the largest graphs, so that their memory never grows later."""
        self._draft_graph(0, self.max_draft, self._rings.full_lengths)
        if self._joint:
            for m in range(2, min(len(self._rings.spans), MOST_JOINT) + 1):
                self._joint_graph(self._joint, m, self._n_joint(self.max_draft, m))
        self.context.reserve()

    def warm_up(self, longest: int) -> None:
        """Run the graphs of drafts of a short text until a device has captured them.

        Those over tokens that texts took, too: in the first drafts after others of another drafter
        they would count as costs of this one. Empties sequence 0. longest: tokens of the longest
        draft that there will be.
        """
        for _ in range(N_CAPTURED):
            for n in sorted({*self._built[1 : longest + 1]}):
                self.draft(0, 0, n, 1)
            for power in range(N_TAKEN.bit_length()):
                self.context.take([(0, 0, [0] * (1 << power))])
            self._rings.restart(0, 0)

    def restart(self, slot: int, ids: Ids) -> None:
        """Forget a sequence; it now holds ids, I32 numpy [n_past], of which there is no K and V."""
        self._rings.restart(slot, len(ids))

    def truncate(self, slot: int, n_past: int) -> None:
        """Forget what a sequence held from position n_past on."""
        self._rings.truncate(slot, n_past)

    @property
    def row_widths(self) -> list[int]:
        """Return the bytes of a position in K and in V of each layer."""
        return self._rings.row_widths

    def take_rows(self, slot: int, first: int, n: int) -> Parts:
        """Copy K and V of n positions, as far as the rings have them, and wait."""
        return self._rings.take_rows(slot, first, n)

    def put_back(self, slot: int, ids: Ids, n_kept: int, pieces: Sequence[Piece]) -> None:
        """Have a sequence hold ids, with K and V that were copied back."""
        span = self._rings.spans[slot]
        span.truncate(n_kept)
        if span.n_past < n_kept:
            span.restart(n_kept)
        self._rings.put_rows(slot, n_kept, len(ids), pieces)

    def prompt_readers(self, slot: int, ids: Ids, first: int) -> dict[int, HiddenReader]:
        """Return what a sweep calls to extend K and V over a prompt from position first on."""
        self._rings.truncate(slot, first)
        if self._rings.spans[slot].n_past < first:
            self._rings.restart(slot, first)
        return {il: partial(self.context.prompt, slot, il) for il in self.target_layers}

    def committed(self, taken: Sequence[Taken]) -> None:
        """Enqueue K and V of tokens that sequences took."""
        self.context.take(taken)

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Propose at most n tokens after the anchor: one graph, and one wait."""
        n = min(n, self.max_draft)
        if n < 1:
            return Draft.empty()
        n_built = self._built[n]
        found = self.run_block(slot, anchor, n_built, partial(self._draft_graph, slot, n_built))
        tokens, log_p = likeliest_rows(found.rows[0][:n], n_top)
        return draft_of(self._d2t, tokens, log_p, found.confidence)

    def draft_all(self, anchors: Mapping[int, int], n: int, n_top: int) -> list[Draft]:
        """Propose at most n tokens after the anchor of each sequence: one graph, and one wait."""
        m, joint = len(anchors), self._joint
        n_built = self._n_joint(n, m)
        if not (joint and 1 < m <= MOST_JOINT and n_built):
            return super().draft_all(anchors, n, n_top)
        built = self._joint_graph(joint, m, n_built)
        embeddings = [self._embed(anchor) for anchor in anchors.values()]
        joint.send(anchors, embeddings, n_rows(self.hparams, n_built))
        found: Readback = built.outputs
        self.graphs.launch(built, f"drafts of {m} sequences", found.reads, found.n_reads)
        self._device.finish()
        n, sure = min(n, n_built), found.confidence
        rows = found.rows[0].reshape(n_built, m, -1)[:n].transpose(1, 0, 2)
        tokens, log_p = likeliest_rows(rows.reshape(m * n, -1), n_top)
        if len(tokens) == m * n:
            parts = list(zip(tokens.reshape(m, n, n_top), log_p.reshape(m, n, n_top)))
        else:  # a list is shorter: only that sequence's draft ends there
            parts = [likeliest_rows(np.ascontiguousarray(each), n_top) for each in rows]
        return [
            draft_of(self._d2t, *part, None if sure is None else sure[i::m])
            for i, part in enumerate(parts)
        ]

    def _n_joint(self, n: int, m: int) -> int:
        """Return the tokens that the graph of drafts of n tokens of m sequences drafts."""
        most = JOINT_ROWS // m - n_rows(self.hparams, 0)
        return min(self._built[min(n, self.max_draft)], most)

    def _joint_graph(self, joint: JointMemory, m: int, n: int) -> BuiltGraph:
        """Return the graph of drafts of n tokens of m sequences; its outputs: the results."""

        def build(b: Builder) -> Readback:
            inp = joint.leaves(b, m, n_rows(self.hparams, n), n)
            args = b, self.hparams, self._weights, self._rings, inp, self._head
            return self._results(*build_joint_draft(*args))

        return self.graphs.get(("joint", m, n), n_nodes(self.hparams, n), build)

    def run_block(
        self, slot: int, anchor: int, n: int, graph: Callable[[tuple[int, ...]], BuiltGraph]
    ) -> Readback:
        """Compute a block that proposes n tokens, and wait for its results.

        graph: returns the graph for the rows of the rings that it reads.
        """
        memory, rows, lengths = self._memory, n_rows(self.hparams, n), self._rings.lengths(slot)
        built = graph(lengths)
        n_past = self._rings.spans[slot].n_past
        masks = memory.begin(self._embed(anchor), anchor, n_past, rows, lengths)
        for kind, (shape, mask) in enumerate(zip(self._rings.shapes, masks)):
            held = self._rings.spans[slot].of_ring(kind)
            shape.fill_mask(mask, held, self.hparams.is_causal)
        memory.send(rows, lengths)
        found: Readback = built.outputs
        self.graphs.launch(built, f"a draft of {n} tokens", found.reads, found.n_reads)
        self._device.finish()
        return found

    def _draft_graph(self, slot: int, n: int, lengths: tuple[int, ...]) -> BuiltGraph:
        """Return the graph of a draft of n tokens; its outputs: where the results arrive."""

        def build(b: Builder) -> Readback:
            hp, w, head = self.hparams, self._weights, self._head
            inp = self._memory.block_leaves(b, n_rows(hp, n), n, lengths)
            rows, logits = build_rows(b, hp, w, self._rings, inp, head, slot, n)
            found = build_outputs(b, hp, w, rows, logits, inp.anchor, head, inp.draws)
            return self._results(*found)

        return self.graphs.get(("draft", slot, n, lengths), n_nodes(self.hparams, n), build)

    def _results(self, candidates: Sequence[Tensor], confidence: Tensor | None) -> Readback:
        if self._host is None:
            size = (candidates[0].nb[1] + 4) * max(BEAM * self.hparams.block_size, JOINT_ROWS)
            self._host = self._device.host_buffer(size)
        return Readback(self._host, candidates, confidence)

    def close(self) -> None:
        """Wait for the device, then free everything."""
        self._device.synchronize()
        for part in (
            self.graphs, self._weights, self._rings, self._memory, self._joint, self._host,
        ):  # fmt: skip
            if part:
                part.close()


class DraftContext:
    """Makes K and V of each of a drafter's layers, for the sequences of a stage.

    For tokens of a prompt, a sweep calls `prompt` with the output of each target layer; for tokens
    that texts take, the ring of `HiddenStates` has them. target_layers: in order.
    """

    def __init__(
        self, stage: Stage, hp: DFlashHParams, weights: DraftWeights, rings: DraftRings,
        memory: DraftMemory, graphs: GraphCache,
    ) -> None:  # fmt: skip
        """memory: for inputs. graphs: of the drafter."""
        self.target_layers = tuple(sorted(set(hp.target_layers)))
        self.hparams, self._stage, self._weights = hp, stage, weights
        self._rings, self._memory, self._graphs = rings, memory, graphs
        self._chunk = min(CHUNK, *(shape.n_cells for shape in rings.shapes))

    def reserve(self) -> None:
        """Build the largest graphs, so that their memory never grows later."""
        self.keys_graph(N_TAKEN)
        n = min(self._chunk, self._memory.features.ne[1])
        self._fuse_graph(self._memory.features, self.target_layers[-1], 0, n)
        self._prompt_graph(0, n)

    def prompt(self, slot: int, il: int, hidden: Tensor, row: int, n: int, first: int) -> None:
        """Fuse the outputs of a target layer for rows of a prompt; after the last, make K and V."""
        chunks = [(row + at, min(self._chunk, n - at)) for at in range(0, n, self._chunk)]
        for at, m in chunks:
            built = self._fuse_graph(hidden, il, at, m)
            self._graphs.launch(built, "the drafter's features of a prompt")
        if il != self.target_layers[-1]:
            return
        places = first + np.arange(n)
        self._memory.send_prompt(row, places, self._cells(slot, places))
        self._rings.truncate(slot, first)
        self._rings.spans[slot].grow(n)  # before the rows are written, so that they are cleared
        for at, m in chunks:
            self._graphs.launch(self._prompt_graph(at, m), "the drafter's K and V of a prompt")

    def _fuse_graph(self, hidden: Tensor, il: int, row: int, n: int) -> BuiltGraph:
        """Return the graph that adds rows [row, row + n) of a layer, hidden, to the features."""

        def build(b: Builder) -> None:
            part = b.view(hidden, (hidden.ne[0], n), (hidden.nb[1],), row * hidden.nb[1])
            total = None if il == self.target_layers[0] else self._memory.fused(b, row, n)
            total = self._add_layer(b, total, part, il)
            b.expand(b.cpy(total, self._memory.fused(b, row, n)))

        key = "fuse", int(ffi.cast("intptr_t", hidden.data)), il, row, n
        return self._graphs.get(key, 8 * len(self._weights.fc), build)

    def _prompt_graph(self, row: int, n: int) -> BuiltGraph:
        """Return the graph of K and V of rows [row, row + n) of the features."""

        def build(b: Builder) -> None:
            pos, cells = self._memory.prompt_leaves(b, row, n)
            fused = self._memory.fused(b, row, n)
            build_context(b, self.hparams, self._weights, self._rings, fused, pos, cells)

        return self._graphs.get(("prompt", row, n), N_NODES * self.hparams.n_layer + 16, build)

    def _cells(self, slot: int, places: Longs) -> list[Ids]:
        """Return where K and V of positions go in each ring."""
        kinds = range(len(self._rings.shapes))
        return [self._rings.rows(kind, slot, places) for kind in kinds]

    def _add_layer(self, b: Builder, total: Tensor | None, x: Tensor, il: int) -> Tensor:
        """Append total + fc of a target layer times its output x, F32 [n_embd, n] each."""
        for k, target in enumerate(self.hparams.target_layers):
            if target == il:
                part = b.mul_mat(self._weights.fc[k], x)
                total = part if total is None else b.add(total, part)
        if total is None:
            raise InternalError(f"layer {il} is no target layer of the drafter")
        return total

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
        """Enqueue K and V of positions that the ring has: sequence, first one, and number."""
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
            taken[here] = self._stage.hidden_states.ring_rows(slot, first, m)
            for rows, mine in zip(cells, self._cells(slot, places[here])):
                rows[here] = mine
            self._rings.spans[slot].grow(m)
            at += m
        self._memory.send_rows(places, taken, cells)
        self._graphs.launch(built, "the drafter over accepted tokens")

    def keys_graph(self, n: int) -> BuiltGraph:
        """Return the graph of K and V of n tokens that sequences took."""

        def build(b: Builder) -> None:
            pos, taken, cells = self._memory.row_leaves(b, n)
            states = self._stage.hidden_states
            kept = dict(zip(states.layers, states.kept(b, taken)))
            first, *others = self.target_layers  # in a prompt's order, so that sums are the same
            total = self._add_layer(b, None, kept[first], first)
            for il in others:
                total = self._add_layer(b, total, kept[il], il)
            build_context(b, self.hparams, self._weights, self._rings, total, pos, cells)

        n_nodes = N_NODES * self.hparams.n_layer + 4 * len(self._weights.fc) + 16
        n_nodes += len(self._stage.hidden_states.layers)
        return self._graphs.get(("keys", n), n_nodes, build)


def _embed(table: TokenEmbedding, n_embd: int, token: int) -> Floats:
    """Return the embedding of a token, F32 [n_embd]."""
    row = np.empty(n_embd, np.float32)
    table.rows(np.array([token], np.int32), row[None])
    return row


def draft_of(d2t: Ids | None, tokens: Ids, log_p: Floats, sure: Floats | None) -> Draft:
    """Return the draft of what a head lists: tokens, log_p [n, n_top], sure [n] or more.

    d2t: the target's tokens, if they are others.
    """
    ids = tokens if d2t is None else d2t[tokens]
    return Draft(ids, log_p, None if sure is None else sure[: len(ids)].copy())


def n_rows(hp: DFlashHParams, n: int) -> int:
    """Return the rows of a block that proposes n tokens."""
    return n if hp.samples_anchor else n + 1


def n_nodes(hp: DFlashHParams, n: int) -> int:
    """Return a bound on the nodes of the graph of a block that proposes n tokens."""
    return N_NODES * hp.n_layer + 24 * n + 32


def describe(hp: DFlashHParams) -> list[str]:
    """Return what a file says of its drafter, a line each."""
    windows = f"{sum(hp.sliding)} of {hp.n_layer} layers see {hp.n_swa} positions"
    rope = f"{hp.rope.text}, base {hp.rope.rope_freq_base:g}"
    return [
        f"{hp.name} ({hp.dialect}): block {hp.block_size}, mask token {hp.mask_id}",
        f"target layers: {', '.join(map(str, hp.target_layers))}",
        f"window: {windows if hp.n_swa else 'none'}",
        f"rope: {rope}, {hp.rope.n_rot} of {hp.n_embd_head} dimensions",
    ]


class DSparkDrafter(DFlashDrafter):
    """A drafter of DSpark files."""

    has_tree = True

    def can_join(self, race: Race | None) -> bool:
        """Return whether a draft may be one of several: not if it follows winners."""
        return self.joins and (race is None or self._d2t is not None)

    def reserve(self) -> None:
        """Build the largest graphs; see `DFlashDrafter`."""
        super().reserve()
        self._lists_graph(0, self.max_draft, self._rings.full_lengths)
        if self._d2t is None:
            self._drawn_graph(0, self.max_draft, self._rings.full_lengths)

    def tree(
        self, slot: int, anchor: int, n_depth: int, n_most: int, race: Race | None = None
    ) -> tuple[Draft, DraftTree]:
        """Propose the likeliest paths after the anchor, the likeliest rows first.

        After the first tokens of each depth, what follows is known for the BEAM likeliest; after
        others, nothing follows. With a race, the likeliest are those that will probably win.
        """
        n = min(n_depth, self.max_draft)
        if n < 1:
            return Draft.empty(), DraftTree((anchor,), (-1,))
        found = self.run_block(slot, anchor, n, partial(self._lists_graph, slot, n))
        lists = self._lists_of(found, race)
        if not lists.tokens:
            return Draft.empty(), DraftTree((anchor,), (-1,))
        tokens, log_p = (np.asarray(part) for part in lists.spine())
        # the confidence is in the likeliest tokens, which need not win
        draft = draft_of(None, tokens, log_p, None if race else found.confidence)
        return draft, best_paths(anchor, lists, n_most)

    def _lists_of(self, results: Readback, race: Race | None) -> PathLists:
        tokens, log_p, before = [], [], list[list[int]]([[]])
        for depth, rows in enumerate(results.rows):
            ids, lp = likeliest_rows(rows, N_RUNNERS if race else MOST_TOP)
            if len(ids) < len(rows):  # equally likely tokens: they are not listed
                break
            ids = ids if self._d2t is None else self._d2t[ids]
            before.append(ids[0, :BEAM].tolist())
            if race and np.isfinite(lp).all():
                ids, lp = raced_list(ids, lp, race, depth, MOST_TOP)
            tokens.append(ids)
            log_p.append(lp)
        return PathLists(tokens, log_p, before)

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Propose at most n tokens after the anchor: one graph, and one wait.

        With a race, each depth begins with its winner, and later depths follow it; but with a
        reduced vocabulary as without, because a race is about all tokens.
        """
        n = min(n, self.max_draft)
        if race is None or self._d2t is not None or n < 1:
            return super().draft(slot, anchor, n, n_top)
        self._memory.send_races(race.params.temperature, [race.key(depth) for depth in range(n)])
        results = self.run_block(slot, anchor, n, partial(self._drawn_graph, slot, n))
        return drawn(np.concatenate(results.rows), n_top)

    def _drawn_graph(self, slot: int, n: int, lengths: tuple[int, ...]) -> BuiltGraph:
        """Return the graph of a draft that follows winners; its outputs: where results arrive."""

        def build(b: Builder) -> Readback:
            memory = self._memory
            inp = memory.block_leaves(b, n_rows(self.hparams, n), n, lengths)
            args = b, self.hparams, self._weights, self._rings, inp, self._head, slot, n
            _, logits = build_rows(*args)
            scratch = [memory.scratch(b, i, 1) for i in range(n - 1)]
            more = memory.races_leaf(b, n), scratch, 4 * WINNER_WORD
            return self._results(build_drawn(b, self._weights, logits, inp.anchor, *more), None)

        return self.graphs.get(("drawn", slot, n, lengths), n_nodes(self.hparams, n), build)

    def _lists_graph(self, slot: int, n: int, lengths: tuple[int, ...]) -> BuiltGraph:
        """Return the graph of lists for n depths; its outputs: where the results arrive."""

        def build(b: Builder) -> Readback:
            memory, hp = self._memory, self.hparams
            inp = memory.block_leaves(b, n_rows(self.hparams, n), max(n, BEAM), lengths)
            args = b, hp, self._weights, self._rings, inp, self._head, slot, n
            rows, logits = build_rows(*args)
            scratch = [memory.scratch(b, i, BEAM) for i in range(n - 1)]
            more = inp.anchor, self._head, inp.draws, scratch
            return self._results(*build_lists(b, self._weights, logits, rows, *more))

        return self.graphs.get(("lists", slot, n, lengths), n_nodes(self.hparams, n), build)
