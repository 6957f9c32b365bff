"""The memory of sweeps: what all rows of a prompt need on the device between two layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..experts.crossing import padded
from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32, I32, Builder, Tensor
from ..ggml.places import write_unit
from ..graphs.chunk import ChunkInputs
from ..resident.layout import most_terms
from ..resident.stage import Stage
from ..units import round_up

# Host copies of the inputs of units that may be under way at once.
_N_HOST = 4


class SweepMemory:
    """Fixed memory for a sweep of at most n_rows rows in chunks of at most max_rows.

    hidden: F32 [n_embd, n_rows + 1], the input of the layer that is computed next, then its
    output. If experts may be missing: post_norm F32 [n_embd, n_rows], weights F32 [1, n_used *
    n_rows + 1], and with_rows (CPU device) expert_rows F32 [n_embd, n_used * n_rows + 1]. The last
    row of hidden, weights and expert_rows is spare: padding goes there.
    ids: I32 numpy [2, n_rows * n_used], the choice in a layer and in the one before.
    most: places of a unit, at most.
    """

    def __init__(
        self, stage: Stage, max_rows: int, n_rows: int, may_lack: bool, with_rows: bool
    ) -> None:
        device, hp = stage.device, stage.hp
        self._device, self.n_rows, self.max_rows = device, n_rows, max_rows
        n_places = hp.n_expert_used * n_rows
        self._most_terms = most_terms(hp.n_expert_used, hp.n_expert)
        # on the CPU the bits of a product depend on how many rows chose the expert: see `Sweep`
        share = 1 if with_rows else 4
        self.most = max(64, hp.n_expert_used * max_rows // share + 1)
        shapes = {"hidden": (hp.n_embd, n_rows + 1)}
        if may_lack:
            shapes |= {"post_norm": (hp.n_embd, n_rows), "weights": (1, n_places + 1)}
            shapes["unit"] = (1, self._n_words(2 * self.most))
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
        self._tensors, self._unit_at = tensors, offsets.get("unit", 0)
        self.inputs = ChunkInputs(stage, max_rows, n_rows)
        self._ids_host = device.host_buffer(8 * n_places)
        self.ids: npt.NDArray[np.int32] = self._ids_host.array[: 8 * n_places].view(np.int32)
        self.ids = self.ids.reshape(2, n_places)
        self._units_host = device.host_buffer(4 * self._n_words(2 * self.most) * _N_HOST)
        self._sent = [device.event() for _ in range(_N_HOST)]
        self._turn = 0
        self.n_bytes = size + self.inputs.n_bytes

    def _n_words(self, n_padded: int) -> int:
        """Return the words of the inputs of the largest unit."""
        return (4 + self._most_terms) * n_padded

    def ids_address(self, turn: int, at: int) -> Any:
        """Return where the ids of a layer are written, from place `at` on."""
        return self._ids_host.address(4 * (turn * self.ids.shape[1] + at))

    def tensor(self, name: str) -> Tensor:
        """Return post_norm, weights or expert_rows."""
        return self._tensors[name]

    def unit_leaves(self, b: Builder, n_padded: int, n_rounds: int) -> list[Tensor]:
        """Return the inputs of a unit: token, slot, place, target, and one leaf of each round."""
        leaves = []
        for at in range(4 + n_rounds):
            leaf = b.leaf(I32, (n_padded,), "unit")
            place(self._buffer, leaf, self._unit_at + 4 * at * n_padded)
            leaves.append(leaf)
        return leaves

    def write_unit(
        self, places: npt.NDArray[np.int32], ids: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
    ) -> tuple[int, int]:  # fmt: skip
        """Write the inputs of a unit to host memory; return its padded places and its rounds.

        places: fewer than `most`. Others: as in `write_unit`. `send_unit` then uploads them.
        """
        sent, n_words = self._sent[self._turn], self._n_words(2 * self.most)
        if sent:
            sent.wait()
        at, n_used = 4 * self._turn * n_words, self.ids.shape[1] // self.n_rows
        words = self._units_host.array[at : at + 4 * n_words].view(np.int32)
        n_padded = padded(len(places))
        n_rounds = write_unit(
            places, ids, slots, n_used, self.n_rows, n_padded, self._most_terms, words
        )
        return n_padded, n_rounds

    def send_unit(self, n_padded: int, n_rounds: int) -> None:
        """Enqueue the upload of what `write_unit` wrote."""
        turn, self._turn = self._turn, (self._turn + 1) % _N_HOST
        C.ggml_backend_tensor_set_async(
            self._device.compute.ptr, self._tensors["unit"],
            self._units_host.address(4 * turn * self._n_words(2 * self.most)), 0,
            4 * (4 + n_rounds) * n_padded,
        )  # fmt: skip
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
