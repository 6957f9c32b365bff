"""Commits rows that a verify pass computed: the sequence then holds one path of its tree.

A verify pass writes K and V of its rows behind the positions of the sequence, in the order of rows,
and leaves the recurrent states as they are. The commit moves K and V of the path to where they
belong, unless they are there, and runs the recurrences over the path.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import I32, MAX_TREE_ROWS, Builder, Tensor
from ..graphs.cache import GraphCache
from ..graphs.deltanet import DeltaRows
from ..graphs.tree import build_commit
from ..resident.stage import Stage
from ..units import round_up
from .batch import Batch

_ALIGN = 256
_INPUTS = ("slots", "path", "sources", "targets")


class Commits:
    """Which verified rows can be committed, and the graphs that do it."""

    def __init__(self, stage: Stage, graphs: GraphCache) -> None:
        self._device = device = stage.device
        self._stage = stage
        self._graphs = graphs
        self._n_input = round_up(4 * MAX_TREE_ROWS, _ALIGN)
        size = self._n_input * len(_INPUTS)
        self._buffer = device.buffer(size, "the inputs of commits", "lower -c")
        # each sequence has host memory of its own: it is read by the time that the sequence has
        # been verified again
        self._host = device.host_buffer(size * stage.state.n_seq)
        self._verified: dict[int, tuple[Batch, int]] = {}  # sequence -> its place in the pass

    def begin(self, batch: Batch) -> None:
        """Note that a pass is launched: it overwrites what can be committed now."""
        if batch.tree:
            self._verified.clear()
        else:
            for slot in batch.slots:
                self._verified.pop(slot, None)

    def verified(self, batch: Batch) -> None:
        """Note that the rows of a verify pass can be committed."""
        self._verified.update({slot: (batch, seq) for seq, slot in enumerate(batch.slots)})

    def forget(self, slot: int) -> None:
        """Note that a sequence has changed, so that its verified rows do not fit any more."""
        self._verified.pop(slot, None)

    def commit(self, slot: int, path: list[int]) -> list[int]:
        """Enqueue that a sequence takes the rows of a path; return their tokens.

        path: rows of the sequence in the last verify pass, from a root on, each the child of the
        one before. The pass has been collected. If launching fails, the caller must reset the
        sequence.

        Raises:
            RequestError: there are no such rows, or they are not a path.
        """
        entry = self._verified.get(slot)
        if entry is None:
            raise RequestError(
                f"sequence {slot} has no rows to commit; run a verify pass over it first"
            )
        batch, seq = entry
        wrong = batch.tree.require_path(seq, path) if batch.tree else "there is no tree"
        if wrong:
            raise RequestError(f"sequence {slot}: {path} is not a path of its tree: {wrong}")
        self.forget(slot)
        if path:
            self._launch(slot, path, seq * batch.tokens.shape[1])
        return [int(batch.tokens[seq, row]) for row in path]

    def _launch(self, slot: int, path: list[int], first_row: int) -> None:
        """Enqueue the commit; first_row: the first row of the sequence among those of the pass."""
        state, rows = self._stage.state, np.array(path, dtype=np.int64)
        n_past, n = state.n_past[slot], len(path)
        moves = path != list(range(n))
        built = self._graphs.get(
            ("commit", n, moves), 64 * len(self._stage.layers), lambda b: self._build(b, n, moves)
        )
        one = np.array(slot)
        self._write(slot, "slots", one[None])
        self._write(slot, "path", first_row + rows)
        self._write(slot, "sources", state.pool.rows(one, n_past + rows))
        self._write(slot, "targets", state.pool.rows(one, n_past + np.arange(n)))
        for name, leaf in built.outputs.items():
            address = self._host.address(self._host_at(slot, name))
            size = C.ggml_nbytes(leaf)
            C.ggml_backend_tensor_set_async(self._device.compute.ptr, leaf, address, 0, size)
        status = C.mg_launch(self._device.compute.ptr, built.graph, ffi.NULL, 0)
        self._device.check(status, f"the commit of {n} rows")
        state.n_past[slot] = n_past + n

    def _host_at(self, slot: int, name: str) -> int:
        return self._n_input * (slot * len(_INPUTS) + _INPUTS.index(name))

    def _write(self, slot: int, name: str, values: npt.NDArray[np.int64]) -> None:
        at = self._host_at(slot, name)
        self._host.array[at : at + 4 * values.size].view(np.int32)[:] = values

    def _build(self, b: Builder, n: int, moves: bool) -> dict[str, Tensor]:
        """Append the commit of n rows of one sequence; return its inputs, I32.

        moves: K and V of the rows are not where they belong.
        """
        stage, inputs = self._stage, {}
        for i, (name, ne) in enumerate(zip(_INPUTS, ((1,), (n, 1), (n,), (n,)))):
            leaf = b.leaf(I32, ne, f"commit_{name}")
            place(self._buffer, leaf, self._n_input * i)
            inputs[name] = leaf
        C.ggml_set_input(inputs["slots"])  # kernels read it early
        for il in stage.layers:
            if stage.hp.is_recurrent(il):
                rows = DeltaRows(*stage.state.drafts.leaves(b, il))
                w = stage.weights.layer(il)
                build_commit(b, stage.hp, w, stage.state, rows, inputs["slots"], inputs["path"], il)
            elif moves:
                for cache in (stage.state.k_words[il], stage.state.v_words[il]):
                    copy = b.get_rows(cache, inputs["sources"])
                    b.expand(b.set_rows(cache, copy, inputs["targets"]))
        return inputs

    def close(self) -> None:
        """Free the memory."""
        self._verified.clear()
        self._host.close()
        self._buffer.close()
