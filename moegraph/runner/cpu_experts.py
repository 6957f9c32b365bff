"""Computes missing experts on the CPU, from host memory, while the device runs `moe`.

The layer's graph exports attn_post_norm (x) and the routing weights before the ids. The CPU
computes its experts, and the device adds the result y in the graph `add_cpu`:

    compute:  mixer_router(l) | moe(l) ........ | y from the host | add_cpu(l): l_out += y
    readback:                   x, weights, ids
    CPU threads:                            y = weighted sum of the experts over x
    host:                                   enqueues uploads, then computes as one of the threads
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch.blocks.experts import build_expert_rows
from ..ggml.cpu_ffn import CpuFfn
from ..ggml.handles import Buffer, Context, Owner
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, I32, Builder, Tensor, shape
from ..graphs.cache import BuiltGraph, GraphCache
from ..resident.bank import Bank, strided_stack
from ..resident.stage import Stage
from ..resident.store import ExpertStore
from ..units import round_up


class CpuExperts(Owner, ABC):
    """A stage's experts in host memory, and pinned memory for x, weights, ids and y of one layer.

    x: F32 [n_embd, n_tokens]; weights F32 [n_factors, n_expert_used, n_tokens]; ids I32
    [n_expert_used, n_tokens]; y: F32, y_rows rows of n_embd for each row of x; n_tokens <=
    max_rows.
    """

    def __init__(self, stage: Stage, max_rows: int, y_rows: int) -> None:
        self._hp = hp = stage.hp
        k = hp.n_expert_used
        sizes = {
            "x": 4 * hp.n_embd * max_rows,
            "weights": 4 * hp.n_factors * k * max_rows,
            "ids": 4 * k * max_rows,
            "y": 4 * hp.n_embd * max_rows * y_rows,
        }
        self._offsets, size = {}, 0
        for name, n_bytes in sizes.items():
            self._offsets[name] = size
            size = round_up(size + n_bytes, 64)
        # pinned: the device's graphs write into it
        self._host = self.own(stage.device.host_buffer(size, must_pin=True))
        raw = C.ggml_backend_cpu_buffer_from_ptr(ffi.cast("void *", self._host.base), size)
        self._block = self.own(Buffer(raw, self._host))
        self._banks = {il: self._wrap(stage.store, il) for il in stage.store.layers}

    def _wrap(self, store: ExpertStore, il: int) -> Bank:
        """Return a bank over a layer's experts in host memory, without a copy."""
        stacks = store.stacks(il)
        context = self.own(Context(len(stacks)))
        parts = {}
        for part, (info, address, stride, owner) in stacks.items():
            tensor = strided_stack(context, info, info.ne[2], stride)
            raw = C.ggml_backend_cpu_buffer_from_ptr(
                ffi.cast("void *", address), C.ggml_nbytes(tensor)
            )
            place(self.own(Buffer(raw, owner)), tensor, 0)
            parts[part] = tensor
        return Bank(self._hp.n_expert, parts)

    def export(self, b: Builder, x: Tensor, weights: Tensor) -> None:
        """Append the copies of x [n_embd, n_tokens] and weights [n_factors, n_expert_used, n]."""
        for name, tensor in (("x", x), ("weights", weights)):
            target = b.leaf(F32, shape(tensor), f"{name}_host")
            place(self._host, target, self._offsets[name])
            b.expand(b.publish(tensor, target))

    def address(self, name: str) -> Any:
        """Return the address of x, weights, ids or y; the device writes the first two, reads y."""
        return self._host.address(self._offsets[name])

    def begin(
        self, il: int, ids: npt.NDArray[np.int32], experts: Sequence[int], n_tokens: int
    ) -> None:
        """Begin to compute experts of layer il into y, for the rows that chose them.

        ids: the choice of all rows, [n_tokens * n_expert_used]. x and weights are set.
        """
        at, on_cpu = self._offsets["ids"], set(experts)
        cpu_ids = self._host.array[at : at + ids.nbytes].view(np.int32)
        cpu_ids[:] = [expert if expert in on_cpu else -1 for expert in ids.tolist()]
        self._begin(il, n_tokens)

    def _prepare(self, il: int, n_tokens: int) -> None:
        """Do now what the first `begin` with n_tokens rows in layer il would have to prepare."""

    @abstractmethod
    def _begin(self, il: int, n_tokens: int) -> None:
        """Begin to compute y from x, weights and ids; an id of -1 is skipped."""

    def end(self) -> None:
        """Wait until y is there."""

    def measure(self, n_experts: int, n_tokens: int = 1, repeat: int = 6) -> float:
        """Return the median seconds of computing n_experts experts that all rows chose.

        Layers and experts change from sample to sample, so that no cache holds their weights.
        """
        rng, hp, samples = np.random.default_rng(n_experts), self._hp, []
        layers = sorted(self._banks)
        ids = np.full((n_tokens, hp.n_expert_used), -1, dtype=np.int32)
        for at in range(repeat + 1):
            ids[:, :n_experts] = rng.permutation(hp.n_expert)[:n_experts]
            il = layers[(at * 7) % len(layers)]
            self._prepare(il, n_tokens)
            start = time.perf_counter()
            self.begin(il, ids.reshape(-1), ids[0, :n_experts].tolist(), n_tokens)
            self.end()
            samples.append(time.perf_counter() - start)
        return float(np.median(samples[1:]))


