"""A sweep: a prompt computed layer by layer, all its chunks in one layer before the next.

    a layer that may lack experts:
    compute:  mixer(0) experts(0) | mixer(1) experts(1) | ... | unit(group 0) | unit(group 1) ...
    upload:            group 0, 1, 2 ..................           group 3 ...
    host:              ids(0): asks for what is absent  | ids(1) ...

The hidden states of all rows stay on the device. `experts` leaves absent experts out. Each of them
is sent once, through a ring of groups of slots, and then computed for all rows that chose it. So a
sweep sends every absent expert at most once, however long the prompt is.

A sweep goes on by steps: one chunk of one layer, or one group of experts. Between steps other
sequences may be computed; the ring keeps what it holds. The sequence has the new rows once the last
step is done; until then `cancel` makes it what it was before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled, InternalError, NativeError, RequestError
from ..experts.crossing import Crossing, Forecast, Group, by_popularity
from ..experts.passplan import PassPlan
from ..ggml.lib import C, ffi
from ..ggml.ops import Tensor
from ..ggml.places import MissingPlaces
from ..graphs.cache import BuiltGraph
from ..graphs.chunk import kv_length
from ..kinds import SHORT_PROMPT, Kind
from ..resident.hostcopies import StatesCopy
from ..resident.snapshots import Snapshot
from .results import NotFinite, Output
from .sweep_batch import Chunk, SweepBatch, SweepStep, cut_chunks, cut_parts
from .sweeps import Sweeps

# Steps that may be enqueued ahead of the device.
_AHEAD = 3


def _joined(outputs: Sequence[Output]) -> Output:
    """Return the results of all chunks as one: argmax, or logits."""
    argmax = [o.argmax for o in outputs if o.argmax is not None]
    if argmax:
        return Output(argmax=np.concatenate(argmax))
    return Output(logits=np.concatenate([o.require_logits() for o in outputs]))


class Sweep:
    """One prompt under way; `Sweeps.begin` makes it.

    n_steps, n_done: steps in total as far as is known, and those that are enqueued. upcoming: the
    next step, from `begin` on; None after the last one. output: the results; valid after the last
    step. saved: the states at the cuts, in host memory; they are complete after the last step, and
    the caller closes them. n_whole: positions of the sequence that all layers have; those of the
    last part come with the last step.
    """

    def __init__(self, sweeps: Sweeps, batch: SweepBatch) -> None:
        """Give the sequence pages; the caller has checked token ids and context length.

        Raises:
            RequestError: another sweep is open.
            OutOfDeviceMemory: there is no memory for a snapshot.
        """
        self._s, self.batch = sweeps, batch
        self.slot, state = batch.slot, sweeps.stage.state
        self._state = state
        self.n_past = self.n_whole = state.n_past[self.slot]
        n = len(batch.tokens)
        max_rows = min(batch.max_rows or sweeps.memory.max_rows, sweeps.memory.max_rows)
        chunks = cut_chunks(n, self.n_past, max_rows, batch.cuts, batch.few_lengths)
        self._parts = cut_parts(chunks, sweeps.memory.n_rows, sweeps.memory.inputs.n_chunks)
        ring = sweeps.ring
        self._crossing = Crossing(ring.n_groups, ring.n_each) if ring else Crossing(0, 0)
        self._forecast, self._foreseen = Forecast(n), -1  # the layer that it foresees
        self._plan: PassPlan | None = None
        self._is_entering = False
        self._cancelled: Callable[[], bool] = bool
        self._books: list[tuple[int, int, int]] = []  # (layer, turn, rows) not recorded yet
        self._before: Snapshot | None = None
        self.saved: list[StatesCopy] = []
        self.is_open = False
        self.output: Output | None = None
        self.n_steps = sweeps.stage.hp.n_layer * len(chunks)
        self.n_done = 0
        self._n_enqueued = 0
        self._finite = True
        self._work = self._run()
        self.upcoming: SweepStep | None = None

    def begin(self) -> None:
        """Copy the state of the sequence, to go back to; after any error call `cancel`."""
        state = self._state
        self.is_open = True
        self._s.results.forget()
        if self.n_past:
            self._before = state.snapshot(self.slot)
        for cut in self.batch.cuts:
            try:
                self.saved.append(state.copies.new_states(cut))
            except NativeError:  # nothing but this copy depends on it
                break
        state.pool.grow(self.slot, self.n_past + len(self.batch.tokens))
        self.upcoming = next(self._work, None)

    def step(self, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Enqueue the next step; return whether there are more. After an error call `cancel`.

        Raises:
            Cancelled: cancelled() returned true.
            RequestError: the sweep has ended.
            NotFinite: results are NaN or infinite.
        """
        if not self.is_open:
            raise RequestError("the prompt has been computed or cancelled; begin another one")
        if cancelled():
            raise Cancelled("cancelled")
        self._enter()
        pace = self._s.paces[self._n_enqueued % _AHEAD]
        if pace:
            pace.wait()
        self.upcoming = next(self._work, None)
        if pace:
            C.ggml_backend_event_record(pace.ptr, self._s.device.compute.ptr)
        self._n_enqueued += 1
        return self.upcoming is not None

    def _enter(self) -> None:
        """Bring books and tables up to date, if another pass has run since the last step."""
        residency, misses = self._s.residency, self._s.misses
        if residency is None or (self._plan and residency.is_current(self._plan)):
            return
        self._foreseen = -1  # experts may have gained or lost slots
        self._is_entering = True  # what begin_pass returns is lost if it is not carried out
        # a few rows would get slots, which is for passes
        n_tokens = max(len(self.batch.tokens), SHORT_PROMPT + 1)
        self._plan = residency.begin_pass(Kind.PREFILL, n_tokens)
        if misses:
            misses.begin_pass(self._plan)
        self._is_entering = False

    def _run(self) -> Generator[SweepStep]:
        """Do all the work; before each step, yield what it is."""
        hp = self._s.stage.hp
        outputs: list[Output] = []
        for part in self._parts:
            last = part[-1]
            self._s.memory.inputs.begin(self.slot, kv_length(self._state, last.first + last.n))
            for il in range(hp.n_layer):
                self._record_books(il % 2)
                lacks = self._s.stage.banks.n_slots[il] < hp.n_expert
                yield from self._lacking_layer(il, part) if lacks else self._full_layer(il, part)
                self._end_layer(il, part)
            for turn in range(2):
                self._record_books(turn)
            self.n_whole = last.first + last.n
            if self.batch.all_rows:
                for chunk in part:
                    yield SweepStep("head", chunk.n)
                    outputs.append(self._head(chunk.row, chunk.n))
        if not self.batch.all_rows:
            yield SweepStep("head", 1)
            outputs.append(self._head(part[-1].row + part[-1].n - 1, 1))
        self._end(outputs)

    def _send_inputs(self, chunk: Chunk) -> None:
        """Upload the inputs of a chunk, when its turn in the first layer comes."""
        memory, embedding = self._s.memory, self._s.stage.weights.embedding
        if embedding is None:
            raise InternalError("a sweep needs a stage with all layers")
        tokens = self.batch.tokens[chunk.first - self.n_past :][: chunk.n]
        memory.inputs.add(self.slot, chunk.first, tokens, embedding, memory.hidden, chunk.row)

    def _launch(self, built: BuiltGraph, what: str, reads: object = ffi.NULL, n: int = 0) -> None:
        status = C.mg_launch(self._s.device.compute.ptr, built.graph, reads, n)
        if status:
            self._s.device.check(status, what)

    def _load(self, il: int, at: int, chunk: Chunk) -> int:
        """Copy a chunk to where graphs read it; return its KV length."""
        s = self._s
        if il == 0:
            self._send_inputs(chunk)
        s.memory.copy(s.memory.hidden, chunk.row, s.carried("l_out"), 0, chunk.n)
        if not s.stage.hp.is_recurrent(il):
            s.memory.inputs.select(at)
        return kv_length(self._state, chunk.first + chunk.n)

    def _read_ids(self, ids: Tensor | None, turn: int, chunk: Chunk) -> tuple[object, int]:
        """Return the copies of a chunk's choice to the host."""
        if ids is None:
            return ffi.NULL, 0
        k = self._s.stage.hp.n_expert_used
        address = self._s.memory.ids_address(turn, chunk.row * k)
        read = {"src": ids, "dst": address, "size": 4 * k * chunk.n}
        return ffi.new("struct mg_readback[1]", [read]), 1

    def _step(self, il: int, chunk: Chunk) -> SweepStep:
        if self._s.stage.hp.is_recurrent(il):
            return SweepStep("recurrent", chunk.n)
        return SweepStep("attention", chunk.n, kv_length(self._state, chunk.first + chunk.n))

    def _full_layer(self, il: int, part: list[Chunk]) -> Iterator[SweepStep]:
        s, turn = self._s, il % 2
        for at, chunk in enumerate(part):
            yield self._step(il, chunk)
            start = time.perf_counter()
            n_kv = self._load(il, at, chunk)
            built = s.graphs.layer(il, chunk.n, n_kv)
            start = s.spent("build", start)
            reads, n_reads = self._read_ids(built.outputs, turn, chunk)
            self._launch(built, f"layer {il}", reads, n_reads)
            s.memory.copy(s.carried("l_out"), 0, s.memory.hidden, chunk.row, chunk.n)
            self._copy_state(il, chunk)
            s.spent("launch", start)
            self.n_done += 1

    def _lacking_layer(self, il: int, part: list[Chunk]) -> Iterator[SweepStep]:
        s, turn, n_rows = self._s, il % 2, part[-1].row + part[-1].n
        k = s.stage.hp.n_expert_used
        ids = s.memory.ids[turn, : k * n_rows]
        absent = np.zeros(k * n_rows, dtype=bool)
        waiting: tuple[int, Chunk, npt.NDArray[np.int32]] | None = None
        for at, chunk in enumerate(part):
            yield self._step(il, chunk)
            self._launch_chunk(il, at, chunk)
            launched = at, chunk, s.cache_table(il).copy()
            if waiting:
                self._ask(il, ids, absent, *waiting)
            waiting = launched
            self.n_done += 1
        yield SweepStep("experts", n_rows)  # what comes now waits for the last chunk
        if waiting:
            self._ask(il, ids, absent, *waiting)
        missing = MissingPlaces(ids, absent, s.stage.hp.n_expert, k)
        self._send_ahead(il + 1)
        group = self._crossing.oldest(il)
        while group:
            self._use(il, group, missing, ids, part)
            self._send_ahead(il + 1)
            group = self._crossing.oldest(il)
            if group:
                yield SweepStep("experts", n_rows)
        n_asked, n_chosen = len(self._crossing.asked(il)), missing.n_experts
        self._forecast.note(n_chosen, n_asked - n_chosen)
        self._crossing.leave(il)
        if s.sums_last:
            for chunk in part:
                yield SweepStep("sum", chunk.n)
                self._sum(il, chunk)

    def _launch_chunk(self, il: int, at: int, chunk: Chunk) -> None:
        """Enqueue mixer, router and resident experts of a chunk, and keep what they make."""
        s, memory, k, n = self._s, self._s.memory, self._s.stage.hp.n_expert_used, chunk.n
        start = time.perf_counter()
        n_kv = self._load(il, at, chunk)
        mixer, experts = s.graphs.mixer(il, n, n_kv), s.graphs.experts(il, n)
        start = s.spent("build", start)
        self._launch(mixer, f"layer {il}", *self._read_ids(mixer.outputs, il % 2, chunk))
        event = s.routed[at % 2]
        if event:
            C.ggml_backend_event_record(event.ptr, s.device.compute.ptr)
        self._launch(experts, f"the experts of layer {il}")
        memory.copy(s.carried("post_norm"), 0, memory.tensor("post_norm"), chunk.row, n)
        memory.copy(s.carried("weights"), 0, memory.tensor("weights"), chunk.row * k, n * k)
        result = "residual" if s.sums_last else "l_out"
        memory.copy(s.carried(result), 0, memory.hidden, chunk.row, n)
        if s.sums_last:
            to = memory.tensor("expert_rows")
            memory.copy(s.carried("expert_rows"), 0, to, chunk.row * k, n * k)
        self._copy_state(il, chunk)
        s.spent("launch", start)

    def _ask(
        self,
        il: int,
        ids: npt.NDArray[np.int32],
        absent: npt.NDArray[np.bool_],
        at: int,
        chunk: Chunk,
        table: npt.NDArray[np.int32],
    ) -> None:
        """Wait for the choice of a chunk, and send the experts that it misses.

        table: where experts were when `experts` was launched.
        """
        s, k, start = self._s, self._s.stage.hp.n_expert_used, time.perf_counter()
        event = s.routed[at % 2]
        if event:
            event.wait()
        start = s.spent("wait", start)
        rows = slice(chunk.row * k, (chunk.row + chunk.n) * k)
        chosen = ids[rows]
        if chosen.min() < 0 or chosen.max() >= len(table):
            raise InternalError(f"layer {il}: router chose ids outside 0..{len(table) - 1}")
        absent[rows] = table[chosen] < 0
        self._crossing.ask(il, by_popularity(chosen, absent[rows], len(table)))
        self._send()
        s.spent("resolve", start)

    def _send(self) -> None:
        """Enqueue uploads into the groups that are free."""
        s = self._s
        for group, pairs, is_new in self._crossing.sends():
            free, uploaded = s.ring_events(group.index)
            if is_new and free:
                C.ggml_backend_event_wait(s.device.upload.ptr, free.ptr)
            s.send(group.il, group.index, pairs)
            if uploaded:
                C.ggml_backend_event_record(uploaded.ptr, s.device.upload.ptr)
        s.read_ahead(self._crossing.waiting(self._crossing.n_each))

    def _send_ahead(self, il: int) -> None:
        """Send experts of the next layer, if there is room, before its router has chosen."""
        s, room = self._s, self._crossing.n_room
        residency = s.residency
        if not room or residency is None or il >= s.stage.hp.n_layer:
            return
        if self._foreseen != il:
            asked = self._crossing.asked(il)
            absent = np.flatnonzero(s.cache_table(il) < 0)
            absent = absent[~np.isin(absent, list(asked))] if asked else absent
            counts = residency.routing.popularity(il)
            self._forecast.begin(counts, absent, s.stage.hp.n_expert_used)
            self._foreseen = il
        self._crossing.ask(il, self._forecast.likely(room))
        self._send()

    def _use(
        self,
        il: int,
        group: Group,
        missing: MissingPlaces,
        ids: npt.NDArray[np.int32],
        part: list[Chunk],
    ) -> None:
        """Enqueue what the experts of a group compute, then uploads into the group."""
        s, hp, start = self._s, self._s.stage.hp, time.perf_counter()
        places = missing.of(group.experts)
        free, uploaded = s.ring_events(group.index)
        if uploaded:
            C.ggml_backend_event_wait(s.device.compute.ptr, uploaded.ptr)
        slots = s.slots_of(il, group, hp.n_expert)
        most = s.memory.most - 1
        for rows in self._by_chunk(places, part) if s.sums_last else [places]:
            for at in range(0, len(rows), most):
                unit = s.memory.write_unit(rows[at : at + most], ids, slots)
                built = s.graphs.unit(il, *unit)
                s.memory.send_unit(*unit)
                self._launch(built, f"the missing experts of layer {il}")
        if free:
            C.ggml_backend_event_record(free.ptr, s.device.compute.ptr)
        self._crossing.give_back(group)
        self._send()
        s.spent("resolve", start)

    def _by_chunk(self, places: npt.NDArray[np.int32], part: list[Chunk]) -> list[Any]:
        """Return the places of each chunk.

        On the CPU the bits of a product depend on how many rows of a graph chose the expert. A
        chunk must give the same bits as in a pass of its own.
        """
        k = self._s.stage.hp.n_expert_used
        return np.split(places, np.searchsorted(places, [k * chunk.row for chunk in part[1:]]))

    def _sum(self, il: int, chunk: Chunk) -> None:
        """Enqueue the sum of all experts of a chunk, in routing order (CPU device)."""
        s, memory, k, n = self._s, self._s.memory, self._s.stage.hp.n_expert_used, chunk.n
        built = s.graphs.sum_rows(il, n)
        if built is None:
            raise InternalError("expert rows on a device that adds experts to a finished sum")
        memory.copy(memory.tensor("expert_rows"), chunk.row * k, s.carried("expert_rows"), 0, n * k)
        memory.copy(memory.tensor("post_norm"), chunk.row, s.carried("post_norm"), 0, n)
        memory.copy(memory.hidden, chunk.row, s.carried("residual"), 0, n)
        self._launch(built, f"the sum of layer {il}")
        memory.copy(s.carried("l_out"), 0, memory.hidden, chunk.row, n)

    def _copy_state(self, il: int, chunk: Chunk) -> None:
        """Copy the recurrent states after a chunk to the host, if it ends at a cut."""
        state = self._state
        if il not in state.ssm:
            return
        for copy in self.saved:
            if copy.n_past == chunk.first + chunk.n:
                state.copies.take_layer(copy, self.slot, [state.conv[il], state.ssm[il]])

    def _end_layer(self, il: int, part: list[Chunk]) -> None:
        s, n_rows = self._s, part[-1].row + part[-1].n
        tap = self.batch.taps.get(il)
        if tap:
            tap(s.memory.hidden, n_rows, part[0].first)
        if self._state.last_out is not None and il == s.stage.layers[-1]:
            self._keep_last_out(self._state.last_out, part)
        if s.residency is not None:
            done = s.layer_done[il % 2]
            if done:
                C.ggml_backend_event_record(done.ptr, s.device.compute.ptr)
            self._books.append((il, il % 2, n_rows))

    def _keep_last_out(self, last_out: Tensor, part: list[Chunk]) -> None:
        """Enqueue copies of the output of the part's last row, and of those before cuts."""
        memory = self._s.memory
        cuts = {copy.n_past: copy for copy in self.saved}
        for chunk in part:
            copy = cuts.get(chunk.first + chunk.n)
            if copy or chunk is part[-1]:
                row = chunk.row + chunk.n - 1
                memory.copy(memory.hidden, row, last_out, self.slot, 1)
            if copy:
                self._state.copies.take_layer(copy, self.slot, [last_out])

    def _record_books(self, turn: int) -> None:
        """Record the choice in the last layer of this turn, which the device has computed."""
        s = self._s
        for entry in [entry for entry in self._books if entry[1] == turn]:
            il, _, n_rows = entry
            start = time.perf_counter()
            done = s.layer_done[turn]
            if done:
                done.wait()
            start = s.spent("wait", start)
            s.record(il, s.memory.ids[turn, : n_rows * s.stage.hp.n_expert_used])
            self._books.remove(entry)
            s.spent("resolve", start)

    def _head(self, row: int, n: int) -> Output:
        """Compute the head for rows of the part, and wait for it."""
        s, kind, draws = self._s, self.batch.results, self.batch.draws
        built = s.graphs.head(n, kind)
        s.memory.copy(s.memory.hidden, row, s.carried("l_out"), 0, n)
        if draws is not None:
            s.memory.inputs.send_draws(draws)
        self._launch(built, "the output head", s.results.reads(built.outputs), 2)
        start = time.perf_counter()
        C.ggml_backend_synchronize(s.device.compute.ptr)
        s.spent("wait", start)
        output, finite = s.results.read(kind, n)
        if not finite.all():
            message = f"{s.device.name} computed logits that are not finite"
            raise NotFinite(message, (self.slot,), output)
        return output

    def _end(self, outputs: list[Output]) -> None:
        """Close the sweep; its sequence has all rows."""
        s = self._s
        self.output = outputs[0] if len(outputs) == 1 else _joined(outputs)
        if s.residency is not None:
            s.residency.end_pass(0.0)
        self._state.n_past[self.slot] = self.n_past + len(self.batch.tokens)
        self.is_open = False
        if self._before:
            self._before.close()

    def cancel(self) -> None:
        """Make the sequence what it was before the sweep; does nothing after the last step.

        Safe to call again if it was interrupted.
        """
        if not self.is_open:
            return
        s, state = self._s, self._state
        self._work.close()  # it holds graphs
        self.upcoming = None
        s.device.synchronize()
        if s.misses:
            s.misses.store.forget()
        if s.residency is not None and (
            self._is_entering or (self._plan and s.residency.is_current(self._plan))
        ):
            s.residency.rollback()
        if self._before:
            state.restore(self._before)
        elif self.n_past:
            state.truncate(self.slot, self.n_past)  # it failed before anything was computed
        else:
            state.reset(self.slot)
        self.is_open = False
        for copy in self.saved:
            copy.close()
        if self._before:
            self._before.close()
