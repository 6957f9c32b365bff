"""Small graphs on a device, run one by one and timed, for tests of single kernels."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, Builder, Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

Array = npt.NDArray[np.float32]


class Graph:
    """A graph under construction, with the data of its leaves."""

    def __init__(self) -> None:
        self.b = Builder(Context(8192, 8192), 8192)
        self._weights = Builder(Context(1024, 16), 16)
        self._leaves: list[tuple[Tensor, bytes]] = []

    def leaf(self, data: npt.NDArray[Any], dtype: int = F32) -> Tensor:
        """Make a leaf that holds an array of numpy shape (ggml's reversed)."""
        return self._leaf(self.b, dtype, data.shape[::-1], data)

    def weight(self, data: npt.NDArray[Any], dtype: int = F32) -> Tensor:
        """Make a leaf in memory marked as weights, which may be loaded early."""
        return self._leaf(self._weights, dtype, data.shape[::-1], data)

    def matrix(self, kind: str, rng: np.random.Generator, *ne: int) -> Tensor:
        """Make a weight with random quantized blocks, extents in ggml order."""
        block = TYPES[kind]
        return self.blocks(kind, block.fill(rng, math.prod(ne) // block.n_elem, 0.5), *ne)

    def blocks(self, kind: str, data: npt.NDArray[Any], *ne: int) -> Tensor:
        """Make a weight of given quantized blocks, extents in ggml order."""
        return self._leaf(self._weights, TYPES[kind].ggml_id, ne, data)

    def _leaf(
        self, place: Builder, dtype: int, ne: tuple[int, ...], data: npt.NDArray[Any]
    ) -> Tensor:
        tensor = place.leaf(dtype, ne, "x")
        self._leaves.append((tensor, np.ascontiguousarray(data).tobytes()))
        return tensor

    def run(
        self, device: Device, outputs: list[Tensor], repeat: int = 1
    ) -> tuple[list[Array], float]:
        """Compute; return the outputs as flat arrays and the median seconds of a run.

        The third run and later ones replay a captured graph.
        """
        with self.launches(device, outputs) as launch:
            runs = [launch() for _ in range(repeat)]
        return runs[-1][0], statistics.median(seconds for _, seconds in runs)

    @contextmanager
    def launches(
        self, device: Device, outputs: list[Tensor]
    ) -> Iterator[Callable[[], tuple[list[Array], float]]]:
        """Give the tensors memory; yield what computes once: flat outputs and seconds."""
        for tensor in outputs:
            self.b.expand(tensor)

        def launch() -> tuple[list[Array], float]:
            self._fill()
            device.synchronize()
            begin = time.perf_counter()
            device.check(C.mg_launch(device.compute.ptr, self.b.graph, ffi.NULL, 0), "graph")
            device.synchronize()
            seconds, found = time.perf_counter() - begin, []
            for tensor in outputs:
                out = np.empty(C.ggml_nbytes(tensor) // 4, np.float32)
                C.ggml_backend_tensor_get(tensor, ffi.from_buffer(out), 0, out.nbytes)
                found.append(out)
            return found, seconds

        with ExitStack() as stack:
            self._allocate(device, stack)
            # a later graph may have its addresses, and a captured one would run for it
            stack.callback(C.mg_graph_forget, device.compute.ptr, self.b.graph)
            yield launch

    def replace(self, leaf: Tensor, data: npt.NDArray[Any]) -> None:
        """Change the data of a leaf; later runs compute with it."""
        self._leaves = [(t, data.tobytes() if t == leaf else old) for t, old in self._leaves]

    def _allocate(self, device: Device, stack: ExitStack) -> None:
        """Give every tensor memory of its own: the device may reorder and fuse."""
        stack.enter_context(self.b.context)
        stack.enter_context(self.place_weights(device))
        ptr = C.ggml_backend_alloc_ctx_tensors_from_buft(self.b.context.ptr, device.buft)
        stack.enter_context(Buffer(ptr))

    @contextmanager
    def place_weights(self, device: Device) -> Iterator[None]:
        """Give the weights memory that is marked as such."""
        self.weight(np.zeros(1, np.float32))  # there is one at least
        with self._weights.context as context:
            ptr = C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)
            with Buffer(ptr):
                C.ggml_backend_buffer_set_usage(ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
                yield

    def _fill(self) -> None:
        """Fill the leaves, and the results with NaN: those of the last run would hide a race."""
        for i in range(C.ggml_graph_n_nodes(self.b.graph)):
            node: Any = C.ggml_graph_node(self.b.graph, i)
            if node.view_src == ffi.NULL:
                C.ggml_backend_tensor_memset(node, 0xFF, 0, C.ggml_nbytes(node))
        for tensor, data in self._leaves:
            C.ggml_backend_tensor_set(tensor, data, 0, len(data))


def nmse(got: Array, expected: npt.NDArray[Any]) -> float:
    """Return the squared error relative to the expected values."""
    expected = expected.reshape(-1).astype(np.float64)
    return float(((got - expected) ** 2).sum() / (expected**2).sum())


def random(seed: int, *shape: int) -> Array:
    """Return normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
