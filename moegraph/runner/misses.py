"""Carries out what `Residency` decides about missing experts: uploads, tables, CPU, graphs.

In a pass of up to 32 rows, the graph of a layer can fetch its missing experts, if they are in
pinned memory: they go into the slots of the victims that `Residency.begin_pass` chose. The host
reads the ids later and records what the graph did. If there were too few victims, the rest goes
through staging.

Otherwise the expert FFN of layer l runs without the missing experts. Meanwhile the host uploads
them (upload.py), or the CPU computes them (cpu_experts.py), and the graphs `add_uploaded` and
`add_cpu` add them. Experts that the CPU computed and that the cache wants are promoted: uploaded
last on the same stream, resident in the next pass.

The device's slot tables are updated when the next pass begins. `measure_costs` measures at load
what an upload costs here, and what the CPU takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import InternalError
from ..experts.cache import ExpertCache
from ..experts.cachestats import ExpertStats
from ..experts.cost import MissCosts, choose_ways
from ..experts.passplan import LayerPlan, PassPlan, TableRow
from ..experts.policy import few_slots_warning
from ..experts.residency import Residency
from ..ggml.lib import C, ffi
from ..graphs.cache import BuiltGraph
from ..kinds import Kind
from ..resident.layout import N_STAGING
from ..resident.stage import Stage
from .cpu_experts import CpuExperts
from .upload import Ids, SlotTables, Uploader


@dataclass(frozen=True)
class AddGraphs:
    """The graphs that add what `moe` of a layer left out.

    staging: `add_uploaded` of both staging banks. own: that of the layer's own bank, if missing
    experts may get its slots. cpu: `add_cpu`, if the CPU may compute.
    """

    staging: tuple[BuiltGraph, BuiltGraph]
    own: BuiltGraph | None = None
    cpu: BuiltGraph | None = None


class MissHandler:
    """The means to compute missing experts, and the residency that decides about them.

    store: host memory of the experts of all layers that are not full. uploads: copies experts; link
    measures them. cpu_experts: computes experts on the CPU; None when the device computes all.
    n_cpu_experts: experts computed on the CPU, summed over all layers and passes.
    """

    def __init__(
        self,
        stage: Stage,
        cache: ExpertCache,
        cpu_experts: CpuExperts | None,
        mode: str,
        max_rows: int,
        guarded: bool = True,
    ) -> None:
        """Measure the machine and decide who computes; cache: its slots are filled.

        mode: the value of --miss. If the CPU should compute nothing, this frees cpu_experts.
        """
        self._device, self.store = stage.device, stage.store
        n_expert, n_used = cache.n_expert, cache.n_expert_used
        self._tables = SlotTables(stage)
        self.uploads = Uploader(stage, max_rows * n_used)
        self.link = LinkTimer(stage, self.uploads)
        costs = measure_costs(self.link, cpu_experts, mode, n_used, guarded and bool(cache.partial))
        ways = choose_ways(mode, costs, cache.n_slots, n_used, n_expert)
        if cpu_experts and not ways.cpu:
            cpu_experts.close()
        self.cpu_experts = cpu_experts if ways.cpu else None
        self.residency = Residency(
            cache,
            ways,
            fetchable=self.store.rows,
            move_s=costs.move_s,
        )
        self.n_cpu_experts = 0
        self._n_fetched_bytes = 0

    @property
    def warnings(self) -> list[str]:
        """One line each, or '', about memory that could not be pinned and about too few slots."""
        cache = self.residency.cache
        return [self.store.warning, few_slots_warning(cache.n_slots, cache.n_expert_used)]

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that hold copies of experts."""
        return self.store.pinned_bytes

    @property
    def n_bytes_to_device(self) -> int:
        """Expert bytes that crossed to the device, uploaded or fetched."""
        return self.uploads.n_bytes + self._n_fetched_bytes

    @property
    def sent(self) -> tuple[int, int, int]:
        """Bytes uploaded and fetched, and experts computed on the CPU; set to count anew."""
        return self.uploads.n_bytes, self._n_fetched_bytes, self.n_cpu_experts

    @sent.setter
    def sent(self, counted: tuple[int, int, int]) -> None:
        self.uploads.n_bytes, self._n_fetched_bytes, self.n_cpu_experts = counted

    def stats(self, phases_s: dict[str, float]) -> ExpertStats:
        """Return all counters; phases_s: the runner's seconds."""
        residency = self.residency
        return ExpertStats(
            residency.cache.stats,
            self.n_bytes_to_device,
            self.n_cpu_experts,
            len(residency.miss_mode(Kind.DECODE, 1).fetch_layers),
            phases_s,
            residency.guard.report() if residency.guard else None,
        )

    def begin_pass(self, plan: PassPlan) -> None:
        """Upload what the plan exchanges, wait for promoted experts, and send changed tables.

        The last pass must have finished, so that no host row and no slot is in use.
        """
        if plan.exchanged:
            self.uploads.exchange(plan.exchanged)
        if plan.waits:
            self.uploads.wait()
        for row in plan.rows:
            self._tables.write(row)
        self._tables.send()

    def fetched(self, il: int, experts: list[int], row: TableRow | None) -> None:
        """Count what the graph of a layer fetched; note the layer's changed table row, if any."""
        if experts:
            self._n_fetched_bytes += self.store.packing(il).n_bytes * len(experts)
        if row:
            self._tables.write(row)

    def end_launch(self) -> None:
        """Send changed tables; the whole pass is enqueued and all its ids have been read."""
        self._tables.send()

    def carry_out(
        self, il: int, plan: LayerPlan, ids: Ids, n_tokens: int, graphs: AddGraphs
    ) -> None:
        """Upload or compute the missing experts of a layer, and launch the graphs that add them.

        ids: I32 [n_tokens * n_expert_used], the pass's choice in layer il.
        """
        uploads, cpu = self.uploads, self.cpu_experts
        if plan.on_cpu:
            if cpu is None:
                raise InternalError(f"layer {il}: there is nothing that computes on the CPU")
            cpu.begin(il, ids, plan.on_cpu, n_tokens)  # its threads compute from now on
        if plan.admitted:
            uploads.add(il, plan.admitted, ids, _planned(graphs.own, il))
        if plan.staged:
            uploads.add_staged(il, plan.staged, ids, graphs.staging)
        if cpu and plan.on_cpu:
            self._add_from_cpu(il, cpu, _planned(graphs.cpu, il))
            self.n_cpu_experts += len(plan.on_cpu)
        if plan.promoted:
            uploads.promote(il, plan.promoted)

    def _add_from_cpu(self, il: int, cpu: CpuExperts, graph: BuiltGraph) -> None:
        """Have the device add what the CPU has begun to compute."""
        cpu.end()
        compute, y = self._device.compute.ptr, graph.outputs
        C.ggml_backend_tensor_set_async(compute, y, cpu.address("y"), 0, C.ggml_nbytes(y))
        status = C.mg_launch(compute, graph.graph, ffi.NULL, 0)
        if status:
            self._device.check(status, f"the experts of layer {il} on the CPU")

    def close(self) -> None:
        """Free events and tables."""
        self._device.synchronize()
        for part in (self.cpu_experts, self._tables, self.uploads):
            if part:
                part.close()


