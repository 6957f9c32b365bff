"""Drafts with DSpark: a tree of the likeliest paths, each token given the one before."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..arch.dflash import build_rows
from ..arch.dspark import build_drawn, build_lists
from ..ggml.choose import WINNER_WORD, likeliest_rows
from ..ggml.ops import Builder
from ..graphs.cache import BuiltGraph
from ..graphs.dflash import BEAM
from .dflash import DFlashDrafter, draft_of, n_nodes, n_rows
from .drafter import Draft, DraftTree, Race, empty_draft
from .race import N_RUNNERS, raced_list
from .readback import Readback, drawn
from .tree import MOST_TOP, PathLists, best_paths


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
            return empty_draft(), DraftTree((anchor,), (-1,))
        found = self.run_block(slot, anchor, n, partial(self._lists_graph, slot, n))
        lists = self._lists_of(found, race)
        if not lists.tokens:
            return empty_draft(), DraftTree((anchor,), (-1,))
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
