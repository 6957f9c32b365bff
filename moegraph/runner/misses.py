"""Handles experts that a pass needs and the device does not hold.

In a pass of one row, the graph of a layer can fetch its missing experts, if they are in pinned
memory: they go into the slots of the victims that the host chose before the pass (`plan_victims`).
The host reads the ids later and updates its tables (`commit_fetched`).

Otherwise the expert FFN of layer l runs without the missing experts. Meanwhile the host uploads
them, and the graph `add_uploaded` adds them:

    compute: mixer_router(l) | moe(l) ... | slots | wait for event | add_uploaded(l) | next layer
    upload:                       experts ............... | event
    host:            reads ids, picks slots

If the cache admits an expert, it gets a slot of its layer. Overwriting the victim is safe: this
pass did not choose it, and earlier passes have finished, or these ids would not have arrived.
Declined experts go through two staging banks in turn, up to N_STAGING at a time. An upload into a
bank waits for the event after the last `add_uploaded` that read the bank.
`add_uploaded` gets its slots as an input. Their host copy may be rewritten once the ids of a later
layer have arrived: by then the device has read it. The device's slot tables are updated when the
next pass begins.

The host may have prefetched experts of the next layer into a bank of their own
(experts/prefetch.py). Those that the router then chooses are copied on the device.

The CPU may compute missing experts instead (cpu_experts.py). If the cache wants them, they are
promoted: uploaded last on the same stream, resident in the next pass. While the guard
(experts/guard.py) has the cache bypassed, the slots stay as they are: missing experts are computed
on the CPU or go through the staging banks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..experts.cache import MAX_PROMOTED, ExpertCache
from ..experts.cost import MissSplit, fetches_in_graph, streams_rare_misses, usual_slots
from ..experts.guard import CacheGuard, Counters, PassClock
from ..experts.prefetch import MAX_PREFETCH, PrefetchController
from ..ggml.device import Device
from ..ggml.handles import Event
from ..ggml.lib import C, ffi
from ..ggml.ops import MAX_FETCH_IDS, Tensor
from ..graphs.cache import BuiltGraph
from ..resident.bank import Bank, ExpertBanks
from ..resident.layout import N_STAGING
from ..resident.store import ExpertStore
from .cpu_experts import CpuExperts
from .tables import HostRows, SlotTables

# In passes of more rows, experts only go through the staging banks: a prompt would evict all that a
# layer holds.
ADMIT_ROWS = 8


@dataclass(frozen=True)
class MissMode:
    """How the graphs of one-row passes deal with missing experts.

    fetch_layers: layers whose graph fetches them. prefetch: graphs predict the choice of the next
    layer, and the host prefetches from it.
    """

    fetch_layers: frozenset[int] = frozenset()
    prefetch: bool = False


_PLAIN, _PREFETCH = MissMode(), MissMode(prefetch=True)


class MissHandler:
    """Uploads missing experts and has them computed on the device or the CPU.

    cpu_experts: computes experts on the CPU; None when the device computes all. split: how many
    missing experts the CPU computes. guard: bypasses the cache when moving experts takes longer
    than it saves; None if not guarded, or if no slot can change. n_*: totals over all layers and
    passes.
    """

    def __init__(
        self,
        device: Device,
        banks: ExpertBanks,
        store: ExpertStore,
        cache: ExpertCache,
        cpu_experts: CpuExperts | None,
        mode: str,
        max_rows: int,
        guarded: bool = True,
    ) -> None:
        self._device = device
        self._banks = banks
        self._store = store
        self.cache = cache
        self.cpu_experts = cpu_experts
        n_expert = cache.n_expert
        # row 0: slots of the layer's own bank; one row for each wave through a staging bank
        n_waves = 1 + -(-n_expert // N_STAGING)
        self._tables = SlotTables(device, banks, cache)
        self._slots = HostRows(device, n_waves, max_rows * cache.n_expert_used)
        self._uploaded = device.event()
        self._staging_free = [device.event(), device.event()]
        self._staging_turn = 0
        self._promoted: list[tuple[int, int]] = []
        self._after_prompt = False
        self._victims_current = False  # the victim lists on the device are current
        self.n_bytes_to_device = 0
        self.n_cpu_experts = 0
        self.n_exchanged = 0
        self.n_prefetched = 0
        self._prefetched: tuple[int, dict[int, int]] = (-1, {})  # layer, expert -> slot of the bank
        self._measured: dict[int, float] = {}  # experts -> seconds of their upload
        self.clock = PassClock()
        self._fetch_allowed = mode != "cpu"  # by graphs
        self.split = self._split(mode)
        self.guard = self._open_guard() if guarded else None
        n_predictable = (
            sum(n < n_expert for n in cache.n_slots[1:]) if banks.n_prefetch_slots else 0
        )
        self.prefetcher = PrefetchController(n_predictable)
        self._began: float | None = None  # start of a pass that counts for the prefetch trial

    @property
    def warning(self) -> str:
        """One line about host memory that could not be pinned, or ''."""
        return self._store.warning

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that hold copies of experts."""
        return self._store.pinned_bytes

    @cached_property
    def _fetch_layers(self) -> frozenset[int]:
        """Layers whose graph fetches missing experts; read only after the slots are filled."""
        if not self._fetch_allowed or self.cache.n_expert_used > MAX_FETCH_IDS:
            return frozenset()
        return frozenset(il for il in self._store.rows if self.cache.can_fetch(il))

    @property
    def miss_mode(self) -> MissMode:
        """How a one-row pass would deal with missing experts now."""
        if self._is_bypassed:
            return _PLAIN
        if self._fetch_layers:
            return self._fetch_mode
        return _PREFETCH if self._banks.n_prefetch_slots and self.prefetcher.enabled else _PLAIN

    @cached_property
    def _fetch_mode(self) -> MissMode:
        return MissMode(self._fetch_layers)

    @property
    def store(self) -> ExpertStore:
        """Host memory of the experts of all layers that are not full."""
        return self._store

    def source(self, il: int) -> Tensor:
        """Return a fetching layer's packed experts: F32 [bytes / 4, n_expert], pinned memory."""
        return self._store.rows[il]

    def commit_fetched(self, il: int, missing: list[int], ids: list[int]) -> None:
        """Record what the graph of a layer fetched, and plan victims for the next pass.

        ids: the row's choice, [n_expert_used]; missing: what `ExpertCache.access` returned for it.
        """
        self.cache.commit_fetched(il, missing, ids)
        if missing:
            self.n_bytes_to_device += self._store.packing(il).n_bytes * len(missing)
        self._tables.write(il, with_victims=True)

    def rollback(self) -> None:
        """Undo a failed pass; see `ExpertCache.rollback`. The device must be idle."""
        self._promoted.clear()
        self._prefetched = -1, {}
        self.cache.rollback()

    def begin_pass(self, n_tokens: int) -> None:
        """Start a pass of n_tokens rows: mark promoted experts resident and upload changed tables.

        The last pass must have finished, so that no host row and no slot is in use.
        """
        self._prefetched = -1, {}
        self.prefetcher.discard()
        is_prompt = n_tokens > ADMIT_ROWS
        if self.guard and self.guard.begin_pass(n_tokens):
            self._after_prompt = True  # the slots are out of date, as after a prompt
        if self._after_prompt and not is_prompt and not self._is_bypassed:
            self._exchange()
        self._after_prompt = is_prompt
        if self._promoted:
            if self._uploaded:
                self._uploaded.wait()
            while self._promoted:
                self.cache.mark_resident(*self._promoted[-1])
                self._promoted.pop()
        victim_layers = frozenset() if self._is_bypassed else self._fetch_layers
        if not self._victims_current:
            self.cache.dirty |= victim_layers  # listed experts may have been chosen since
        self._victims_current = bool(victim_layers)
        for il in list(self.cache.dirty):
            self._tables.write(il, with_victims=il in victim_layers)
        self._tables.send()
        self.cache.begin_pass()
        may_prefetch = n_tokens == 1 and self._banks.n_prefetch_slots > 0
        is_trial = may_prefetch and not self._fetch_layers and not self._is_bypassed
        self._began = self.clock() if is_trial else None

    def end_launch(self) -> None:
        """Upload changed tables; the whole pass is enqueued and all its ids have been read."""
        self._tables.send()
        self.clock.leave()

    def end_pass(self) -> None:
        """Stop the clocks of the pass; its results have arrived."""
        if self._began is not None:
            self.prefetcher.end_token(self.clock() - self._began)
        if self.guard:
            self.guard.end_pass()

    def _exchange(self) -> None:
        """After a prompt, give slots to the experts that the policy now prefers.

        Experts that the prompt missed only went through the staging banks. The compute stream
        waits for these uploads; the host does not.
        """
        for il, n in enumerate(self.cache.n_slots):
            wanted = self.cache.wanted(il, n) if 0 < n < self.cache.n_expert else []
            slots = [(expert, self.cache.admit(il, expert, ())) for expert in wanted]
            pairs = [(expert, slot) for expert, slot in slots if slot is not None]
            if pairs:
                self._send(il, self._banks.layer(il), pairs)
                self.n_exchanged += len(pairs)
        if self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.upload.ptr)
            C.ggml_backend_event_wait(self._device.compute.ptr, self._uploaded.ptr)

    @property
    def _is_bypassed(self) -> bool:
        return self.guard is not None and self.guard.bypassed

    def _open_guard(self) -> CacheGuard | None:
        """Return a guard over the slots that can change; None if there are none."""
        cache = self.cache
        partial = [il for il, n in enumerate(cache.n_slots) if 0 < n < cache.n_expert]

        def read_counters() -> Counters:
            stats = cache.stats
            hits, misses = int(stats.hits[partial].sum()), int(stats.misses[partial].sum())
            return Counters(hits + misses, hits, int(stats.admitted[partial].sum()))

        return CacheGuard(read_counters, self._measure_stream(1), self.clock) if partial else None

    def _split(self, mode: str) -> MissSplit:
        """Return how many missing experts the CPU takes, by the mode; 'auto' measures.

        If the CPU should take none, this frees its memory and threads.
        """
        n_used = self.cache.n_expert_used
        if self.cpu_experts is None or mode != "auto":
            return MissSplit.fixed(n_used, self.cpu_experts is not None and mode == "cpu")
        on_cpu = [0.0] + [self.cpu_experts.measure(n) for n in range(1, n_used + 1)]
        streamed = [0.0] + [self.stream_seconds(n) for n in range(1, n_used + 1)]
        n_slots, n_expert = self.cache.n_slots, self.cache.n_expert
        usual = usual_slots(n_slots, n_used, n_expert)
        self._fetch_allowed = fetches_in_graph(on_cpu, streamed, usual, n_expert)
        if streams_rare_misses(on_cpu[1], streamed[1], min(n_slots), n_expert):
            self.cpu_experts.close()
            self.cpu_experts = None
            return MissSplit.fixed(n_used, False)
        rows = ADMIT_ROWS // 2
        per_row = (self.cpu_experts.measure(n_used, rows) / on_cpu[n_used] - 1.0) / (rows - 1)
        return MissSplit(on_cpu, streamed, max(per_row, 0.0))

    def stream_seconds(self, n_experts: int) -> float:
        """Return the measured seconds of uploading n experts, at most N_STAGING at a time."""
        at_once = min(n_experts, N_STAGING)
        return self._measure_stream(at_once) * n_experts / at_once

    def _measure_stream(self, n_experts: int) -> float:
        """Return the seconds of uploading n experts to a staging bank: median of five, cached."""
        if n_experts in self._measured:
            return self._measured[n_experts]
        il, samples = self._store.layers[0], []
        bank = self._banks.staging(il, 0)
        for at in range(6):
            first = at * n_experts % (self.cache.n_expert - n_experts + 1)
            start = time.perf_counter()
            self._send(il, bank, [(first + i, i) for i in range(n_experts)])
            C.ggml_backend_synchronize(self._device.upload.ptr)
            samples.append(time.perf_counter() - start)
        self.n_bytes_to_device = 0
        self._measured[n_experts] = float(np.median(samples[1:]))
        return self._measured[n_experts]

    def fill(self, il: int, placed: Sequence[tuple[int, int]]) -> None:
        """Upload (expert, slot) pairs into slots of a layer and wait."""
        for start in range(0, len(placed), N_STAGING):
            self._send(il, self._banks.layer(il), placed[start : start + N_STAGING])
            self._device.synchronize()

    def prefetch(self, il: int, predicted: list[int]) -> None:
        """Upload up to MAX_PREFETCH absent experts of layer il's predicted choice, best first."""
        candidates = [expert for expert in predicted if not self.cache.has_slot(il, expert)]
        pairs = list(zip(self.prefetcher.predicted(il, candidates), range(MAX_PREFETCH)))
        self._prefetched = -1, {}  # the bank is overwritten next
        self._send(il, self._banks.prefetch(il), pairs)
        self._prefetched = il, dict(pairs)
        self.n_prefetched += len(pairs)

    def _prefetched_of(self, il: int) -> dict[int, int]:
        """Return the experts of layer il in the prefetch bank, and their slots there."""
        prefetched_il, slots = self._prefetched
        return slots if prefetched_il == il else {}

    def prefetch_report(self) -> dict[str, int] | None:
        """Return how many experts were predicted, rightly predicted, prefetched; None if off."""
        if not self._banks.n_prefetch_slots or self._fetch_layers:
            return None
        return {
            "predicted": self.prefetcher.n_predicted,
            "correct": self.prefetcher.n_right,
            "fetched": self.n_prefetched,
        }

    def resolve(
        self,
        il: int,
        missing: list[int],
        ids: npt.NDArray[np.int32],
        n_tokens: int,
        graphs: Mapping[str, BuiltGraph],
    ) -> None:
        """Upload or compute the missing experts of a layer, and launch the graphs that add them.

        ids: I32 [n_tokens * n_expert_used], the pass's choice in layer il. graphs: `add_uploaded`
        for each bank: 'own' (at most ADMIT_ROWS rows, and the layer has slots), 'staging0' and
        'staging1'; `add_cpu` as 'cpu' (at most ADMIT_ROWS rows, and the CPU may compute).
        """
        self.prefetcher.score(il, missing)
        on_cpu = self._for_cpu(il, missing, ids, n_tokens) if "cpu" in graphs else []
        streamed = [expert for expert in missing if expert not in on_cpu]
        if "own" in graphs and not self._is_bypassed:
            streamed = self._admit(il, streamed, ids, graphs["own"])
        for wave, start in enumerate(range(0, len(streamed), N_STAGING), 1):
            pairs = list(zip(streamed[start : start + N_STAGING], range(N_STAGING)))
            turn, self._staging_turn = self._staging_turn, 1 - self._staging_turn
            bank = self._banks.staging(il, turn)
            self._upload_and_add(
                il, wave, bank, pairs, ids, graphs[f"staging{turn}"], self._staging_free[turn]
            )
        if on_cpu:
            self._compute_on_cpu(il, on_cpu, ids, n_tokens, graphs["cpu"])

    def _for_cpu(
        self, il: int, missing: list[int], ids: npt.NDArray[np.int32], n_tokens: int
    ) -> list[int]:
        """Return the missing experts that the CPU computes, prefetched ones excluded."""
        is_bypassed, prefetched = self._is_bypassed, self._prefetched_of(il)
        candidates = [expert for expert in missing if expert not in prefetched]
        if n_tokens == 1:
            # the CPU takes the last of the row's choice: the cache is least likely to want them
            n_cpu = (self.split.bypassed if is_bypassed else self.split.decode)[len(candidates)]
        else:
            # the CPU takes the experts that the fewest rows chose: its work grows with the rows,
            # while the device uploads an expert once
            chosen = Counter(ids.tolist())
            candidates = sorted(candidates, key=chosen.__getitem__, reverse=True)
            n_cpu = self.split.n_cpu([chosen[e] for e in candidates], is_bypassed)
        return candidates[len(candidates) - n_cpu :]

    def _admit(
        self, il: int, missing: list[int], ids: npt.NDArray[np.int32], graph: BuiltGraph
    ) -> list[int]:
        """Upload experts into slots of their layer and add them; return those that got no slot."""
        admitted, rest, working_set = [], [], ids.tolist()
        for expert in missing:
            slot = self.cache.admit(il, expert, working_set)
            if slot is None:
                rest.append(expert)
            else:
                admitted.append((expert, slot))
        if admitted:
            self._upload_and_add(il, 0, self._banks.layer(il), admitted, ids, graph, None)
        return rest

    def _compute_on_cpu(
        self,
        il: int,
        experts: list[int],
        ids: npt.NDArray[np.int32],
        n_tokens: int,
        graph: BuiltGraph,
    ) -> None:
        """Compute experts on the CPU, have the device add the result, and promote them."""
        cpu = self.cpu_experts
        if cpu is None:
            raise InternalError(f"layer {il}: there is a graph add_cpu but no CpuExperts")
        cpu.compute(il, ids, experts, n_tokens)
        self.n_cpu_experts += len(experts)
        y = graph.outputs
        C.ggml_backend_tensor_set_async(
            self._device.compute.ptr, y, cpu.address("y"), 0, C.ggml_nbytes(y)
        )
        status = C.mg_launch(self._device.compute.ptr, graph.graph, ffi.NULL, 0)
        if status:
            self._device.check(status, f"the experts of layer {il} on the CPU")
        self._promote(il, experts, ids.tolist())

    def _promote(self, il: int, experts: list[int], working_set: list[int]) -> None:
        """Upload experts in the background if the cache wants them, for the next pass."""
        if not self._banks.layer(il).n_slots or self._is_bypassed:
            return
        pairs, layer = [], self._banks.layer(il)
        candidates = experts[: max(0, MAX_PROMOTED - len(self._promoted))]
        for expert in candidates:
            slot = self.cache.reserve_slot(il, expert, working_set)
            if slot is not None:
                pairs.append((expert, slot))
        if not pairs:
            return
        self._send(il, layer, pairs)
        if self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.upload.ptr)
        self._promoted += [(il, expert) for expert, _ in pairs]

    def _wait_for_ring(self) -> None:
        """Wait for all uploads so far: the ring blocks that they read are refilled next."""
        if self._store.uses_ring and self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.upload.ptr)
            self._uploaded.wait()

    def _upload_and_add(
        self,
        il: int,
        wave: int,
        bank: Bank,
        pairs: list[tuple[int, int]],
        ids: npt.NDArray[np.int32],
        graph: BuiltGraph,
        bank_free: Event | None,
    ) -> None:
        """Upload (expert, slot) pairs to a bank and launch `add_uploaded` over them.

        wave: the host row that carries the slots. bank_free: the upload waits for this event.
        """
        if bank_free:
            C.ggml_backend_event_wait(self._device.upload.ptr, bank_free.ptr)
        self._send(il, bank, pairs)  # first: the copy takes longest
        slots = self._slots.array[wave, : ids.size]
        slots.fill(-1)
        for expert, slot in pairs:
            slots[ids == expert] = slot
        uploaded = self._uploaded.ptr if self._uploaded else ffi.NULL
        status = C.mg_upload_launch(
            self._device.compute.ptr, self._device.upload.ptr, graph.outputs,
            self._slots.address(wave), 4 * ids.size,
            bank_free.ptr if bank_free else ffi.NULL, uploaded, graph.graph,
        )  # fmt: skip
        if status:
            self._device.check(status, f"the missing experts of layer {il}")

    def _send(self, il: int, bank: Bank, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies of (expert, slot) pairs to a bank; prefetched ones on the device."""
        upload, source = self._device.upload.ptr, self._store.source
        packing, prefetched, n_uploaded = self._store.packing(il), self._prefetched_of(il), 0
        memory = bank.to_fill
        for expert, slot in pairs:
            at = slot * packing.stride
            if expert in prefetched:
                C.mg_copy_bytes(
                    upload,
                    self._banks.prefetch(il).to_fill,
                    prefetched[expert] * packing.stride,
                    memory,
                    at,
                    packing.n_bytes,
                )
                continue
            if n_uploaded % N_STAGING == 0:
                self._wait_for_ring()
            C.ggml_backend_tensor_set_async(upload, memory, source(il, expert), at, packing.n_bytes)
            n_uploaded += 1
        self.n_bytes_to_device += packing.n_bytes * n_uploaded

    def close(self) -> None:
        """Free events and tables."""
        self._device.synchronize()
        if self.cpu_experts:
            self.cpu_experts.close()
        for handle in (self._tables, self._slots, self._uploaded, *self._staging_free):
            if handle:
                handle.close()
