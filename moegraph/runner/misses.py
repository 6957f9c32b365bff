"""What happens when a pass needs experts that are not on the device.

For a row of its own, the graph of a layer can fetch them by itself: where experts are in pinned
memory, the look-up of slots copies what is missing into slots that the host picked before the pass
(`plan_victims`), and B computes everything. The host learns of it with the ids, has nothing to do
in a hurry, and picks the next ones (`commit_fetched`).

Otherwise B of the layer is running meanwhile and left those experts out. They are fetched from host
memory on the upload stream and computed by a small graph C, which adds them:

    compute: A(l) | B(l) ............ | slots | wait here | C(l) | A(l+1)
    upload:               experts ... | event here
    host:          sees ids, picks slots

An expert goes into a slot of its layer when the cache gives it one; its victim is no expert of this
pass, and every earlier pass that read the slot has finished, because the host has seen this layer's
ids. Otherwise it goes, with up to N_STAGING others at a time, into one of two staging banks, which
take turns: an upload waits for the event behind the last C that read its bank. C is told the slots
directly: their host copy is rewritten only when the ids of a later layer have been seen, by when it
was read. The tables on the device follow when the next pass begins.

Experts that the next layer will probably choose may be on their way already, to a bank of their own
(experts/prefetch.py). If it does choose them, they are copied on the device instead of fetched.

What the CPU computes instead (cpu_experts.py) may be worth a slot too: it goes up on the same
stream behind everything else, and its table entry changes when the next pass begins.

All of that has to pay. While the guard (experts/guard.py) has it bypassed, slots stay as they are,
and missing experts are computed on the CPU or pass through the staging banks.
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
from ..experts.bank import Bank, ExpertBanks
from ..experts.cache import MAX_PROMOTED, ExpertCache
from ..experts.cost import MissSplit, fetches_in_graph, streams_rare_misses, usual_slots
from ..experts.guard import CacheGuard, Counters, PassClock
from ..experts.prefetch import MAX_PREFETCH, PrefetchController
from ..experts.store import N_STAGING, ExpertStore
from ..ggml.device import Device
from ..ggml.handles import Event
from ..ggml.lib import C, ffi
from ..ggml.ops import MAX_FETCH_IDS, Tensor
from ..graphs.cache import BuiltGraph
from .cpu_experts import CpuExperts
from .tables import HostRows, SlotTables

# From more rows on, experts pass through the staging banks: a prompt would flush the cache of a
# layer.
ADMIT_ROWS = 8


@dataclass(frozen=True)
class MissMode:
    """How the graphs of passes of one row deal with experts that are not there.

    fetch_layers: layers that fetch them by themselves. prefetch: whether graphs guess what others
    will choose, for the host to fetch.
    """

    fetch_layers: frozenset[int] = frozenset()
    prefetch: bool = False


_PLAIN, _PREFETCH = MissMode(), MissMode(prefetch=True)


class MissHandler:
    """Fetches missing experts and has them computed.

    cpu_experts: computes experts on the CPU; None when the device computes all. split: who takes
    how many. guard: notices that moving experts does not pay; None where no slot can change, or if
    not guarded. n_*: sums so far, over all layers and passes.
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
        # own bank, then waves through the staging ones
        n_waves = 1 + -(-n_expert // N_STAGING)
        self._tables = SlotTables(device, banks, cache)
        self._slots = HostRows(device, n_waves, max_rows * cache.n_expert_used)
        self._uploaded = device.event()
        self._staging_free = [device.event(), device.event()]
        self._staging_turn = 0
        self._promoted: list[tuple[int, int]] = []
        self._after_prompt = False
        self._victims_current = False  # whether landings were kept up to date by the last pass
        self.n_bytes_to_device = 0
        self.n_cpu_experts = 0
        self.n_exchanged = 0
        self.n_prefetched = 0
        self._prefetched: tuple[int, dict[int, int]] = (-1, {})  # layer, expert -> slot of its bank
        self._measured: dict[int, float] = {}
        self.clock = PassClock()
        self._fetch_allowed = mode != "cpu"  # in graphs
        self.split = self._split(mode)
        self.guard = self._open_guard() if guarded else None
        n_predictable = (
            sum(n < n_expert for n in cache.n_slots[1:]) if banks.n_prefetch_slots else 0
        )
        self.prefetcher = PrefetchController(n_predictable)
        self._began: float | None = None  # when a pass did that may guess

    @property
    def warning(self) -> str:
        """One line about host memory that could not be pinned; empty when all went well."""
        return self._store.warning

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory with copies of experts."""
        return self._store.pinned_bytes

    @cached_property
    def _fetch_layers(self) -> frozenset[int]:
        """Layers whose graphs fetch by themselves; known once the slots are filled."""
        if not self._fetch_allowed or self.cache.n_expert_used > MAX_FETCH_IDS:
            return frozenset()
        return frozenset(il for il in self._store.rows if self.cache.can_fetch(il))

    @property
    def miss_mode(self) -> MissMode:
        """How passes of one row deal with what is missing, as things stand."""
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
        """Experts that may be missing, in host memory."""
        return self._store

    def source(self, il: int) -> Tensor:
        """Return the experts of a layer that fetches, packed: F32 [bytes / 4, n_expert], pinned."""
        return self._store.rows[il]

    def commit_fetched(self, il: int, missing: list[int], ids: list[int]) -> None:
        """Note what the graph of a layer fetched by itself, and pick slots for the next pass."""
        self.cache.commit_fetched(il, missing, ids)
        if missing:
            self.n_bytes_to_device += self._store.packing(il).n_bytes * len(missing)
        self._tables.write(il, with_victims=True)

    def rollback(self) -> None:
        """Give up what a failed pass may have changed; the device is idle. See the cache's."""
        self._promoted.clear()
        self._prefetched = -1, {}
        self.cache.rollback()

    def begin_pass(self, n_tokens: int) -> None:
        """Start a pass: experts that went up in the background become resident, tables follow.

        The last pass has finished, so no host row and no slot is in use.
        """
        self._prefetched = -1, {}
        self.prefetcher.discard()
        is_prompt = n_tokens > ADMIT_ROWS
        if self.guard and self.guard.begin_pass(n_tokens):
            self._after_prompt = True  # the slots are as old as after a prompt
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
            self.cache.dirty |= victim_layers  # what was listed before may have been chosen since
        self._victims_current = bool(victim_layers)
        for il in list(self.cache.dirty):
            self._tables.write(il, with_victims=il in victim_layers)
        self._tables.send()
        self.cache.begin_pass()
        may_prefetch = n_tokens == 1 and self._banks.n_prefetch_slots > 0
        is_trial = may_prefetch and not self._fetch_layers and not self._is_bypassed
        self._began = self.clock() if is_trial else None

    def end_launch(self) -> None:
        """Note that all of a pass is enqueued and its choices are known."""
        self._tables.send()
        self.clock.leave()

    def end_pass(self) -> None:
        """Note that the results of the pass are there."""
        if self._began is not None:
            self.prefetcher.end_token(self.clock() - self._began)
        if self.guard:
            self.guard.end_pass()

    def _exchange(self) -> None:
        """After a prompt, give slots to the experts that it made worth having.

        Its chunks went through the staging banks and only told the policy what they chose. The
        compute stream waits for these copies; the host does not.
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
        """Return a guard over the slots that can change, if there are any."""
        cache = self.cache
        mine = [il for il, n in enumerate(cache.n_slots) if 0 < n < cache.n_expert]

        def read() -> Counters:
            stats = cache.stats
            hits, misses = int(stats.hits[mine].sum()), int(stats.misses[mine].sum())
            return Counters(hits + misses, hits, int(stats.admitted[mine].sum()))

        return CacheGuard(read, self._measure_stream(1), self.clock) if mine else None

    def _split(self, mode: str) -> MissSplit:
        """Return who takes how many missing experts, by the mode or by what is measured.

        Where measurements say that the CPU should take none, its memory and threads are freed.
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
        """Return the seconds that fetching n experts takes, as measured; many go in turns."""
        at_once = min(n_experts, N_STAGING)
        return self._measure_stream(at_once) * n_experts / at_once

    def _measure_stream(self, n_experts: int) -> float:
        """Return the seconds that fetching n experts into a staging bank takes; median of five.

        Measured once.
        """
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
        """Copy experts into slots of a layer, as (expert, slot), and wait for it."""
        for start in range(0, len(placed), N_STAGING):
            self._send(il, self._banks.layer(il), placed[start : start + N_STAGING])
            self._device.synchronize()

    def prefetch(self, il: int, predicted: list[int]) -> None:
        """Take a guess, best first, of what layer il of this pass will choose; fetch some of it."""
        candidates = [expert for expert in predicted if not self.cache.has_slot(il, expert)]
        pairs = list(zip(self.prefetcher.predicted(il, candidates), range(MAX_PREFETCH)))
        self._prefetched = -1, {}  # its bank is written to now
        self._send(il, self._banks.prefetch(il), pairs)
        self._prefetched = il, dict(pairs)
        self.n_prefetched += len(pairs)

    def _prefetched_of(self, il: int) -> dict[int, int]:
        """Return the experts of a layer that are on the device ahead, and their slots there."""
        at, slots = self._prefetched
        return slots if at == il else {}

    def prefetch_report(self) -> dict[str, int] | None:
        """Return how many experts were predicted, guessed right, and fetched ahead."""
        if not self._banks.n_prefetch_slots or self._fetch_layers:
            return None
        seen = self.prefetcher
        return {
            "predicted": seen.n_predicted,
            "correct": seen.n_right,
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
        """Fetch and compute the missing experts of a layer.

        ids: all that the pass chose there; graphs: the layer's C for each bank: 'own' (only for few
        rows and a layer that has slots), 'staging0', 'staging1'; and E, 'cpu', for few rows where
        the CPU may compute.
        """
        self.prefetcher.score(il, missing)
        on_cpu = self._for_cpu(il, missing, ids, n_tokens) if "cpu" in graphs else []
        streamed = [expert for expert in missing if expert not in on_cpu]
        if "own" in graphs and not self._is_bypassed:
            streamed = self._into_slots(il, streamed, ids, graphs["own"])
        for wave, start in enumerate(range(0, len(streamed), N_STAGING), 1):
            pairs = list(zip(streamed[start : start + N_STAGING], range(N_STAGING)))
            turn, self._staging_turn = self._staging_turn, 1 - self._staging_turn
            bank = self._banks.staging(il, turn)
            self._run(
                il, wave, bank, pairs, ids, graphs[f"staging{turn}"], self._staging_free[turn]
            )
        if on_cpu:
            self._on_cpu(il, on_cpu, ids, n_tokens, graphs["cpu"])

    def _for_cpu(
        self, il: int, missing: list[int], ids: npt.NDArray[np.int32], n_tokens: int
    ) -> list[int]:
        """Return the missing experts that the CPU computes; those on their way are not for it."""
        is_bypassed, ahead = self._is_bypassed, self._prefetched_of(il)
        candidates = [expert for expert in missing if expert not in ahead]
        if n_tokens == 1:
            # what the cache is least likely to want: the last chosen
            n_cpu = (self.split.bypassed if is_bypassed else self.split.decode)[len(candidates)]
        else:
            # and what the fewest rows chose: the CPU computes each row, the device copies once
            chosen = Counter(ids.tolist())
            candidates = sorted(candidates, key=chosen.__getitem__, reverse=True)
            n_cpu = self.split.n_cpu([chosen[e] for e in candidates], is_bypassed)
        return candidates[len(candidates) - n_cpu :]

    def _into_slots(
        self, il: int, missing: list[int], ids: npt.NDArray[np.int32], graph: BuiltGraph
    ) -> list[int]:
        """Stream experts into slots of their layer; return those that got none."""
        admitted, rest, working_set = [], [], ids.tolist()
        for expert in missing:
            slot = self.cache.admit(il, expert, working_set)
            if slot is None:
                rest.append(expert)
            else:
                admitted.append((expert, slot))
        if admitted:
            self._run(il, 0, self._banks.layer(il), admitted, ids, graph, None)
        return rest

    def _on_cpu(
        self,
        il: int,
        experts: list[int],
        ids: npt.NDArray[np.int32],
        n_tokens: int,
        graph: BuiltGraph,
    ) -> None:
        """Compute experts on the CPU now and have the device add the result."""
        cpu = self.cpu_experts
        if cpu is None:
            raise InternalError(f"layer {il}: nothing is set up on the CPU")
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
        """Send experts up in the background if the cache wants them, for the passes to come."""
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
        """Wait for all copies so far: the blocks they read are filled again next."""
        if self._store.uses_ring and self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.upload.ptr)
            self._uploaded.wait()

    def _run(
        self,
        il: int,
        wave: int,
        bank: Bank,
        pairs: list[tuple[int, int]],
        ids: npt.NDArray[np.int32],
        graph: BuiltGraph,
        free: Event | None,
    ) -> None:
        """Upload experts as (expert, slot) of a bank and launch C over them."""
        if free:
            C.ggml_backend_event_wait(self._device.upload.ptr, free.ptr)
        self._send(il, bank, pairs)  # first of all: the copy takes longest
        slots = self._slots.array[wave, : ids.size]
        slots.fill(-1)
        for expert, slot in pairs:
            slots[ids == expert] = slot
        uploaded = self._uploaded.ptr if self._uploaded else ffi.NULL
        status = C.mg_upload_launch(
            self._device.compute.ptr, self._device.upload.ptr, graph.outputs,
            self._slots.address(wave), 4 * ids.size,
            free.ptr if free else ffi.NULL, uploaded, graph.graph,
        )  # fmt: skip
        if status:
            self._device.check(status, f"the missing experts of layer {il}")

    def _send(self, il: int, bank: Bank, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue the copies of experts into slots of a bank on the upload stream."""
        upload, source = self._device.upload.ptr, self._store.source
        packing, ahead, n_fetched = self._store.packing(il), self._prefetched_of(il), 0
        memory = bank.to_fill
        for expert, slot in pairs:
            at = slot * packing.stride
            if expert in ahead:
                C.mg_copy_bytes(
                    upload,
                    self._banks.prefetch(il).to_fill,
                    ahead[expert] * packing.stride,
                    memory,
                    at,
                    packing.n_bytes,
                )
                continue
            if n_fetched % N_STAGING == 0:
                self._wait_for_ring()
            C.ggml_backend_tensor_set_async(upload, memory, source(il, expert), at, packing.n_bytes)
            n_fetched += 1
        self.n_bytes_to_device += packing.n_bytes * n_fetched

    def close(self) -> None:
        """Free events and tables."""
        self._device.synchronize()
        if self.cpu_experts:
            self.cpu_experts.close()
        for handle in (self._tables, self._slots, self._uploaded, *self._staging_free):
            if handle:
                handle.close()
