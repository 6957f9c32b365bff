"""Commits rows that a verify pass computed: a sequence then holds one path of its tree.

A verify pass writes K and V of its rows behind the positions of the sequence, in the order of rows,
and leaves the recurrent states as they are. The commit moves K and V of the paths to where they
belong, unless they are there, and runs the recurrences over the paths. One graph does that for any
number of sequences, whose paths may differ in length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, I32, MAX_TREE_ROWS, Builder
from ..graphs.cache import BuiltGraph, GraphCache
from ..resident.stage import Stage
from ..units import round_up
from .batch import Batch, Callback

_ALIGN = 256


@dataclass(frozen=True)
class _Inputs:
    """Byte offsets of the inputs of a commit, all I32, and its rows n_rows * n_seqs.

    slots, lengths [n_seqs]; path [n_rows, n_seqs], rows of the verify pass; taps [n_rows * n_seqs],
    rows of the ring of taps; sources, targets [n_rows * n_seqs], rows of the KV caches.
    """

    n_rows: int
    n_seqs: int

    @property
    def n_bytes(self) -> int:
        """Bytes of all inputs."""
        return self._at(6)

    def _at(self, i: int) -> int:
        small = round_up(4 * self.n_seqs, _ALIGN)
        large = round_up(4 * self.n_seqs * self.n_rows, _ALIGN)
        return min(i, 2) * small + max(i - 2, 0) * large

    def parts(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return offset and shape of each input, ggml order."""
        s, n = self.n_seqs, self.n_rows
        shapes = {"slots": (s,), "lengths": (s,), "path": (n, s), "taps": (n * s,)}
        named = {**shapes, "sources": (n * s,), "targets": (n * s,)}
        return {name: (self._at(i), ne) for i, (name, ne) in enumerate(named.items())}