class KernelCpuExperts(CpuExperts):
    """Computes experts with our CPU kernel (native/py/cpu_ffn.c), for a GPU as the main device.

    y: weighted sum of the experts, [n_embd, n_tokens].
    """

    def __init__(self, stage: Stage, n_threads: int, max_rows: int) -> None:
        hp = stage.hp
        super().__init__(stage, max_rows, y_rows=1)
        sizes = hp.n_embd, hp.n_ff_exp, hp.n_expert_used, max_rows
        self._ffn = self.own(CpuFfn(n_threads, *sizes))
        self._layers = {il: self._ffn.layer(bank.parts) for il, bank in self._banks.items()}
        kinds = {"x": "float *", "ids": "int32_t *", "weights": "float *", "y": "float *"}
        self._at = {name: ffi.cast(kind, self.address(name)) for name, kind in kinds.items()}

    def _begin(self, il: int, n_tokens: int) -> None:
        at = self._at
        self._ffn.begin(self._layers[il], at["x"], at["ids"], at["weights"], n_tokens, at["y"])

    def end(self) -> None:
        """Compute with the threads what is left."""
        self._ffn.end()


class GraphCpuExperts(CpuExperts):
    """Computes experts with a ggml graph for each layer and number of rows, on a CPU device.

    The aim is not speed: results must not depend on what is resident. So every expert goes through
    the kernels that `moe` uses, reference kernels included, and `sum_rows` sums all rows in routing
    order.

    y: the experts' weighted rows, [n_embd, n_expert_used, n_tokens]; zeros for other experts.
    """

    def __init__(self, stage: Stage, max_rows: int) -> None:
        super().__init__(stage, max_rows, y_rows=stage.hp.n_expert_used)
        self._graphs = self.own(GraphCache(stage.device))

    def _graph(self, il: int, n_tokens: int) -> BuiltGraph:
        return self._graphs.get((il, n_tokens), 64, lambda b: self._build(b, il, n_tokens))

    def _build(self, b: Builder, il: int, n_tokens: int) -> Tensor:
        hp, k = self._hp, self._hp.n_expert_used

        def put(tensor: Tensor, name: str) -> Tensor:
            place(self._block, tensor, self._offsets[name])
            return tensor

        x = put(b.leaf(F32, (hp.n_embd, n_tokens), "x"), "x")
        ids = put(b.leaf(I32, (k, n_tokens), "ids"), "ids")
        weights = put(b.leaf(F32, (hp.n_factors, k, n_tokens), "weights"), "weights")
        return put(build_expert_rows(b, self._banks[il].parts, x, ids, weights, il, hp.glu), "y")

    def _prepare(self, il: int, n_tokens: int) -> None:
        self._graph(il, n_tokens)

    def _begin(self, il: int, n_tokens: int) -> None:
        what = f"the experts of layer {il} on the CPU"
        self._graphs.launch(self._graph(il, n_tokens), what)
