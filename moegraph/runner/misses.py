"""Carries out what `Residency` decides about missing experts: uploads, tables, CPU, graphs.

layered.py says what happens in a layer. Experts that the CPU computed and that the cache wants are
promoted: uploaded last on the same stream, resident in the next pass.

The device's slot tables are updated when the next pass begins. `measure_costs` measures at load
what an upload costs here, and what the CPU takes.

    compute: mixer_router(l) | moe(l) ... | slots | wait for event | add_uploaded(l) | next layer
    upload:                       experts ............... | event

Overwriting a victim's slot is safe: this pass did not choose the victim, and earlier passes have
finished, or the ids of this pass would not have arrived. Experts without a slot go through two
staging banks in turn, up to N_STAGING at a time. An upload into a bank waits for the event after
the last `add_uploaded` that read the bank.

`add_uploaded` gets its slots as an input. Their host copy may be rewritten once the ids of a later
layer have arrived: by then the device has read it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..experts.cache import ExpertCache
from ..experts.cachestats import ExpertStats
from ..experts.cost import MissCosts, choose_ways
from ..experts.hostlevel import HostLevel, Moves
from ..experts.residency import PassTerms, Remedy, Residency, TableRow
from ..ggml.device import Device
from ..ggml.handles import Owner
from ..ggml.lib import C, ffi
from ..graphs.cache import BuiltGraph
from ..kinds import Kind
from ..resident.bank import Bank
from ..resident.layout import N_STAGING, n_at_once
from ..resident.stage import Stage
from .cpu_experts import CpuExperts


class HostRows(Owner):
    """Pinned host rows to upload; array: I32, numpy shape [n_rows, n]. addresses: of the rows."""

    def __init__(self, device: Device, n_rows: int, n: int) -> None:
        self.host = self.own(device.host_buffer(4 * n_rows * n))
        self.array: npt.NDArray[np.int32] = self.host.array[: 4 * n_rows * n].view(np.int32)
        self.array = self.array.reshape(n_rows, n)
        self.addresses: list[Any] = [self.host.address(4 * row * n) for row in range(n_rows)]


class SlotTables(Owner):
    """Host copy of the cache's tables, and its upload to the device.

    A row holds a layer's slot table and, if the layer's graph fetches, its victim list. The host
    writes a row as soon as it knows of a change, mostly while the device computes.
    """

    def __init__(self, stage: Stage) -> None:
        self._first = stage.layers.start
        self._device, self._banks = stage.device, stage.banks
        stride = stage.banks.table_stride
        self._rows = self.own(HostRows(stage.device, len(stage.layers), stride))
        self._n_expert, self._n_victims = stage.hp.n_expert, stage.banks.n_victims
        # as on the device: the rows of full layers never change
        self._rows.array[:, : self._n_expert] = np.arange(self._n_expert)
        self._is_due = False

    def write(self, changed: TableRow) -> None:
        """Copy a layer's new row."""
        il, table, victims = changed
        row, n = self._rows.array[il - self._first], self._n_expert
        row[:n] = table
        if victims is not None:
            n_listed = n + 2 * len(victims)
            # several times faster than to assign the list
            row[n:n_listed] = np.fromiter(chain.from_iterable(victims), np.int32, 2 * len(victims))
            row[n_listed : n + 2 * self._n_victims] = -1  # a graph may read more than there are
        self._is_due = True

    def send(self) -> None:
        """Enqueue the upload of all rows, if any changed, after passes that read the old ones."""
        if self._is_due:
            # one copy for all rows: a small copy takes about 2 us, whatever its size
            self._device.send(self._banks.all_tables, self._rows.host, 0, self._rows.array.nbytes)
            self._is_due = False


Pairs = Sequence[tuple[int, int]]  # (expert, slot)
Ids = npt.NDArray[np.int32]


