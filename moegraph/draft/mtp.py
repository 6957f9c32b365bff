"""Drafts with the prediction (MTP) block of the target's own file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..ggml.choose import likeliest
from ..ggml.device import HostBuffer
from ..ggml.lib import C, ffi
from ..ggml.ops import Builder, Tensor
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.inputs import PAGED
from ..graphs.mtp import build_chain, build_known_rows, build_tapped_rows
from ..graphs.mtp_memory import MtpMemory
from ..graphs.paged import can_page
from ..resident.layout import MAX_MTP_DRAFT, MTP_ROWS
from ..resident.mtp import MtpBlock
from ..runner.sweep_batch import Tap
from .drafter import Draft, Ids, empty_draft

# Nodes of one step of a chain, without its experts, and more than those of known rows.
_N_NODES = 128


class MtpDrafter:
    """A drafter (`Drafter`) that runs the MTP block as chains of tokens.

    Its K and V are in the target's caches, and the output that a chain starts from is one of the
    target's states. So whatever the target does to a sequence, such as to forget positions or to
    restore a beginning of a prompt, it does to the drafter's part too. Positions of passes that
    the drafter was not told of have zeros for K and V.
    """

    name = "mtp"

    def __init__(
        self, block: MtpBlock, max_rows: int = MTP_ROWS, max_draft: int = MAX_MTP_DRAFT
    ) -> None:
        """max_rows: known rows that are computed at a time.

        Raises:
            OutOfDeviceMemory: its memory does not fit.
        """
        self._block, self._device = block, block.stage.device
        state = self._state = block.stage.state
        if state.last_out is None:
            raise InternalError("the target's state has no room for an MTP block")
        self._last_out: Tensor = state.last_out
        self._layer = block.stage.hp.n_layer - 1
        self.taps: tuple[int, ...] = (self._layer,)
        self.max_draft = max_draft
        self._is_paged = can_page(block.stage)
        self.memory = MtpMemory(block, max_rows, max_draft, self._is_paged)
        self._graphs = GraphCache(self._device)
        self._host: HostBuffer | None = None  # for results of the longest chain

    @property
    def n_bytes(self) -> int:
        """Device memory of weights, K and V, and graphs."""
        weights, kv = self._block.n_bytes, self._state.mtp_bytes
        return weights + kv + self.memory.n_bytes + self._graphs.n_bytes

    def reserve(self) -> None:
        """Build the largest graphs, so that their memory never grows later.

        Raises:
            OutOfDeviceMemory: the intermediates do not fit.
        """
        self._known(self.memory.max_rows)
        n_kv = PAGED if self._is_paged else self._state.n_ctx
        self._chain(self.max_draft, n_kv)

    def restart(self, slot: int, ids: Ids) -> None:
        """Do nothing: what was restored has the drafter's K and V too."""

    def truncate(self, slot: int, n_past: int) -> None:
        """Do nothing: the target's state has forgotten the drafter's K and V too."""

    def prompt_taps(self, slot: int, ids: Ids, first: int) -> dict[int, Tap]:
        """Return what a sweep calls to extend K and V over a prompt."""
        tokens = np.asarray(ids, dtype=np.int32)
        return {self._layer: partial(self._read_rows, slot, tokens, first)}

    def _read_rows(
        self, slot: int, ids: npt.NDArray[np.int32], start: int, hidden: Tensor, n: int, first: int
    ) -> None:
        """Enqueue K and V of n positions from first on; hidden: l_out of the last layer there.

        ids: the tokens of the positions from start on.
        """
        memory, most = self.memory, self.memory.max_rows
        for at in range(0, n, most):
            m = min(most, n - at)
            skipped = 0
            if at == 0:  # the position before these was computed earlier
                self._copy(self._last_out, slot, 0, 1)
                skipped = 1
            self._copy(hidden, at - 1 + skipped, skipped, m - skipped)
            n_padded = self._padded(m)
            built = self._known(n_padded)
            tokens = ids[first - start + at :][:m]
            memory.send_known(slot, tokens, first + at, n_padded)
            self._launch(built, "the MTP block over a prompt")

    def _copy(self, source: Tensor, row: int, to: int, n: int) -> None:
        """Enqueue a copy of n rows F32 [n_embd, ...] to where `before` is read."""
        size = self.memory.before.nb[1]
        if n:
            C.mg_copy_bytes(
                self._device.compute.ptr, source, size * row, self.memory.before, size * to,
                size * n,
            )  # fmt: skip

    def committed(self, slot: int, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Enqueue K and V of positions that the target's sequence has just taken."""
        n, first = len(tokens), self._state.n_past[slot] - len(tokens)
        if not n:
            return
        n_padded = self._padded(n)
        built = self._tapped(n_padded)
        ids = np.array(tokens, dtype=np.int32)
        self.memory.send_known(slot, ids, first, n_padded, rows)
        self._launch(built, "the MTP block over accepted tokens")

    def draft(self, slot: int, anchor: int, n: int, n_top: int) -> Draft:
        """Propose at most n tokens after the anchor: one chain, and one wait.

        Raises:
            NativeError: the device failed.
        """
        state, n_past = self._state, self._state.n_past[slot]
        n = min(n, self.max_draft, state.n_ctx - n_past)
        if n < 1:
            return empty_draft()
        length = PAGED if self._is_paged else state.n_kv(n_past + n)
        built = self._chain(n, length)
        built.set_length(length)
        state.pool.grow(slot, n_past + n)
        self.memory.send_chain(slot, anchor, n, built.outputs.n_kv, length)
        self._launch(built, f"{n} tokens of the MTP block", built.outputs.reads, 2)
        C.ggml_backend_synchronize(self._device.compute.ptr)
        return self._draft(built.outputs, n, n_top)

    def _draft(self, outputs: _ChainResults, n: int, n_top: int) -> Draft:
        """Return what a chain left: its tokens first, then the likeliest others of each step."""
        lists = [likeliest(row) for row in outputs.rows]
        n_top = min(n_top, *(max(1, len(ids)) for ids, *_ in lists))
        tokens, log_p = np.empty((n, n_top), dtype=np.int32), np.empty((n, n_top), dtype=np.float32)
        part = self._block.part
        for at, (rows, logs, largest) in enumerate(lists):
            first, ids = outputs.tokens[at], part.ids[rows] if part else rows
            others = ids != first  # of equally likely ones, the list may begin with another
            tokens[at, 0], tokens[at, 1:] = first, ids[others][: n_top - 1]
            log_p[at, 0], log_p[at, 1:] = largest, logs[others][: n_top - 1]
        return Draft(tokens, log_p)

    def _padded(self, n: int) -> int:
        """Return for how many rows the graph of n known rows is."""
        return min(self.memory.max_rows, 1 << (n - 1).bit_length())

    def _known(self, n: int) -> BuiltGraph:
        """Return the graph of K and V of n known rows, whose outputs are in `before`."""
        memory = self.memory
        return self._graphs.get(
            ("mtp rows", n),
            _N_NODES,
            lambda b: build_known_rows(
                b, self._block, memory.known_leaves(b, n), memory.before_leaf(b, n)
            ),
        )

    def _tapped(self, n: int) -> BuiltGraph:
        """Return the graph of K and V of n rows of the target's last pass."""

        def build(b: Builder) -> None:
            tap = self._block.stage.taps.leaf(b, self._layer)
            rows = self.memory.known_leaves(b, n)
            build_tapped_rows(b, self._block, rows, self._last_out, tap)

        return self._graphs.get(("mtp taps", n), _N_NODES, build)

    def _chain(self, n: int, length: int) -> BuiltGraph:
        """Return a graph of a chain of n tokens over `length` positions or more.

        Its outputs: where the results arrive.
        """
        n_kv = length
        if not (self._is_paged or self._device.can.streams):  # it can be shortened: length.py
            n_kv = self._state.n_ctx
        n_nodes = n * (_N_NODES + 3 * self._block.stage.hp.n_expert_used)
        return self._graphs.get(
            ("mtp chain", n, n_kv), n_nodes, lambda b: self._build_chain(b, n, n_kv)
        )

    def _build_chain(self, b: Builder, n: int, n_kv: int) -> _ChainResults:
        memory = self.memory
        token, slot, steps = memory.chain_leaves(b, n, n_kv)
        before = b.get_rows(self._last_out, slot)
        build_chain(
            b, self._block, token, before, steps, n_kv, memory.keep_logits, memory.keep_token
        )
        logits, tokens, draws = memory.result_leaves(b, n)
        candidates = b.expand(b.name(b.candidates(logits, draws), "result_candidates"))
        C.ggml_set_output(candidates)
        if self._host is None:
            self._host = self._device.host_buffer((candidates.nb[1] + 4) * self.max_draft)
        return _ChainResults(self._host, candidates, tokens, n_kv)

    def _launch(self, built: BuiltGraph, what: str, reads: object = ffi.NULL, n: int = 0) -> None:
        status = C.mg_launch(self._device.compute.ptr, built.graph, reads, n)
        if status:
            self._device.check(status, what)

    def close(self) -> None:
        """Wait for the device, then free everything but the block."""
        self._device.synchronize()
        self._graphs.close()
        if self._host:
            self._host.close()
        self.memory.close()


class _ChainResults:
    """Where the results of a chain arrive in host memory.

    rows: I32 numpy [n, words of a row], see `likeliest`. tokens: I32 numpy [n]. reads: the copies.
    """

    def __init__(self, host: HostBuffer, candidates: Tensor, tokens: Tensor, n_kv: int) -> None:
        n, n_bytes = tokens.ne[0], C.ggml_nbytes(candidates)
        self.n_kv = n_kv
        self.rows = host.array[:n_bytes].view(np.int32).reshape(n, -1)
        self.tokens = host.array[n_bytes : n_bytes + 4 * n].view(np.int32)
        self.reads = ffi.new(
            "struct mg_readback[2]",
            [
                {"src": candidates, "dst": host.address(), "size": n_bytes},
                {"src": tokens, "dst": host.address(n_bytes), "size": 4 * n},
            ],
        )
