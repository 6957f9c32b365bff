"""The part of a sweep that one stage computes: all its layers for a part of the prompt.

    a layer that may lack experts:
    compute:  mixer(0) experts(0) | mixer(1) experts(1) | ... | unit(group 0) | unit(group 1) ...
    upload:            group 0, 1, 2 ..................           group 3 ...
    host:              ids(0): asks for what is absent  | ids(1) ...

The hidden states of all rows stay on the device. `experts` leaves absent experts out. Each of them
is sent once, through a ring of groups of slots, and then computed for all rows that chose it
(`MissingExperts`). What the policy prefers to residents is then copied into slots of the layer,
mostly while the device computes the first chunk of the next layer: the host has nothing else to do
before that has chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PassShape
from ..errors import InternalError
from ..experts.crossing import Crossing, Forecast, Group
from ..experts.residency import PassTerms
from ..ggml.handles import Event
from ..ggml.lib import C
from ..ggml.ops import Tensor
from ..ggml.places import MissingPlaces, find_missing
from ..graphs.chunk import Form, Segment, kv_length
from ..graphs.head import Results
from ..kinds import SHORT_PROMPT, Kind, SweepStep
from .results import NotFinite, Output
from .sweep_batch import Chunk, HiddenReaders, SweepBatch, SweptPrompt
from .sweeps import AHEAD, Sweeps


class MissingExperts:
    """Experts that layers lack in a sweep: which are sent, and when they compute.

    computed: groups of one layer that are not given back. foreseen: the layer of which experts are
    sent ahead; -1: none, or experts have gained or lost slots since.
    """

    def __init__(self, sweeps: Sweeps, n_rows: int) -> None:
        """n_rows: of all prompts of the sweep."""
        self._s, ring = sweeps, sweeps.ring
        self._crossing = Crossing(ring.n_groups, ring.n_each) if ring else Crossing(0, 0)
        self._forecast, self.foreseen = Forecast(n_rows), -1
        # expert -> its slot, of the experts of the group that is computed; others have old ones
        self._slots = np.full(sweeps.stage.hp.n_expert, -1, dtype=np.int32)
        self._chosen = set[int]()
        self.computed: list[Group] = []

    def ask(self, il: int, experts: list[int]) -> None:
        """Send experts that the rows of a chunk chose and that have no slot."""
        self._chosen.update(experts)
        if self._s.misses:
            experts = self._s.misses.uploads.level.in_order(il, experts)
        self._crossing.ask(il, experts)
        self._send()

    def _send(self) -> None:
        s = self._s
        for group, pairs, is_new in self._crossing.sends():
            free, uploaded = s.ring_events[group.index]
            if is_new and free:
                C.ggml_backend_event_wait(s.device.upload.ptr, free.ptr)
            s.send(group.il, group.index, pairs)
            if uploaded:
                C.ggml_backend_event_record(uploaded.ptr, s.device.upload.ptr)
        if s.misses:
            s.misses.store.ring.ahead(self._crossing.waiting(self._crossing.n_each))

    def send_ahead(self, il: int) -> None:
        """Send experts of a layer, if there is room, before its router has chosen."""
        s, room, residency = self._s, self._crossing.n_room, self._s.residency
        if not room or residency is None or il not in s.stage.layers:
            return
        if self.foreseen != il:
            is_absent = residency.cache.tables[il] < 0
            is_absent[list(self._crossing.asked(il))] = False
            absent = np.flatnonzero(is_absent)
            counts = residency.routing.popularity(il)
            self._forecast.begin(counts, absent, s.stage.hp.n_expert_used)
            self.foreseen = il
        self._crossing.ask(il, self._forecast.likely(room))
        self._send()

    def groups(self, il: int, n_chunks: int) -> Iterator[Group]:
        """Yield the groups of a layer as they are to be computed; `compute` each.

        The first group has most rows. In a long prompt it arrived long ago, as have those after it
        but the last. These are computed before it: while it is computed, further experts arrive in
        their slots.
        """
        held = self._crossing.held(il)
        if n_chunks > 1:
            held = held[1:-1] + held[:1] + held[1:][-1:]
        while held:
            yield from held
            held = [group for group in self._crossing.held(il) if group not in self.computed]

    def compute(
        self, il: int, group: Group, missing: MissingPlaces, ids: npt.NDArray[np.int32],
        part: list[Chunk],
    ) -> None:  # fmt: skip
        """Enqueue what the experts of a group compute for the rows of a part that chose them.

        The caller may compute further groups while `has_room`, and then must `give_back`.
        """
        s, uploaded = self._s, self._s.ring_events[group.index][1]
        if uploaded:
            C.ggml_backend_event_wait(s.device.compute.ptr, uploaded.ptr)
        self.computed.append(group)
        self._slots[group.experts] = range(len(group.experts))
        for places in self._cut(missing.of(group.experts), part):
            turn, n_padded = s.memory.write_unit(places, ids, self._slots)
            inputs = s.graphs.unit_inputs(turn, n_padded)
            unit = s.graphs.unit(il, group.index, n_padded)
            s.launch(inputs, f"the inputs of missing experts of layer {il}")
            s.memory.sent_unit(turn)
            s.launch(unit, f"the missing experts of layer {il}")

    def _cut(self, places: npt.NDArray[np.int32], part: list[Chunk]) -> list[npt.NDArray[np.int32]]:
        """Return the places of each unit: as few units as possible, of nearly equal size.

        On the CPU the bits of a product depend on how many rows of a graph chose the expert. A
        chunk must give the same bits as in a pass of its own.
        """
        is_exact = self._s.device.can.exact_sums
        n = len(part) if is_exact else -(-len(places) // (self._s.memory.most - 1))
        if n <= 1:  # numpy takes 10 us to find that
            return [places] if len(places) else []
        if not is_exact:
            return np.array_split(places, n)
        k = self._s.stage.hp.n_expert_used
        found = np.split(places, np.searchsorted(places, [k * chunk.row for chunk in part[1:]]))
        return [rows for rows in found if len(rows)]

    @property
    def has_room(self) -> bool:
        """Whether all experts that were asked for are sent, and half of the ring is free."""
        ring = self._s.ring
        return ring is None or 2 * self._crossing.n_room >= ring.n_groups * ring.n_each

    def give_back(self, kept: Mapping[int, int]) -> None:
        """Have further uploads into the groups that were computed.

        kept: experts that get slots before that.
        """
        for group in self.computed:
            self._s.vacate(group, kept)
            if free := self._s.ring_events[group.index][0]:
                C.ggml_backend_event_record(free.ptr, self._s.device.compute.ptr)
            self._crossing.give_back(group)
            self._send()
        self.computed.clear()

    def leave(self, il: int) -> None:
        """Note that all experts of a layer are computed."""
        n_chosen = len(self._chosen)
        self._forecast.note(n_chosen, len(self._crossing.asked(il)) - n_chosen)
        self._crossing.leave(il)
        self._chosen.clear()


class StageSweep:
    """What one stage does of a sweep.

    prompts: what is computed; their states at the cuts go to `saved`. readers: as the stage
    calls them. n_done: chunks of layers that are enqueued.
    """

    def __init__(
        self, sweeps: Sweeps, prompts: Sequence[SweptPrompt], readers: HiddenReaders, form: Form
    ) -> None:
        self._s, self._readers = sweeps, readers
        self._form = form
        self._prompts = {prompt.slot: prompt for prompt in prompts}
        self._state = sweeps.stage.state
        self._n_rows = sum(len(prompt.batch.tokens) for prompt in prompts)
        self._missing = MissingExperts(sweeps, self._n_rows)
        self._terms: PassTerms | None = None
        self._is_entering = self._is_last = False
        # what others choose is not what one prompt prefers
        self._is_alone = len(prompts) == 1
        # a layer that is not done with, its rows, and the event after which its choice is here
        self._unrecorded: tuple[int, int, Event | None] | None = None
        # of the last layer that is recorded: experts to keep, and their slots
        self._kept: dict[int, int] = {}
        # how often the rows chose each expert of a layer that may lack some
        self._counts: npt.NDArray[np.int32] | None = None
        self._n_enqueued = 0
        self.n_done, self._recorded = 0, -1

    def run(self, part: list[Chunk], is_last: bool) -> Iterator[SweepStep]:
        """Enqueue all layers for a part of the prompt, whose rows are here; yield before each step.

        is_last: no part comes after this one.
        """
        work = self._layers(part)
        self._is_last = is_last
        step = next(work, None)
        while step:
            yield step
            self._enter()
            pace = self._s.paces[self._n_enqueued % AHEAD]
            if pace:
                pace.wait()
            step = next(work, None)
            if pace:
                C.ggml_backend_event_record(pace.ptr, self._s.device.compute.ptr)
            self._n_enqueued += 1
        if is_last and self._s.residency is not None:
            self._s.residency.results_arrived()

    def _enter(self) -> None:
        """Bring counts and tables up to date, if another pass has run since the last step."""
        residency, misses = self._s.residency, self._s.misses
        if residency is None or (self._terms and residency.is_current(self._terms)):
            return
        self._missing.foreseen = -1
        self._kept = {}
        self._is_alone = self._is_alone and self._terms is None
        self._is_entering = True  # what begin_pass returns is lost if it is not carried out
        # a few rows would get slots, which is for passes
        n_tokens = max(self._n_rows, SHORT_PROMPT + 1)
        self._terms = residency.begin_pass(Kind.PREFILL, n_tokens)
        if misses:
            misses.begin_pass(self._terms)
        self._is_entering = False

    def _layers(self, part: list[Chunk]) -> Iterator[SweepStep]:
        s = self._s
        s.memory.inputs.begin(self._form, part[-1].segments[0])
        self._missing.foreseen = -1
        for il in s.stage.layers:
            lacks = s.stage.banks.n_slots[il] < s.stage.hp.n_expert
            yield from self._lacking_layer(il, part) if lacks else self._full_layer(il, part)
            self._end_layer(il, part, lacks)
        self._record()

    def _load(self, il: int, at: int, chunk: Chunk) -> tuple[int, PassShape]:
        """Copy a chunk to where graphs read it; return their rows, and the shape of its rectangle.

        They may have more rows than the chunk. The inputs come with the stage's first layer.
        """
        s, memory, segments = self._s, self._s.memory, chunk.segments
        if il == s.stage.layers.start:
            each = [(self._prompts[one.slot], one) for one in segments]
            tokens = np.concatenate(
                [swept.batch.tokens[one.first - swept.n_past :][: one.n] for swept, one in each]
            )
            embedding = s.stage.weights.embedding
            found = {one.slot: swept.batch.pictures for swept, one in each if swept.batch.pictures}
            memory.inputs.add(segments, tokens, embedding, memory.hidden, chunk.row, found)
        memory.copy(memory.hidden, chunk.row, s.carried["l_out"], 0, chunk.n)
        if s.stage.hp.layer(il).kv or self._form is not Form.PLAIN:
            memory.inputs.select(at)
        return memory.inputs.shape_of(segments, self._form)

    def _step(self, il: int, chunk: Chunk) -> SweepStep:
        if not self._s.stage.hp.layer(il).kv:
            return SweepStep("recurrent", chunk.n)
        n_kv = max(kv_length(self._state, segment.end) for segment in chunk.segments)
        return SweepStep("attention", chunk.n, n_kv)

    def _full_layer(self, il: int, part: list[Chunk]) -> Iterator[SweepStep]:
        s = self._s
        for at, chunk in enumerate(part):
            yield self._step(il, chunk)
            built = s.graphs.layer(il, *self._load(il, at, chunk))
            s.launch(built, f"layer {il}", *s.memory.reads(built.outputs, il, chunk.row, chunk.n))
            s.memory.copy(s.carried["l_out"], 0, s.memory.hidden, chunk.row, chunk.n)
            self._copy_state(il, chunk)
            if at == 0:
                self._record()
            self.n_done += 1

    def _lacking_layer(self, il: int, part: list[Chunk]) -> Iterator[SweepStep]:
        s, missing, n_rows, residency = self._s, self._missing, part[-1].end, self._s.residency
        if residency is None:
            raise InternalError(f"layer {il} lacks experts in a runner without a cache")
        k = s.stage.hp.n_expert_used
        ids = s.memory.ids[il % 2, : k * n_rows]
        absent = np.zeros(k * n_rows, dtype=bool)
        waiting: tuple[int, Chunk, npt.NDArray[np.int32]] | None = None
        for at, chunk in enumerate(part):
            yield self._step(il, chunk)
            self._launch_chunk(il, at, chunk)
            launched = at, chunk, residency.cache.tables[il].copy()  # as the device knows it
            if at == 0:  # the link is busy meanwhile, and gets what room there is afterwards
                missing.send_ahead(il)
                self._record()
                missing.send_ahead(il)
            if waiting:
                self._ask(il, ids, absent, *waiting)
            waiting = launched
            self.n_done += 1
        yield SweepStep("experts", n_rows)  # what comes now waits for the last chunk
        if waiting:
            self._ask(il, ids, absent, *waiting)
        places = MissingPlaces(ids, absent, s.stage.hp.n_expert, k)
        for i, group in enumerate(missing.groups(il, len(part))):
            if i:
                yield SweepStep("experts", n_rows)
            missing.compute(il, group, places, ids, part)
            # what is given back at once is filled at once, so the link does not wait
            if not (self._is_alone and self._is_last and missing.has_room):
                self._give_back(il, ids)
                missing.send_ahead(il + 1)
        missing.leave(il)
        if s.sums_last:
            for chunk in part:
                yield SweepStep("sum", chunk.n)
                self._sum(il, chunk)

    def _launch_chunk(self, il: int, at: int, chunk: Chunk) -> None:
        """Enqueue mixer, router and resident experts of a chunk, and keep what they make."""
        s, memory, k, n = self._s, self._s.memory, self._s.stage.hp.n_expert_used, chunk.n
        n_built, shape = self._load(il, at, chunk)
        mixer, experts = s.graphs.mixer(il, n_built, shape), s.graphs.experts(il, n_built)
        s.launch(mixer, f"layer {il}", *memory.reads(mixer.outputs, il, chunk.row, n))
        event = s.routed[at % 2]
        if event:
            C.ggml_backend_event_record(event.ptr, s.device.compute.ptr)
        s.launch(experts, f"the experts of layer {il}")
        kept = {"post_norm": 1, "weights": k} | ({"expert_rows": k} if s.sums_last else {})
        for name, each in kept.items():
            memory.copy(s.carried[name], 0, memory.tensors[name], chunk.row * each, n * each)
        result = s.carried["residual" if s.sums_last else "l_out"]
        memory.copy(result, 0, memory.hidden, chunk.row, n)
        self._copy_state(il, chunk)

    def _ask(
        self, il: int, ids: npt.NDArray[np.int32], absent: npt.NDArray[np.bool_], at: int,
        chunk: Chunk, table: npt.NDArray[np.int32],
    ) -> None:  # fmt: skip
        """Wait for the choice of a chunk, and send the experts that it misses.

        table: where experts were when `experts` was launched.
        """
        k, event = self._s.stage.hp.n_expert_used, self._s.routed[at % 2]
        if event:
            event.wait()
        rows = slice(chunk.row * k, chunk.end * k)
        experts, counts = find_missing(il, ids[rows], table, absent[rows])
        self._counts = counts if at == 0 or self._counts is None else self._counts + counts
        self._missing.ask(il, experts)

    def _sum(self, il: int, chunk: Chunk) -> None:
        s, memory, k, n = self._s, self._s.memory, self._s.stage.hp.n_expert_used, chunk.n
        rows, norm = memory.tensors["expert_rows"], memory.tensors["post_norm"]
        memory.copy(rows, chunk.row * k, s.carried["expert_rows"], 0, n * k)
        memory.copy(norm, chunk.row, s.carried["post_norm"], 0, n)
        memory.copy(memory.hidden, chunk.row, s.carried["residual"], 0, n)
        s.launch(s.graphs.sum_rows(il, n), f"the sum of layer {il}")
        memory.copy(s.carried["l_out"], 0, memory.hidden, chunk.row, n)

    def _copy_state(self, il: int, chunk: Chunk) -> None:
        states = (*self._state.layer_states.get(il, ()), *self._state.rings.get(il, ()))
        for segment in chunk.segments if states else ():
            self._save(segment.slot, segment.end, states)

    def _save(self, slot: int, n_past: int, states: Sequence[Tensor]) -> None:
        """Copy states of a sequence to the host if n_past is a cut."""
        s = self._s
        for copy in self._prompts[slot].saved:
            if copy.n_past == n_past:
                s.stage.sequences.copies.take_layer(copy, slot, self._state, states)

    def _end_layer(self, il: int, part: list[Chunk], lacks: bool) -> None:
        s, n_rows = self._s, part[-1].end
        rows = [one for chunk in part for one in chunk.rows]
        last_out = self._state.last_out if il == s.stage.layers[-1] else None
        # those of one prompt lie together
        for group in [rows] if len(self._prompts) == 1 else [[one] for one in rows]:
            row, (slot, first, *_) = group[0]
            if reader := self._readers.get(slot, {}).get(il):
                reader(s.memory.hidden, row, sum(segment.n for _, segment in group), first)
            if last_out is not None:
                self._keep_last_out(last_out, group)
        if s.residency is not None and s.stage.hp.layer(il).is_routed:
            done = None if lacks else s.layer_done[il % 2]  # the host has read what a layer lacks
            if done:
                C.ggml_backend_event_record(done.ptr, s.device.compute.ptr)
            self._unrecorded = il, n_rows, done
            self._counts = self._counts if lacks else None

    def _keep_last_out(self, last_out: Tensor, rows: list[tuple[int, Segment]]) -> None:
        """Enqueue copies of the output of a prompt's last row of these, and of those before cuts.

        A reader of rows that come later reads it.
        """
        memory = self._s.memory
        for row, (slot, first, n, _) in rows:
            is_cut = any(copy.n_past == first + n for copy in self._prompts[slot].saved)
            if is_cut or row == rows[-1][0]:
                memory.copy(memory.hidden, row + n - 1, last_out, slot, 1)
                self._save(slot, first + n, [last_out])

    def _record(self) -> None:
        """Record the choice in the last layer, while the device computes the next one."""
        if self._unrecorded:
            il, n_rows, done = self._unrecorded
            if done:
                done.wait()
            ids = self._s.memory.ids[il % 2, : n_rows * self._s.stage.hp.n_expert_used]
            if self._missing.computed:
                self._give_back(il, ids)
            if self._recorded != il:
                self._s.record(il, ids, self._counts)
            self._unrecorded = None

    def _give_back(self, il: int, ids: npt.NDArray[np.int32]) -> None:
        """Give the groups of layer il back that were computed.

        What the policy prefers is kept if one prompt alone chose: so its choice is recorded before.
        """
        residency = self._s.residency
        if residency and self._is_alone and self._is_last and self._recorded != il:
            missing = self._s.record(il, ids, self._counts)
            self._kept, self._recorded = residency.preferred(il, missing), il
        self._missing.give_back(self._kept if self._recorded == il else {})

    def head(self, batch: SweepBatch, row: int, n: int) -> Output:
        """Compute the head for rows of the part, which are of one prompt, and wait for it."""
        s, draws = self._s, batch.draws
        kind = Results.LOGITS if draws is None else Results.CANDIDATES
        kind = Results.ARGMAX if batch.greedy else kind
        built = s.graphs.head(n, kind)
        s.memory.copy(s.memory.hidden, row, s.carried["l_out"], 0, n)
        if draws is not None:
            s.memory.inputs.send_draws(draws)
        s.launch(built, "the output head", *s.results.reads(built.outputs))
        s.device.finish()
        output, finite = s.results.read(kind, n)
        if not finite.all():
            message = f"{s.device.name} computed logits that are not finite"
            raise NotFinite(message, (batch.slot,), output)
        return output

    def cancel(self) -> None:
        """Wait for the device, and undo what is recorded of the sweep; safe to call again."""
        s = self._s
        s.device.synchronize()
        if s.misses:
            s.misses.store.ring.forget()
        if s.residency is not None and (
            self._is_entering or (self._terms and s.residency.is_current(self._terms))
        ):
            s.residency.rollback()
