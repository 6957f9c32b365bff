"""Banks: a layer's routed experts as slots of three tensors, and the table that finds them.

A graph never names an expert, it names a slot: `table` [1, n_expert] I32 on the device maps expert to
slot, and graph B looks the slots up in the graph. Here every expert has a slot, in file order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.ops import I32, Tensor
from ..modelfile import ModelFile
from ..weights import Loader, TensorSet, place, round_up

_REMEDY = "choose a smaller quantization, or use --device cpu"


@dataclass(frozen=True)
class Bank:
    """One layer's slots.

    gate, up [n_embd, n_ff_exp, n_slots] or gate_up [n_embd, 2 n_ff_exp, n_slots] (gate first),
    down [n_ff_exp, n_embd, n_slots]; table I32 [1, n_expert].
    """

    gate: Tensor | None
    up: Tensor | None
    gate_up: Tensor | None
    down: Tensor
    table: Tensor


class ExpertBanks:
    """The banks of all layers, filled from the model file."""

    def __init__(self, device: Device, loader: Loader, model: ModelFile) -> None:
        hp = model.hparams
        self._sets = [_load_layer(loader, model, il) for il in range(hp.n_layer)]
        self._context = Context(hp.n_layer)
        tables = [
            C.ggml_new_tensor_2d(self._context.ptr, I32, 1, hp.n_expert) for _ in self._sets
        ]
        stride = round_up(4 * hp.n_expert, device.alignment)
        self._tables = device.buffer(stride * hp.n_layer, "the expert tables", _REMEDY)
        identity = np.arange(hp.n_expert, dtype=np.int32)
        for il, table in enumerate(tables):
            place(self._tables, table, il * stride)
            C.ggml_backend_tensor_set(table, ffi.from_buffer(identity), 0, identity.nbytes)
        self._banks = [
            Bank(*(tensors.tensors.get(f"blk.{il}.ffn_{part}_exps.weight") for part in _PARTS), table)
            for il, (tensors, table) in enumerate(zip(self._sets, tables))
        ]
        self.n_bytes = sum(s.n_bytes for s in self._sets) + self._tables.size

    def layer(self, il: int) -> Bank:
        """Return the bank of layer il."""
        return self._banks[il]

    def close(self) -> None:
        """Free the banks."""
        for tensors in self._sets:
            tensors.close()
        self._tables.close()
        self._context.close()


_PARTS = ("gate", "up", "gate_up", "down")


def _load_layer(loader: Loader, model: ModelFile, il: int) -> TensorSet:
    names = (f"blk.{il}.ffn_{part}_exps.weight" for part in _PARTS)
    infos = [model.tensors[name] for name in names if name in model.tensors]
    return loader.load(infos, f"the experts of layer {il}")