class Commits:
    """Which verified rows can be committed, and the graphs that do it.

    pending: by sequence, the pass that verified its rows, and its place in that pass.
    """

    def __init__(self, stage: Stage, graphs: GraphCache) -> None:
        self._device = device = stage.device
        self._stage = stage
        self._graphs = graphs
        self._has_head = stage.has_head
        size = _Inputs(MAX_TREE_ROWS, stage.state.n_seq).n_bytes
        self._buffer = device.buffer(size, "the inputs of commits", "lower -c")
        self._host = device.host_buffer(size)
        self._uploaded = device.event()
        self._context = Context(1)
        self._all = C.ggml_new_tensor_1d(self._context.ptr, F32, size // 4)
        place(self._buffer, self._all, 0)
        self._regions: dict[_Inputs, dict[str, npt.NDArray[np.int32]]] = {}
        self.pending: dict[int, tuple[Batch, int]] = {}

    def begin(self, batch: Batch) -> None:
        """Note that a pass is launched: it overwrites what can be committed now."""
        if batch.tree:
            self.pending.clear()
        else:
            for slot in batch.slots:
                self.pending.pop(slot, None)

    def verified(self, batch: Batch) -> None:
        """Note that the rows of a verify pass can be committed."""
        self.pending.update({slot: (batch, seq) for seq, slot in enumerate(batch.slots)})

    def forget(self, slot: int) -> None:
        """Note that a sequence has changed, so that its verified rows do not fit any more."""
        self.pending.pop(slot, None)

    def commit(self, paths: Mapping[int, list[int]], begins: Callback) -> dict[int, list[int]]:
        """Enqueue that sequences take the rows of a path each; return their tokens.

        paths: by sequence, rows of it in the last verify pass, from a root on, each the child of
        the one before. The pass has been collected. begins: called before the launch; after an
        error that comes later, the caller must reset the sequences whose paths are not empty. An
        earlier one changes nothing.
        """
        tokens = {slot: self._tokens(slot, path) for slot, path in paths.items()}
        longer = {slot: path for slot, path in paths.items() if path}
        if longer:
            self._launch(longer, begins)
        for slot in paths:
            self.forget(slot)
        return tokens

    def _tokens(self, slot: int, path: list[int]) -> list[int]:
        """Return the tokens of a path that can be committed."""
        entry = self.pending.get(slot)
        if entry is None:
            raise RequestError(
                f"sequence {slot} has no rows to commit; run a verify pass over it first"
            )
        batch, seq = entry
        wrong = batch.tree.require_path(seq, path) if batch.tree else "there is no tree"
        if wrong:
            raise RequestError(f"sequence {slot}: {path} is not a path of its tree: {wrong}")
        return [int(batch.tokens[seq, row]) for row in path]

    def _launch(self, paths: Mapping[int, list[int]], begins: Callback) -> None:
        """Enqueue the commit of paths of at least one row each."""
        state = self._stage.state
        at = _Inputs(max(map(len, paths.values())), len(paths))
        moves = any(path != list(range(len(path))) for path in paths.values())
        built = self._graph(at, moves)  # first: building one may use the device
        self._fill(at, paths, moves)
        begins()
        status = C.mg_launch(self._device.compute.ptr, built.graph, ffi.NULL, 0)
        self._device.check(status, f"the commit of {sum(map(len, paths.values()))} rows")
        if self._has_head:  # the last stage has them too
            for slot, path in paths.items():
                state.n_past[slot] += len(path)

    def reserve(self, n_rows: int) -> None:
        """Build the graph of the largest commit of paths of up to n_rows rows."""
        self._graph(_Inputs(n_rows, self._stage.state.n_seq), True)

    def _graph(self, at: _Inputs, moves: bool) -> BuiltGraph:
        n_nodes = 64 * len(self._stage.layers)
        return self._graphs.get(("commit", at, moves), n_nodes, lambda b: self._build(b, at, moves))

    def _fill(self, at: _Inputs, paths: Mapping[int, list[int]], moves: bool) -> None:
        """Write the inputs and enqueue their upload; waits for the upload of the last commit."""
        if self._uploaded:
            self._uploaded.wait()
        state, taps, rows = self._stage.state, self._stage.taps, self._rows_of(at)
        for seq, (slot, path) in enumerate(paths.items()):
            n, first = len(path), state.n_past[slot]
            batch, place_in_pass = self.pending[slot]
            rows["slots"][seq], rows["lengths"][seq] = slot, n
            # rows are counted over all sequences of the pass; those after the first n do not matter
            rows["path"][seq] = place_in_pass * batch.tokens.shape[1]
            rows["path"][seq, :n] += np.array(path, dtype=np.int32)
            if taps.n_kept:
                rows["taps"][seq] = taps.spare_row
                rows["taps"][seq, :n] = taps.ring_rows(slot, first, n)
            if moves:
                rows["sources"][seq] = rows["targets"][seq] = state.spare_row
                rows["sources"][seq, :n] = [state.pool.row(slot, first + row) for row in path]
                rows["targets"][seq, :n] = [state.pool.row(slot, first + i) for i in range(n)]
        self._device.send(self._all, self._host, 0, at.n_bytes)
        if self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.compute.ptr)

    def _rows_of(self, at: _Inputs) -> dict[str, npt.NDArray[np.int32]]:
        """Return the inputs in host memory, each numpy shape [n_seqs, n]."""
        found = self._regions.get(at)
        if found is None:
            found = {}
            for name, (offset, ne) in at.parts().items():
                region = self._host.array[offset : offset + 4 * int(np.prod(ne))].view(np.int32)
                found[name] = region.reshape(at.n_seqs, -1)
            self._regions[at] = found
        return found

    def _build(self, b: Builder, at: _Inputs, moves: bool) -> None:
        """Append the commit of up to at.n_rows rows of each of at.n_seqs sequences.

        moves: K and V of some rows are not where they belong.
        """
        stage, leaves = self._stage, {}
        for name, (offset, ne) in at.parts().items():
            leaves[name] = b.leaf(I32, ne, f"commit_{name}")
            place(self._buffer, leaves[name], offset)
        C.ggml_set_input(leaves["slots"])  # kernels read it early
        for il in stage.layers:
            layer = stage.hp.layer(il)
            if layer.states:
                rows, w = stage.state.drafts.leaves(b, il), stage.weights.layer(il)
                inputs = leaves["slots"], leaves["path"], leaves["lengths"]
                stage.hp.commit(b, w, stage.state, rows, *inputs, il)
            if layer.kv and moves:
                for cache in (stage.state.k_words[il], stage.state.v_words[il]):
                    copy = b.get_rows(cache, leaves["sources"])
                    b.expand(b.set_rows(cache, copy, leaves["targets"]))
        path = b.reshape(leaves["path"], at.n_rows * at.n_seqs)
        stage.taps.append_path(b, path, leaves["taps"])

    def close(self) -> None:
        """Free the memory."""
        self.pending.clear()
        self._regions.clear()
        for handle in (self._uploaded, self._host, self._buffer, self._context):
            if handle:
                handle.close()
