"""The cache of built graphs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from ..arch.blocks.length import Span, set_length
from ..errors import OutOfDeviceMemory, UnsupportedModel
from ..ggml.device import Device
from ..ggml.handles import Context, GraphAllocator
from ..ggml.lib import C, ffi, last_error
from ..ggml.ops import Builder, name_of, shape
from ..resident.layout import CAPTURED_NODE_BYTES, GRAPH_BYTES, RECORDED_NODE_BYTES
from ..units import format_bytes


class BuiltGraph:
    """A graph whose tensors have memory; it can be launched any number of times.

    outputs: what the build function returned, such as tensors to read or inputs to set. n_bytes:
    its host memory, that of records included. n_device_bytes: about what the device keeps once it
    has captured the graph. key: in its cache.
    """

    def __init__(
        self, key: Hashable, context: Context, graph: Any, outputs: Any, spans: list[Span],
        is_recorded: bool,
    ) -> None:  # fmt: skip
        self.key = key
        self.context = context
        self.graph = graph
        self.outputs = outputs
        self._spans = spans
        self._n_kv = 0
        n_nodes = C.ggml_graph_n_nodes(graph)
        self.n_bytes = C.ggml_used_mem(context.ptr) + is_recorded * n_nodes * RECORDED_NODE_BYTES
        self.n_device_bytes = n_nodes * CAPTURED_NODE_BYTES

    def set_length(self, n_kv: int) -> None:
        """Have attention read n_kv positions, at most as many as the graph was built for.

        The device must not have recorded the graph, nor be running it.
        """
        if self._spans and n_kv != self._n_kv:
            set_length(self._spans, n_kv)
            self._n_kv = n_kv


class GraphCache:
    """Built graphs by key; drops the least recently used ones.

    All graphs share one block for intermediates: they run one after another on one stream, and
    tensors that must outlive a graph are in fixed memory. If a larger graph makes the block move,
    all earlier graphs are stale: the cache drops them and `generation` changes. n_built, n_dropped:
    graphs that were built, and that were dropped to save memory, so far. n_host_bytes: their size.
    n_device_bytes: what they take of the device once it has captured them all; it captures a graph
    when it is launched a second time. max_device_bytes: most of that. CUDA would keep what it
    captured for ten seconds after the last use, so it is told to forget what is dropped.
    """

    def __init__(self, device: Device, max_bytes: int = GRAPH_BYTES) -> None:
        """max_bytes: most host memory of all graphs; those of a pass take 3 MiB with a 35B."""
        self._device, self._max_bytes = device, max_bytes
        self.max_device_bytes: float = math.inf
        self._allocator = GraphAllocator(device.buft, device.compute)
        self._graphs: OrderedDict[Hashable, BuiltGraph] = OrderedDict()
        self.n_host_bytes = self.n_device_bytes = 0
        self.generation = self.n_built = self.n_dropped = 0

    @property
    def n_bytes(self) -> int:
        """Device bytes of the shared block."""
        return self._allocator.size

    @property
    def is_half_full(self) -> bool:
        """Whether the graphs take half of the memory that they may take."""
        is_half = 2 * self.n_host_bytes > self._max_bytes
        return is_half or 2 * self.n_device_bytes > self.max_device_bytes

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Hashable, n_nodes: int, build: Callable[[Builder], Any]) -> BuiltGraph:
        """Return the graph of a key; build it if it is not in the cache.

        n_nodes: upper bound on the nodes of the graph, and on its leaves.
        """
        found = self._graphs.get(key)
        if found is not None:
            self._graphs.move_to_end(key)
            return found
        # room for nodes, leaves, and the views that mg_graph_alloc adds
        context = Context(4 * n_nodes, 2 * n_nodes)
        builder = Builder(context, n_nodes)
        outputs = build(builder)
        if self._device.is_invariant:
            C.moegraph_keep_rows_apart(builder.graph)
        _check_supported(self._device, builder.graph)
        self._allocate(context, builder.graph)
        is_recorded = self._device.can.streams
        built = BuiltGraph(key, context, builder.graph, outputs, builder.spans, is_recorded)
        self._graphs[key] = built
        self.n_built += 1
        self.n_host_bytes += built.n_bytes
        self.n_device_bytes += built.n_device_bytes
        self._shrink()
        return built

    def launch(self, built: BuiltGraph, what: str, reads: Any = ffi.NULL, n_reads: int = 0) -> None:
        """Enqueue a graph and copies of its results. what: it computes, for errors."""
        status = C.mg_launch(self._device.compute.ptr, built.graph, reads, n_reads)
        if status:
            self._device.check(status, what)

    def used(self, graphs: Iterable[BuiltGraph]) -> None:
        """Note that a caller launches graphs again that it kept; what was dropped stays dropped."""
        for built in graphs:
            if self._graphs.get(built.key) is built:
                self._graphs.move_to_end(built.key)

    def _shrink(self) -> None:
        """Drop the least recently used graphs, but never the newest, until the rest fit."""
        while len(self._graphs) > 1 and (
            self.n_host_bytes > self._max_bytes or self.n_device_bytes > self.max_device_bytes
        ):
            _, oldest = self._graphs.popitem(last=False)
            self._forget([oldest])
            self.n_host_bytes -= oldest.n_bytes
            self.n_device_bytes -= oldest.n_device_bytes
            self.n_dropped += 1

    def _forget(self, graphs: Iterable[BuiltGraph]) -> None:
        """Have the device free what it keeps of graphs; it may still be running them."""
        if self._device.compute.is_closed:
            return
        for built in graphs:
            C.mg_graph_forget(self._device.compute.ptr, built.graph)

    def _allocate(self, context: Context, graph: Any) -> None:
        """Assign memory to a graph; drop all other graphs if the block moved.

        The other graphs are out of the cache until the allocator has returned, so an interrupt
        cannot leave graphs there that have addresses of the old block.
        """
        kept = self.n_host_bytes, self.n_device_bytes, self._graphs, self.generation
        before, others = self._allocator.size, self._graphs.values()
        self._graphs = OrderedDict()
        self.clear()
        ok = C.mg_graph_alloc(self._allocator.ptr, self._device.compute.ptr, context.ptr, graph)
        if ok and self._allocator.size == before:
            self.n_host_bytes, self.n_device_bytes, self._graphs, self.generation = kept
            return
        self._forget(others)
        if not ok:
            detail = last_error()
            raise OutOfDeviceMemory(
                f"{self._device.name} cannot hold the intermediates of a pass "
                f"({format_bytes(self._device.memory()[0])} free; {detail}); lower -ub or -c"
            )

    def clear(self) -> None:
        """Drop all graphs and change `generation`; callers must get their graphs again."""
        self._forget(self._graphs.values())
        self._graphs.clear()
        self.n_host_bytes = self.n_device_bytes = 0
        self.generation += 1

    def close(self) -> None:
        """Free the graphs and the shared block."""
        self.clear()
        self._allocator.close()


def _check_supported(device: Device, graph: Any) -> None:
    node = C.mg_graph_unsupported(device.compute.ptr, graph)
    if node != ffi.NULL:
        op = ffi.string(C.ggml_op_desc(node)).decode()
        operands = ", ".join(
            f"{ffi.string(C.ggml_type_name(s.type)).decode()}{list(shape(s))}"
            for s in (node.src[j] for j in range(3))
            if s != ffi.NULL
        )
        raise UnsupportedModel(
            f"{device.name} cannot compute {name_of(node)}: no {op} for {operands}; "
            "use --device cpu"
        )
