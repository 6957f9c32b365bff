"""The memory of sweeps: what all rows of a prompt need on the device between two layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..experts.crossing import padded
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, I32, Builder, Tensor
from ..ggml.places import write_unit
from ..graphs.chunk import ChunkInputs
from ..resident.layout import UNIT_SHARE, most_terms
from ..resident.stage import Stage
from ..units import round_up

# Host copies of the inputs of units that may be under way at once.
_N_HOST = 8


class SweepMemory:
    """Fixed memory for a sweep of at most n_rows rows in chunks of at most max_rows.

    hidden: F32 [n_embd, n_rows + 1], the input of the layer that is computed next, then its
    output. If experts may be missing: post_norm F32 [n_embd, n_rows], weights F32 [1, n_used *
    n_rows + 1], and with_rows (CPU device, --deterministic) expert_rows F32 [n_embd, n_used *
    n_rows + 1]. The last row of hidden, weights and expert_rows is spare: padding goes there.
    ids: I32 numpy [2, n_rows * n_used], the choice in a layer and in the one before.
    most: places of a unit, at most.
    """

    def __init__(
        self, stage: Stage, max_rows: int, n_rows: int, may_lack: bool, with_rows: bool
    ) -> None:
        device, hp = stage.device, stage.hp
        self._device, self.n_rows, self.max_rows = device, n_rows, max_rows
        n_places = hp.n_expert_used * n_rows
        self._n_terms = most_terms(hp.n_expert_used, hp.n_expert)
        # on the CPU the bits of a product depend on how many rows chose the expert: see `Sweep`
        share = 1 if device.can.exact_sums else UNIT_SHARE
        self.most = max(64, hp.n_expert_used * max_rows // share + 1)
        shapes = {"hidden": (hp.n_embd, n_rows + 1)}
        if may_lack:
            shapes |= {"post_norm": (hp.n_embd, n_rows), "weights": (1, n_places + 1)}
            shapes["unit"] = (1, self._n_words(padded(self.most)))
            shapes["unit_rows"] = (1, 4 + self._n_terms)
        if with_rows:
            shapes["expert_rows"] = (hp.n_embd, n_places + 1)
        self._context = Context(len(shapes))
        tensors: dict[str, Tensor] = {}
        offsets, size = {}, 0
        for name, ne in shapes.items():
            offsets[name] = size
            size = round_up(size + 4 * ne[0] * ne[1], device.alignment)
            tensors[name] = C.ggml_new_tensor_2d(self._context.ptr, F32, *ne)
        self._buffer = device.buffer(size, f"a sweep of {n_rows} rows", "lower -c or -ub")
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        for name, tensor in tensors.items():
            place(self._buffer, tensor, offsets[name])
        self.hidden = tensors["hidden"]
        self._tensors, self._offsets = tensors, offsets
        if may_lack:
            rows = np.arange(4 + self._n_terms, dtype=np.int32)
            C.ggml_backend_tensor_set(tensors["unit_rows"], ffi.from_buffer(rows), 0, rows.nbytes)
        self.inputs = ChunkInputs(stage, max_rows, n_rows)
        self._ids_host = device.host_buffer(8 * n_places)
        self.ids: npt.NDArray[np.int32] = self._ids_host.array[: 8 * n_places].view(np.int32)
        self.ids = self.ids.reshape(2, n_places)
        self._host_step = 4 * self._n_words(padded(self.most))
        # graphs read it: see `SweepGraphs.unit_inputs`
        self._units_host = device.host_buffer(self._host_step * _N_HOST, must_pin=True)
        self._sent = [device.event() for _ in range(_N_HOST)]
        self._turn = 0
        self.n_bytes = size + self.inputs.n_bytes

    def _n_words(self, n_padded: int) -> int:
        """Return the words of the inputs of a unit."""
        return (4 + self._n_terms) * n_padded

    def ids_address(self, turn: int, at: int) -> Any:
        """Return where the ids of a layer are written, from place `at` on."""
        return self._ids_host.address(4 * (turn * self.ids.shape[1] + at))

    def tensor(self, name: str) -> Tensor:
        """Return post_norm, weights or expert_rows."""
        return self._tensors[name]

    def unit_leaves(self, b: Builder, n_padded: int) -> list[Tensor]:
        """Return the inputs of a unit: token, slot, place, target, and one leaf of each round."""
        leaves = []
        for at in range(4 + self._n_terms):
            leaf = b.leaf(I32, (n_padded,), "unit")
            place(self._buffer, leaf, self._offsets["unit"] + 4 * at * n_padded)
            leaves.append(leaf)
        return leaves

    def gather_unit(self, b: Builder, turn: int, n_padded: int) -> None:
        """Append the copy of a unit's inputs from host memory to where `unit_leaves` reads them."""
        n = 4 + self._n_terms
        host, rows = b.leaf(I32, (n_padded, n), "unit_host"), b.leaf(I32, (n,), "unit_rows")
        place(self._units_host, host, turn * self._host_step)
        place(self._buffer, rows, self._offsets["unit_rows"])
        found = b.get_rows(host, rows)
        place(self._buffer, found, self._offsets["unit"])
        b.expand(found)

    def write_unit(
        self, places: npt.NDArray[np.int32], ids: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
    ) -> tuple[int, int]:  # fmt: skip
        """Write the inputs of a unit to host memory; return the turn and the padded places.

        places: fewer than `most`. Others: as in `write_unit`. Launch what reads the turn, then call
        `sent_unit`.
        """
        turn, self._turn = self._turn, (self._turn + 1) % _N_HOST
        sent, n_used = self._sent[turn], self.ids.shape[1] // self.n_rows
        if sent:
            sent.wait()
        n_padded = padded(len(places))
        at, n_bytes = turn * self._host_step, 4 * self._n_words(n_padded)
        words = self._units_host.array[at : at + n_bytes].view(np.int32)
        n_rounds = write_unit(
            places, ids, slots, n_used, self.n_rows, n_padded, self._n_terms, words
        )
        words[(4 + n_rounds) * n_padded :] = -1  # one graph for any number of rounds
        return turn, n_padded

    def sent_unit(self, turn: int) -> None:
        """Note that what reads the inputs of this turn is enqueued."""
        sent = self._sent[turn]
        if sent:
            C.ggml_backend_event_record(sent.ptr, self._device.compute.ptr)

    def copy(self, source: Tensor, source_at: int, to: Tensor, to_at: int, n: int) -> None:
        """Enqueue a copy of n rows between two tensors F32 [m, ...], from rows source_at, to_at."""
        size = source.nb[1]
        C.mg_copy_bytes(
            self._device.compute.ptr, source, size * source_at, to, size * to_at, size * n
        )

    def close(self) -> None:
        """Free all memory."""
        parts: list[Any] = [
            *self._sent, self._units_host, self._ids_host, self.inputs, self._buffer, self._context,
        ]  # fmt: skip
        for part in parts:
            if part:
                part.close()
