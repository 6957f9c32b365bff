"""Missing experts computed on the CPU, from the host memory they are in, while the device runs B.

The layer's A publishes attn_post_norm and the weights beside the ids. The CPU computes the experts
it was given and the device adds the result:

    compute: A(l) | B(l) ............ | y from the host | E(l): l_out += y | A(l+1)
    copy:          ids, x, weights
    host:                 CPU threads: y = the experts' weighted sum over x
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..experts.bank import Bank, strided_stack
from ..experts.store import ExpertStore
from ..ggml.device import Device, HostBuffer
from ..ggml.handles import Buffer, Context, Handle
from ..ggml.lib import C, ffi
from ..ggml.ops import F32, I32, Builder, Tensor
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.experts import build_expert_rows, build_expert_sum
from ..hparams import HParams
from ..weights import place, round_up


class ColdExperts:
    """Computes chosen experts of a layer on the CPU for up to max_rows rows.

    as_rows: return single experts' weighted rows [n_embd, n_expert_used, n_rows] instead of their
    sum [n_embd, n_rows].
    """

    def __init__(
        self,
        device: Device,
        hp: HParams,
        store: ExpertStore,
        n_threads: int,
        max_rows: int,
        as_rows: bool,
        reference: bool = False,
    ) -> None:
        self._hp = hp
        self._as_rows = as_rows
        self._cpu = Device("cpu", n_threads, reference)
        self._graphs = GraphCache(self._cpu)
        k = hp.n_expert_used
        sizes = {
            "x": 4 * hp.n_embd * max_rows,
            "weights": 4 * k * max_rows,
            "ids": 4 * k * max_rows,
            "y": 4 * hp.n_embd * max_rows * (k if as_rows else 1),
        }
        self._offsets, size = {}, 0
        for name, n_bytes in sizes.items():
            self._offsets[name] = size
            size = round_up(size + n_bytes, 64)
        # pinned by the main device, so that its copies to and from here run by themselves
        self._host: HostBuffer = device.host_buffer(size)
        raw = C.ggml_backend_cpu_buffer_from_ptr(ffi.cast("void *", self._host.base), size)
        self._block = Buffer(raw, self._host)
        self._handles: list[Handle] = []
        self._banks = {il: self._wrap(store, il) for il in store.layers}

    def _wrap(self, store: ExpertStore, il: int) -> Bank:
        """Make a bank of all of a layer's experts over the host memory they are in."""
        stacks = store.stacks(il)
        context = Context(len(stacks))
        parts = {}
        for part, (info, address, stride, owner) in stacks.items():
            tensor = strided_stack(context, info, info.ne[2], stride)
            raw = C.ggml_backend_cpu_buffer_from_ptr(
                ffi.cast("void *", address), C.ggml_nbytes(tensor)
            )
            buffer = Buffer(raw, owner)
            place(buffer, tensor, 0)
            parts[part] = tensor
            self._handles.append(buffer)
        self._handles.append(context)
        return Bank(self._hp.n_expert, parts)

    def address(self, name: str) -> Any:
        """Return where x, weights or y is: the device fills the first two and reads the last."""
        return self._host.address(self._offsets[name])

    def _graph(self, il: int, n_rows: int) -> BuiltGraph:
        n_nodes = 64 + 3 * self._hp.n_expert_used
        return self._graphs.get((il, n_rows), n_nodes, lambda b: self._build(b, il, n_rows))

    def _build(self, b: Builder, il: int, n_rows: int) -> Tensor:
        hp, k = self._hp, self._hp.n_expert_used

        def put(tensor: Tensor, name: str) -> Tensor:
            place(self._block, tensor, self._offsets[name])
            return tensor

        x = put(b.leaf(F32, (hp.n_embd, n_rows), "x"), "x")
        ids = put(b.leaf(I32, (k, n_rows), "ids"), "ids")
        weights = put(b.leaf(F32, (1, k, n_rows), "weights"), "weights")
        rows = build_expert_rows(b, self._banks[il], x, ids, weights, il)
        return put(rows if self._as_rows else build_expert_sum(b, rows, il), "y")

    def compute(
        self, il: int, ids: npt.NDArray[np.int32], experts: Sequence[int], n_rows: int
    ) -> None:
        """Compute those of a pass's ids [n_rows * n_expert_used] that are in `experts` into 'y'."""
        at = self._offsets["ids"]
        mine = self._host.array[at : at + ids.nbytes].view(np.int32)
        mine[:] = np.where(np.isin(ids, experts), ids, -1)
        graph = self._graph(il, n_rows)
        status = C.mg_launch(self._cpu.compute.ptr, graph.graph, ffi.NULL, 0)
        self._cpu.check(status, f"the cold experts of layer {il}")

    def measure(self, n_experts: int, n_rows: int = 1, repeat: int = 6) -> float:
        """Return the seconds that n_experts cold experts take, all rows choosing them; a median."""
        rng, hp, samples = np.random.default_rng(n_experts), self._hp, []
        layers = sorted(self._banks)
        ids = np.full((n_rows, hp.n_expert_used), -1, dtype=np.int32)
        for at in range(repeat + 1):
            ids[:, :n_experts] = rng.permutation(hp.n_expert)[:n_experts]
            il = layers[(at * 7) % len(layers)]
            self._graph(il, n_rows)
            start = time.perf_counter()
            self.compute(il, ids.reshape(-1), ids[0, :n_experts], n_rows)
            samples.append(time.perf_counter() - start)
        return float(np.median(samples[1:]))

    def close(self) -> None:
        """Free graphs and host memory."""
        self._graphs.close()
        for handle in (*self._handles, self._block, self._host):
            handle.close()
        self._cpu.close()