def _planned(graph: BuiltGraph | None, il: int) -> BuiltGraph:
    """Return a graph that the launch plan must have, as the layer plan needs it."""
    if graph is None:
        raise InternalError(f"layer {il}: the launch plan lacks a graph that the layer plan needs")
    return graph


# Rows of an expert that the CPU computes for the cost of a further row: a missing expert has few.
_ROWS = 4


class LinkTimer:
    """Measures uploads to a staging bank; each number of experts once."""

    def __init__(self, stage: Stage, upload: Uploader) -> None:
        self._stage, self.uploads = stage, upload
        self._measured: dict[int, float] = {}

    def seconds(self, n_experts: int) -> float:
        """Return the seconds of uploading n experts, at most N_STAGING at a time."""
        at_once = min(n_experts, N_STAGING)
        return self._at_once(at_once) * n_experts / at_once

    def _at_once(self, n_experts: int) -> float:
        """Return the least of six uploads of n_experts experts; what disturbs one adds time."""
        if n_experts in self._measured:
            return self._measured[n_experts]
        stage, samples, n_bytes = self._stage, [], self.uploads.n_bytes
        il = stage.store.layers[0]
        bank = stage.banks.staging(il, 0)
        for at in range(6):
            # each twice: the device reads a page more slowly the first time
            first = at % 3 * n_experts % (stage.hp.n_expert - n_experts + 1)
            start = time.perf_counter()
            self.uploads.send(il, bank, [(first + i, i) for i in range(n_experts)])
            C.ggml_backend_synchronize(stage.device.upload.ptr)
            samples.append(time.perf_counter() - start)
        self.uploads.n_bytes = n_bytes  # what is measured is not counted
        self._measured[n_experts] = min(samples)
        return self._measured[n_experts]


def measure_costs(
    link: LinkTimer, cpu_experts: CpuExperts | None, mode: str, n_used: int, guarded: bool
) -> MissCosts:
    """Measure what the value of --miss, and the guard, need to know.

    n_used: experts that a row chooses.
    """
    move_s = link.seconds(1) if guarded else None
    if cpu_experts is None or mode != "auto":
        return MissCosts(move_s=move_s)
    on_cpu = [0.0] + [cpu_experts.measure(n) for n in range(1, n_used + 1)]
    streamed = [0.0] + [link.seconds(n) for n in range(1, n_used + 1)]
    more = cpu_experts.measure(n_used, _ROWS) / on_cpu[n_used] - 1.0
    per_row = more / (_ROWS - 1)
    return MissCosts(tuple(on_cpu), tuple(streamed), max(per_row, 0.0), move_s)
