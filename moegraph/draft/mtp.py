"""Drafts with the prediction (MTP) block of the target's own file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PAGED
from ..errors import InternalError
from ..ggml.choose import likeliest_rows
from ..ggml.device import HostBuffer
from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.mtp import (
    MtpMemory,
    build_chain,
    build_known_rows,
    build_likeliest,
    build_taken_rows,
    build_winner,
)
from ..graphs.paged import can_page
from ..kinds import MOST_BEHIND
from ..resident.layout import MAX_MTP_DRAFT, MTP_ROWS, USUAL_MTP_DRAFT
from ..resident.mtp import MtpBlock
from ..runner.sweep_batch import HiddenReader
from .drafter import N_CAPTURED, N_NODES, Draft, Drafter, Ids, Race, Taken
from .readback import Readback, drawn


class MtpDrafter(Drafter):
    """A drafter that runs the MTP block as chains of tokens.

    Its K and V are in the target's caches, and the output that a chain starts from is one of the
    target's states. So whatever the target does to a sequence, such as to forget positions or to
    restore a beginning of a prompt, it does to the drafter's part too. Positions of passes that
    the drafter was not told of have zeros for K and V.

    K and V of tokens that the text takes are computed from the ring of hidden states.
    """

    name = "mtp"

    def __init__(
        self, block: MtpBlock, max_rows: int = MTP_ROWS, max_draft: int = MAX_MTP_DRAFT
    ) -> None:
        """max_rows: known rows that are computed at a time."""
        self._block, self._device = block, block.stage.device
        state = self._state = block.stage.state
        if state.last_out is None:
            raise InternalError("the target's state has no room for an MTP block")
        self._last_out: Tensor = state.last_out
        self._layer = block.stage.hp.n_layer - 1
        self.target_layers = (self._layer,)
        self.max_draft = max_draft
        self._is_paged = can_page(block.stage)
        self.memory = MtpMemory(block, max_rows, max_draft, self._is_paged)
        self.graphs = GraphCache(self._device)
        self._host: HostBuffer | None = None  # for results of the longest chain

    @property
    def n_bytes(self) -> int:
        """Device memory of weights, K and V, and graphs."""
        weights, kv = self._block.n_bytes, self._state.mtp_bytes
        return weights + kv + self.memory.n_bytes + self.graphs.n_bytes

    def reserve(self) -> None:
        """Build the largest graphs, so that their memory never grows later."""
        self._known(self.memory.max_rows)
        n_kv = PAGED if self._is_paged else self._state.n_ctx
        for races in (False, True):
            self._chain(self.max_draft, n_kv, races)

    def warm_up(self, longest: int) -> None:
        """Run the graphs of usual drafts until a device has captured them; empties sequence 0.

        longest: tokens of the longest draft that there will be.
        """
        pool = self._state.pool
        most = min(MOST_BEHIND, pool.room(0))  # tokens that it is told of at once
        pool.grow(0, most)
        for _ in range(N_CAPTURED):
            for n in range(1, min(USUAL_MTP_DRAFT, longest, self.max_draft) + 1):
                self.draft(0, 0, n, 1)
            for n in (1 << power for power in range(most.bit_length())):
                self._compute(0, 0, [0] * n)
        self._block.stage.sequences.reset(0)

    def restart(self, slot: int, ids: Ids) -> None:
        """Do nothing: what was restored has the drafter's K and V too."""

    def prompt_readers(self, slot: int, ids: Ids, first: int) -> dict[int, HiddenReader]:
        """Return what a sweep calls to extend K and V over a prompt."""
        tokens = np.asarray(ids, dtype=np.int32)
        return {self._layer: partial(self._read_rows, slot, tokens, first)}

    def _read_rows(
        self, slot: int, ids: npt.NDArray[np.int32], start: int,
        hidden: Tensor, row: int, n: int, first: int,
    ) -> None:  # fmt: skip
        """Enqueue K and V of n positions from first on, whose l_out of the last layer is in hidden.

        ids: the tokens of the positions from start on. row: of the first position in hidden.
        """
        memory, most = self.memory, self.memory.max_rows
        for at in range(0, n, most):
            m = min(most, n - at)
            skipped = 0
            if at == 0:  # the position before these was computed earlier
                self._copy(self._last_out, slot, memory.before, 0, 1)
                skipped = 1
            self._copy(hidden, row + at - 1 + skipped, memory.before, skipped, m - skipped)
            n_padded = self._padded(m)
            built = self._known(n_padded)
            tokens = ids[first - start + at :][:m]
            memory.send_known(slot, tokens, first + at, n_padded)
            self.graphs.launch(built, "the MTP block over a prompt")

    def _copy(self, source: Tensor, row: int, to: Tensor, to_row: int, n: int) -> None:
        """Enqueue a copy of n rows F32 [n_embd, ...]."""
        stream, size = self._device.compute.ptr, to.nb[1]
        if n:
            C.mg_copy_bytes(stream, source, size * row, to, size * to_row, size * n)

    def committed(self, taken: Sequence[Taken]) -> None:
        """Enqueue K and V of tokens that sequences took; copies of their states have them too.

        Nothing is done if the target's sequence does not hold as many: it has no pages for them.
        """
        for slot, first, tokens in taken:
            if self._state.n_past[slot] >= first + len(tokens):
                self._compute(slot, first, tokens)

    def _compute(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Enqueue K and V of tokens from position first on, for which there are pages."""
        most = self.memory.max_rows
        for at in range(0, len(tokens), most):
            ids = np.array(tokens[at : at + most], dtype=np.int32)
            n_padded = self._padded(len(ids))
            built = self._accepted(n_padded)
            rows = self._block.stage.hidden_states.ring_rows(slot, first + at, len(ids))
            self.memory.send_known(slot, ids, first + at, n_padded, rows)
            self.graphs.launch(built, "the MTP block over accepted tokens")

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Propose at most n tokens after the anchor: one chain, and one wait.

        With a race, each depth begins with its winner, and later depths follow it; but if only a
        part of the vocabulary is drafted, then as without, because a race is about all tokens.
        """
        race = None if self._block.part else race
        state, n_past = self._state, self._state.n_past[slot]
        n = min(n, self.max_draft, state.pool.room(slot) - n_past)
        if n < 1:
            return Draft.empty()
        length = PAGED if self._is_paged else state.positions.n_kv(n_past + n)
        built = self._chain(n, length, race is not None)
        built.set_length(length)
        state.pool.grow(slot, n_past + n)
        results: Readback = built.outputs[0]
        self.memory.send_chain(slot, anchor, n, built.outputs[1], length)
        if race:
            keys = [race.key(depth) for depth in range(n)]
            self.memory.send_races(race.params.temperature, keys)
        what = f"{n} tokens of the MTP block"
        self.graphs.launch(built, what, results.reads, results.n_reads)
        self._device.finish()
        if self._block.experts:
            self._block.experts.note(results.rows[2])
        if race:
            return drawn(results.rows[0], n_top)
        tokens, log_p = likeliest_rows(results.rows[0], n_top)
        if self._block.part:
            tokens = self._block.part.ids[tokens]
        # of equally likely tokens, the chain may have gone on with another
        is_other = (tokens[:, 0] != results.rows[1][0, : len(tokens)]) & ~np.isnan(log_p[:, 0])
        n = int(is_other.argmax()) if is_other.any() else len(tokens)
        return Draft(tokens[:n], log_p[:n])

    def _padded(self, n: int) -> int:
        """Return for how many rows the graph of n known rows is."""
        return min(self.memory.max_rows, 1 << (n - 1).bit_length())

    def _known(self, n: int) -> BuiltGraph:
        """Return the graph of K and V of n known rows, whose outputs are in `before`."""
        memory = self.memory
        return self.graphs.get(
            ("mtp rows", n),
            N_NODES,
            lambda b: build_known_rows(
                b, self._block, memory.known_leaves(b, n), memory.before_leaf(b, n)
            ),
        )

    def _accepted(self, n: int) -> BuiltGraph:
        """Return the graph of K and V of n accepted rows, whose outputs the ring has."""

        def build(b: Builder) -> None:
            rows, states = self.memory.known_leaves(b, n), self._block.stage.hidden_states
            taken = states.kept(b, rows.sources)[states.layers.index(self._layer)]
            build_taken_rows(b, self._block, rows, self._last_out, taken)

        return self.graphs.get(("mtp accepted", n), N_NODES, build)

    def _chain(self, n: int, length: int, races: bool = False) -> BuiltGraph:
        """Return a graph of a chain of n tokens over `length` positions or more.

        Its outputs: where the results arrive, and the positions that it was built for.
        """
        n_kv = length
        if not (self._is_paged or self._device.can.streams):  # it can be shortened: length.py
            n_kv = self._state.n_ctx
        n_nodes = n * (N_NODES + 3 * self._block.stage.hp.n_expert_used)
        return self.graphs.get(
            ("mtp chain", n, n_kv, races), n_nodes, lambda b: self._build_chain(b, n, n_kv, races)
        )

    def _build_chain(self, b: Builder, n: int, n_kv: int, races: bool) -> tuple[Readback, int]:
        """Append a chain whose steps go on with the winner of a race, or the likeliest token."""
        memory, block = self.memory, self._block

        def choose(logits: Tensor, at: int) -> Tensor:
            if races:
                keep = partial(memory.keep, "listed", at=at)
                return build_winner(b, logits, memory.race_leaf(b, at), keep)
            token = build_likeliest(b, block, logits)
            memory.keep("tokens", token, at)
            return token

        token, slot, steps = memory.chain_leaves(b, n, n_kv)
        before = b.get_rows(self._last_out, slot)
        keep = partial(memory.keep, "logits"), partial(memory.keep, "ids")
        build_chain(b, block, token, before, steps, n_kv, *keep, choose)
        leaf = memory.result_leaves(b, n)
        listed = leaf["listed"]
        if not races:
            listed = b.candidates(leaf["logits"], leaf["draws"])
            C.ggml_set_output(b.expand(b.name(listed, "result_candidates")))
        parts = [listed, leaf["tokens"], *([leaf["ids"]] if self._block.experts else [])]
        if self._host is None:
            n_bytes = sum(C.ggml_nbytes(part) for part in parts) // n
            self._host = self._device.host_buffer(n_bytes * self.max_draft)
        return Readback(self._host, parts), n_kv

    def close(self) -> None:
        """Wait for the device, then free everything but the block."""
        self._device.synchronize()
        self.graphs.close()
        if self._host:
            self._host.close()
        self.memory.close()