class Uploader(Owner):
    """Enqueues copies of experts, and the graphs that add them.

    n_bytes: bytes that crossed to the device, fetched by graphs too, summed.
    """

    def __init__(self, stage: Stage, cache: ExpertCache, max_ids: int) -> None:
        """Allocate host rows for passes of at most max_ids chosen ids."""
        self.level = HostLevel(cache, stage.store.n_held)
        own, device = self.own, stage.device
        self._device, self._banks, self._store = stage.device, stage.banks, stage.store
        self._n_expert, self.n_bytes = stage.hp.n_expert, 0
        # row 0: slots of the layer's own bank; one row for each wave through a staging bank
        self._slots = own(HostRows(device, 1 + -(-self._n_expert // N_STAGING), max_ids))
        self._uploaded = own(device.event())
        self._staging_free = [own(device.event()), own(device.event())]
        self._staging_turn = 0

    def send(self, il: int, bank: Bank, pairs: Pairs, may_stay: bool = False) -> None:
        """Enqueue copies of (expert, slot) pairs to a bank.

        may_stay: offer them to host memory. The experts that slots of the layer lose are offered.
        """
        upload, store, packing = self._device.upload.ptr, self._store, self._store.packing(il)
        memory, base = bank.to_fill, store.pinned(il)
        if base is None:
            self._send_from_file(il, bank, pairs, may_stay)
        else:
            both = np.array(pairs, dtype=np.int32)
            C.mg_upload_experts(
                upload, memory, base, packing.stride,
                ffi.cast("int32_t *", ffi.from_buffer(both)), len(pairs), packing.stride,
                packing.n_bytes, 1,
            )  # fmt: skip
        self.n_bytes += packing.n_bytes * len(pairs)

    def _send_from_file(self, il: int, bank: Bank, pairs: Pairs, may_stay: bool) -> None:
        upload, packing = self._device.upload.ptr, self._store.packing(il)
        ring, memory, is_own = self._store.ring, bank.to_fill, bank is self._banks.layer(il)
        n = n_at_once(packing.stride) if self.level.layers else N_STAGING
        try:
            for start in range(0, len(pairs), n):
                part = pairs[start : start + n]
                ring.copied()
                ring.ahead((il, e) for e, _ in pairs[start : start + 2 * n])
                others = [expert for expert, _ in part] if may_stay else []
                moves = self.level.move(il, part if is_own else (), others)
                self._carry_out(il, moves, bank)
                # what is in host memory goes while the others are read
                for expert, slot in sorted(part, key=lambda pair: not ring.holds(il, pair[0])):
                    found, at = ring.take(il, expert), slot * packing.stride
                    C.ggml_backend_tensor_set_async(upload, memory, found, at, packing.n_bytes)
                for expert in moves.moved:
                    ring.drop(il, expert)
        except BaseException:
            self._forget(il)
            raise
        finally:
            ring.copied()

    def _carry_out(self, il: int, moves: Moves, bank: Bank) -> None:
        """Begin what host memory has to do before experts go to a bank of their layer."""
        ring, packing = self._store.ring, self._store.packing(il)
        ring.wanted = {(il, expert) for expert in moves.kept}
        for expert in moves.left:
            ring.drop(il, expert)
        for expert, slot in moves.saved:
            ring.save(il, expert, bank.to_fill, slot * packing.stride, packing.n_bytes, False)

    def displace(self, il: int, kept: Pairs, experts: Sequence[int], group: Bank) -> None:
        """Offer to host memory what slots lose to a prompt's experts, and those without a slot.

        Call it before `kept` is copied to the slots on the stream of graphs. experts: those in the
        slots of a group of the ring.
        """
        if il not in self.level.layers:
            return
        ring, packing, own = self._store.ring, self._store.packing(il), self._banks.layer(il)
        slots = {expert for expert, _ in kept}
        self.level.begin(il)
        try:
            moves = self.level.move(il, kept, [e for e in experts if e not in slots])
            for expert in moves.left + moves.moved:
                ring.drop(il, expert)
            saved = [(expert, own, slot) for expert, slot in moves.saved]
            saved += [(expert, group, experts.index(expert)) for expert in moves.kept]
            for expert, bank, slot in saved:
                at = slot * packing.stride
                ring.save(il, expert, bank.to_fill, at, packing.n_bytes, True)
        except BaseException:
            self._forget(il)
            raise

    def _forget(self, il: int) -> None:
        """Drop what is read, and have the books of a layer agree with the ring."""
        ring = self._store.ring
        ring.forget()
        for expert in self.level.restore(il, ring.held(il)):
            ring.drop(il, expert)

    def fill_host(self, il: int) -> None:
        """Read into host memory the best experts of a layer that have no slot, and wait."""
        ring, keys = self._store.ring, [(il, e) for e in self.level.fill(il)]
        ring.wanted = set(keys)
        for at, key in enumerate(keys):
            if at % N_STAGING == 0:
                ring.copied()
                ring.ahead(keys[at : at + 3 * N_STAGING])
            ring.take(*key)
        ring.copied()
        self._store.report(len(keys) * self._store.packing(il).n_bytes)

    def fill(self, il: int, placed: Pairs) -> None:
        """Upload experts into slots of their layer and wait."""
        if placed:
            self.send(il, self._banks.layer(il), placed)
            self._device.synchronize()

    def promote(self, il: int, pairs: Pairs) -> None:
        """Upload experts into slots of their layer in the background, until `wait`."""
        self.send(il, self._banks.layer(il), pairs)
        if self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.upload.ptr)

    def wait(self) -> None:
        """Wait for the last uploads that `promote` enqueued."""
        if self._uploaded:
            self._uploaded.wait()

    def add(self, il: int, pairs: Pairs, ids: Ids, graph: BuiltGraph) -> None:
        """Upload experts into slots of their layer and launch `add_uploaded` over them.

        ids: I32 [n_tokens * n_expert_used], the pass's choice; -1 in rows that do not count.
        """
        self.send(il, self._banks.layer(il), pairs)
        self._launch(il, 0, pairs, ids, graph, ffi.NULL)

    def add_staged(
        self, il: int, experts: Sequence[int], ids: Ids, graphs: Mapping[str, BuiltGraph]
    ) -> None:
        """Upload experts to the staging banks in turn; launch the `add_uploaded` of each bank."""
        for wave, start in enumerate(range(0, len(experts), N_STAGING), 1):
            pairs = list(zip(experts[start : start + N_STAGING], range(N_STAGING)))
            turn, self._staging_turn = self._staging_turn, 1 - self._staging_turn
            event = self._staging_free[turn]
            free = event.ptr if event else ffi.NULL
            if event:  # the graph that read the bank last has ended
                C.ggml_backend_event_wait(self._device.upload.ptr, free)
            self.send(il, self._banks.staging(il, turn), pairs, may_stay=True)
            self._launch(il, wave, pairs, ids, graphs[f"staging{turn}"], free)

    def _launch(
        self, il: int, wave: int, pairs: Pairs, ids: Ids, graph: BuiltGraph, free: Any
    ) -> None:
        """Launch `add_uploaded` after the uploads; free: the event to record after it.

        wave: the host row that carries the slots.
        """
        slot_of = np.full(self._n_expert + 1, -1, dtype=np.int32)  # the last for ids of -1
        experts, slots = zip(*pairs)
        slot_of[list(experts)] = slots
        self._slots.array[wave, : ids.size] = slot_of[ids]
        uploaded = self._uploaded.ptr if self._uploaded else ffi.NULL
        status = C.mg_upload_launch(
            self._device.compute.ptr, self._device.upload.ptr, graph.outputs,
            self._slots.addresses[wave], 4 * ids.size, free, uploaded, graph.graph,
        )  # fmt: skip
        if status:
            self._device.check(status, f"the missing experts of layer {il}")

    def seconds(self, n_experts: int) -> float:
        """Return the seconds of uploading n experts to a staging bank, at most N_STAGING at a time.

        The least of six uploads is measured; what disturbs one adds time.
        """
        at_once, samples = min(n_experts, N_STAGING), []
        n_bytes, il = self.n_bytes, self._store.layers[0]
        for at in range(6):
            # each twice: the device reads a page more slowly the first time
            first = at % 3 * at_once % (self._n_expert - at_once + 1)
            pairs, start = [(first + i, i) for i in range(at_once)], time.perf_counter()
            self.send(il, self._banks.staging(il, 0), pairs)
            C.ggml_backend_synchronize(self._device.upload.ptr)
            samples.append(time.perf_counter() - start)
        self.n_bytes = n_bytes  # what is measured is not counted
        return min(samples) * n_experts / at_once


class MissHandler(Owner):
    """The means to compute missing experts, and the residency that decides about them.

    store: host memory of the experts of all layers that are not full. uploads: copies experts.
    tables: those of the device.
    cpu_experts: computes experts on the CPU; None when the device computes all. n_cpu_experts:
    experts computed on the CPU, summed over all layers and passes.
    """

    def __init__(
        self, stage: Stage, cache: ExpertCache, cpu_experts: CpuExperts | None, mode: str,
        max_rows: int,
    ) -> None:  # fmt: skip
        """Measure the machine and decide who computes; cache: its slots are filled.

        mode: the value of --miss. If the CPU should compute nothing, this frees cpu_experts.
        """
        self._device, self.store = stage.device, stage.store
        n_expert, n_used = cache.n_expert, cache.n_expert_used
        self.tables = self.own(SlotTables(stage))
        self.uploads = self.own(Uploader(stage, cache, max_rows * n_used))
        costs = measure_costs(self.uploads, cpu_experts, mode, n_used)
        ways = choose_ways(mode, costs, cache.n_slots, n_used, n_expert)
        if cpu_experts and not ways.cpu:
            cpu_experts.close()
        self.cpu_experts = self.own(cpu_experts if ways.cpu else None)
        self.residency = Residency(cache, ways, fetchable=self.store.rows)
        self.n_cpu_experts = 0

    def stats(self, phases_s: dict[str, float]) -> ExpertStats:
        """Return all counters; phases_s: the runner's seconds."""
        residency, ring = self.residency, self.store.ring
        return ExpertStats(
            residency.cache.stats,
            self.uploads.n_bytes,
            self.n_cpu_experts,
            len(residency.miss_mode(Kind.DECODE, 1).fetch_layers),
            phases_s,
            ring.n_read_bytes,
            ring.waited_s,
        )

    def begin_pass(self, terms: PassTerms) -> None:
        """Wait for promoted experts, and send changed tables.

        The last pass must have finished, so that no host row and no slot is in use.
        """
        if terms.waits:
            self.uploads.wait()
        for row in terms.rows:
            self.tables.write(row)
        self.tables.send()

    def fetched(self, il: int, experts: list[int], row: TableRow | None) -> None:
        """Count what the graph of a layer fetched; note the layer's changed table row, if any."""
        if experts:
            self.uploads.n_bytes += self.store.packing(il).n_bytes * len(experts)
        if row:
            self.tables.write(row)

    def carry_out(
        self, il: int, remedy: Remedy, ids: Ids, n_tokens: int, graphs: Mapping[str, BuiltGraph]
    ) -> float:
        """Upload or compute the missing experts of a layer, and launch the graphs that add them.

        ids: I32 [n_tokens * n_expert_used], the pass's choice. graphs: see `LaunchStep`. Return the
        seconds that the CPU computed.
        """
        uploads, cpu, seconds = self.uploads, self.cpu_experts, 0.0
        begin = time.perf_counter()
        if remedy.on_cpu:
            if cpu is None:
                raise InternalError(f"layer {il}: there is nothing that computes on the CPU")
            cpu.begin(il, ids, remedy.on_cpu, n_tokens)  # its threads compute from now on
        uploads.level.begin(il, [*remedy.staged, *(e for e, _ in remedy.admitted)])
        if remedy.admitted:
            uploads.add(il, remedy.admitted, ids, graphs["own"])
        if remedy.staged:
            uploads.add_staged(il, remedy.staged, ids, graphs)
        if cpu and remedy.on_cpu:
            cpu.end()
            seconds = time.perf_counter() - begin
            self._add_from_cpu(il, cpu, graphs["cpu"])
            self.n_cpu_experts += len(remedy.on_cpu)
        if remedy.promoted:
            uploads.promote(il, remedy.promoted)
        return seconds

    def _add_from_cpu(self, il: int, cpu: CpuExperts, graph: BuiltGraph) -> None:
        compute, y = self._device.compute.ptr, graph.outputs
        C.ggml_backend_tensor_set_async(compute, y, cpu.address("y"), 0, C.ggml_nbytes(y))
        status = C.mg_launch(compute, graph.graph, ffi.NULL, 0)
        if status:
            self._device.check(status, f"the experts of layer {il} on the CPU")

    def close(self) -> None:
        """Wait for the device, then free events and tables."""
        self._device.synchronize()
        super().close()


# Rows of an expert that the CPU computes for the cost of a further row: a missing expert has few.
_ROWS = 4


def measure_costs(
    uploads: Uploader, cpu_experts: CpuExperts | None, mode: str, n_used: int
) -> MissCosts:
    """Measure what the value of --miss needs to know.

    n_used: experts that a row chooses.
    """
    if cpu_experts is None or mode != "auto":
        return MissCosts()
    on_cpu = [0.0] + [cpu_experts.measure(n) for n in range(1, n_used + 1)]
    streamed = [0.0] + [uploads.seconds(n) for n in range(1, n_used + 1)]
    more = cpu_experts.measure(n_used, _ROWS) / on_cpu[n_used] - 1.0
    per_row = more / (_ROWS - 1)
    return MissCosts(tuple(on_cpu), tuple(streamed), max(per_row, 0.0))
