"""What sweeps of one runner share: memory, graphs, events, and the means to send experts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PassShape
from ..experts.crossing import Group, padded
from ..experts.residency import Residency
from ..ggml.handles import Context, Event
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32, Tensor
from ..graphs.cache import GraphCache
from ..graphs.chunk import Segment
from ..graphs.hidden import HiddenRows
from ..resident.bank import Ring
from ..resident.layout import N_GROUPS, PAGE, group_size
from ..resident.stage import Stage
from .layer_graphs import CarryBuffers, LayerGraphs
from .misses import MissHandler
from .results import ResultMemory
from .sweep_graphs import SweepGraphs, SweepMemory

# Steps that may be enqueued ahead of the device.
MAX_AHEAD = 8
Observer = Callable[[int, npt.NDArray[np.int32]], None]
PHASES = ("build", "launch", "wait", "resolve")


class Sweeps:
    """The parts of a runner that its sweeps use, one sweep at a time.

    memory: for the rows of a sweep. graphs: builds graphs. ring: None if no expert can be missing.
    sums_last: see `LayerGraphs`. phases: host seconds: building graphs and copies before a launch,
    launching, waiting for the device, and handling missing experts.
    routed, layer_done, paces: events after the choice of a chunk, after a layer, after a step.
    """

    def __init__(
        self,
        stage: Stage,
        graphs: GraphCache,
        results: ResultMemory,
        max_rows: int,
        n_rows: int,
        hidden: HiddenRows | None = None,
        residency: Residency | None = None,
        misses: MissHandler | None = None,
        layer_graphs: LayerGraphs | None = None,
        sums_last: bool = False,
        observers: list[Observer] | None = None,
        ring_groups: int = 0,
    ) -> None:
        """hidden: rows between graphs that the runner has anyway; None: allocate them.

        ring_groups: groups of the ring; 0: as few as make sense.
        """
        self.stage, self.device, self.results = stage, stage.device, results
        self.residency, self.misses, self.sums_last = residency, misses, sums_last
        self.observers = observers if observers is not None else []
        self.phases = dict.fromkeys(PHASES, 0.0)
        device = stage.device
        n_each = group_size(stage.hp.n_expert)
        n_groups = ring_groups or N_GROUPS
        self.ring = None if stage.is_full else Ring(device, stage.store, n_groups, n_each)
        rows = hidden or HiddenRows(stage, max_rows)
        self._own_hidden = None if hidden else rows
        self.memory = SweepMemory(stage, max_rows, n_rows, self.ring is not None, sums_last)
        self.graphs = SweepGraphs(
            stage, graphs, rows, self.memory, self.ring, layer_graphs, sums_last,
            residency is not None,
        )  # fmt: skip
        self.routed = [device.event(), device.event()]
        self.layer_done = [device.event(), device.event()]
        self.paces = [device.event() for _ in range(MAX_AHEAD)]
        n_events = n_groups if self.ring else 0
        self._ring_events = [(device.event(), device.event()) for _ in range(n_events)]
        self._carried = {"l_out": rows.all}
        self._context = Context(8)
        if layer_graphs:
            self._carried |= self._carry_tensors(layer_graphs.carry, max_rows)

    def _carry_tensors(self, carry: CarryBuffers, max_rows: int) -> dict[str, Tensor]:
        """Return tensors for the carry buffers, to copy rows from and to."""
        hp = self.stage.hp
        widths = {"residual": hp.n_embd, "post_norm": hp.n_embd}
        rows = dict.fromkeys(widths, max_rows)
        widths |= {"weights": 1, "expert_rows": hp.n_embd}
        rows |= dict.fromkeys(("weights", "expert_rows"), max_rows * hp.n_expert_used)
        found: dict[str, Tensor] = {}
        for name in carry.offsets:
            if name in widths:
                tensor = C.ggml_new_tensor_2d(self._context.ptr, F32, widths[name], rows[name])
                place(carry.buffer, tensor, carry.offsets[name])
                found[name] = tensor
        return found

    def carried(self, name: str) -> Tensor:
        """Return a carry buffer as F32 [n_embd, rows], or [1, n_used * rows] for weights."""
        return self._carried[name]

    @property
    def n_bytes(self) -> int:
        """Device bytes of this memory, without the ring, which counts as weights."""
        own = self._own_hidden.n_bytes if self._own_hidden else 0
        return self.memory.n_bytes + own

    def ring_events(self, group: int) -> tuple[Event | None, Event | None]:
        """Return the events of a group: all that read it is done; all uploads to it are done."""
        return self._ring_events[group]

    def cache_table(self, il: int) -> npt.NDArray[np.int32]:
        """Return the slots of layer il's experts as the device knows them, I32 numpy [n_expert]."""
        if self.residency is None:
            return np.arange(self.stage.hp.n_expert, dtype=np.int32)
        table: npt.NDArray[np.int32] = self.residency.cache.tables[il]
        return table

    def slots_of(self, group: Group, n_expert: int) -> npt.NDArray[np.int32]:
        """Return the slots of a group's experts in the group: I32 numpy [n_expert], else -1."""
        slots = np.full(n_expert, -1, dtype=np.int32)
        slots[group.experts] = np.arange(len(group.experts))
        return slots

    def send(self, il: int, group: int, pairs: list[tuple[int, int]]) -> None:
        """Enqueue uploads of (expert, slot in the group)."""
        if self.misses and self.ring:
            self.misses.uploads.send(il, self.ring.bank(il, group), pairs)

    def keep(self, il: int, group: Group, slot_of: Mapping[int, int]) -> None:
        """Copy experts of a group into slots of their layer, on the device.

        slot_of: expert -> slot. The slots' last readers and the next ones are on the same stream.
        """
        kept = [(expert, slot_of[expert]) for expert in group.experts if expert in slot_of]
        if not kept or self.residency is None or self.misses is None or self.ring is None:
            return
        self.residency.keep(il, kept)
        packing, stream = self.misses.store.packing(il), self.device.compute.ptr
        source, to = self.ring.bank(il, group.index).to_fill, self.stage.banks.layer(il).to_fill
        for expert, slot in kept:
            at, to_at = (packing.stride * n for n in (group.experts.index(expert), slot))
            C.mg_copy_bytes(stream, source, at, to, to_at, packing.n_bytes)

    def read_ahead(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Begin to read experts (layer, expert) that will be sent soon, unless they are pinned."""
        if self.misses:
            self.misses.store.ahead(wanted)

    def record(self, il: int, ids: npt.NDArray[np.int32]) -> None:
        """Record the choice of all rows in layer il."""
        if self.residency is not None:
            self.residency.routed(il, ids)
        for observer in self.observers:
            observer(il, ids)

    def spent(self, phase: str, start: float) -> float:
        """Add the time since start to a phase; return the time now."""
        now = time.perf_counter()
        self.phases[phase] += now - start
        return now

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Return whether there is memory for such a chunk, rounded up."""
        inputs, n = self.memory.inputs, sum(segment.n for segment in segments)
        if n > self.memory.max_rows or max(one.end for one in segments) > self.stage.state.n_ctx:
            return False
        return inputs.fits(segments, True)

    def build_chunk(self, il: int, n: int, shape: PassShape) -> None:
        """Build the graphs of a chunk of n rows in a layer, if they are not built.

        shape: of the rectangle of the chunk.
        """
        if self.stage.banks.n_slots[il] == self.stage.hp.n_expert:
            self.graphs.layer(il, n, shape)
        else:
            self.graphs.mixer(il, n, shape)
            self.graphs.experts(il, n)

    def reserve(self) -> None:
        """Build the largest graphs, so that the shared block never grows later."""
        hp, n, banks = self.stage.hp, self.memory.max_rows, self.stage.banks
        state = self.stage.state
        shapes = [PassShape(n, 1, self.memory.inputs.n_kv(state.n_ctx), 0)]
        if state.n_seq > 1:  # rows rounded up, and rows of several sequences
            shapes.append(shapes[0]._replace(is_ragged=True))
            if n > 1 and state.n_ctx >= 2 * PAGE:
                n_kv = self.memory.inputs.n_kv(state.n_ctx // 2)
                shapes.append(PassShape(n // 2, 2, n_kv, 0, is_ragged=True))
        seen = set()
        for il in self.stage.layers:
            full = banks.n_slots[il] == hp.n_expert
            kind = hp.layer(il), full, self.ring and not full and self.ring.kind(il)
            if kind in seen:
                continue
            seen.add(kind)
            for shape in shapes:
                if full:
                    self.graphs.layer(il, n, shape)
                else:
                    self.graphs.mixer(il, n, shape)
            if full:
                continue
            self.graphs.experts(il, n)
            self.graphs.sum_rows(il, n)
            self.graphs.unit(il, 0, padded(self.memory.most - 1))

    def close(self) -> None:
        """Free all memory and events."""
        events = [*self.routed, *self.layer_done, *self.paces]
        parts: list[Any] = [*events, *(e for pair in self._ring_events for e in pair)]
        for part in (*parts, self.memory, self._own_hidden, self.ring, self._context):
            if part:
                part.close()
