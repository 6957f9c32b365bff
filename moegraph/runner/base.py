"""What both kinds of runner share (whole.py, layered.py): shapes, inputs, results, commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PAGED, PassShape
from ..errors import RequestError
from ..ggml.choose import DRAW_ROWS
from ..ggml.handles import Owner
from ..ggml.lib import C
from ..ggml.memory import Block, Sender
from ..ggml.ops import I32, MAX_TREE_ROWS, Builder
from ..graphs.cache import BuiltGraph, GraphCache
from ..graphs.head import Results
from ..graphs.inputs import HiddenRows, InputBlock
from ..graphs.paged import can_page
from ..kinds import Kind
from ..resident.layout import MAX_PAGED_ROWS, PADDED_WIDTHS, graph_bytes
from ..resident.stage import Stage
from ..units import round_up
from .batch import Batch, Callback, Once, Predicate
from .results import NotFinite, Output, ResultMemory
from .sweep import Sweep
from .sweep_batch import SweepBatch
from .sweeps import Sweeps

_ALIGN = 256


class Commits(Owner):
    """Commits rows that a verify pass computed: a sequence then holds one path of its tree.

    A verify pass writes K and V of its rows after the positions of the sequence, in the order of
    rows, and leaves the recurrent states as they are. The commit moves K and V of the paths to
    where they belong, unless they are there, and runs the recurrences over the paths. One graph
    does that for any number of sequences, whose paths may differ in length.

    Inputs of a commit of up to n rows of each of s sequences, all I32: slots, lengths [s]; path
    [n, s], rows of the verify pass; hidden_rows [n * s], of the ring of hidden states;
    sources, targets [n * s], rows of the KV caches.

    pending: by sequence, the pass that verified its rows, and its place in that pass.
    """

    def __init__(self, stage: Stage, graphs: GraphCache) -> None:
        self._stage = stage
        self._graphs, self._has_head = graphs, stage.has_head
        n_seq, size = stage.state.n_seq, 0
        self._offsets: dict[str, int] = {}
        moved = ("sources", "targets", *("ring_sources", "ring_targets") * bool(stage.state.ring))
        for name in ("slots", "lengths", "path", "hidden_rows", *moved):
            self._offsets[name] = size
            n = n_seq if name in ("slots", "lengths") else n_seq * MAX_TREE_ROWS
            size = round_up(size + 4 * n, _ALIGN)
        shapes, what = {"all": (1, size // 4)}, "the inputs of commits"
        self._block = self.own(Block(stage.device, shapes, what, "lower -c"))
        self._sender, self._n_bytes = self.own(Sender(stage.device, size)), size
        self.pending: dict[int, tuple[Batch, int]] = {}

    def begin(self, batch: Batch) -> None:
        """Note that a pass is launched: it overwrites what can be committed now."""
        if batch.tree:
            self.pending.clear()
            self.make_room(batch.tokens.size)
        else:
            for slot in batch.slots:
                self.pending.pop(slot, None)

    def make_room(self, n_rows: int) -> None:
        """Make room for what a verify pass keeps of its rows."""
        state = self._stage.state
        if state.drafts.n_rows < n_rows:
            state.require_words("a verify pass")
            self._stage.device.synchronize()
            # first, because an interrupt must not leave graphs with the addresses of freed memory
            self._graphs.clear()
            state.drafts.reserve(n_rows)

    def verified(self, batch: Batch) -> None:
        """Note that the rows of a verify pass can be committed."""
        self.pending.update({slot: (batch, seq) for seq, slot in enumerate(batch.slots)})

    def commit(self, paths: Mapping[int, list[int]], begins: Callback) -> dict[int, list[int]]:
        """Enqueue that sequences take the rows of a path each; return their tokens.

        paths: by sequence, rows of it in the last verify pass, from a root on, each the child of
        the one before. The pass has been collected. begins: called before the launch; after an
        error that comes later, the caller must reset the sequences whose paths are not empty. An
        earlier one changes nothing.
        """
        tokens = {slot: self._tokens(slot, path) for slot, path in paths.items()}
        longer = {slot: path for slot, path in paths.items() if path}
        if longer:
            self._launch(longer, begins)
        for slot in paths:
            self.pending.pop(slot, None)
        return tokens

    def _tokens(self, slot: int, path: list[int]) -> list[int]:
        """Return the tokens of a path that can be committed."""
        entry = self.pending.get(slot)
        if entry is None:
            raise RequestError(
                f"sequence {slot} has no rows to commit; run a verify pass over it first"
            )
        batch, seq = entry
        wrong = batch.tree.require_path(seq, path) if batch.tree else "there is no tree"
        if wrong:
            raise RequestError(f"sequence {slot}: {path} is not a path of its tree: {wrong}")
        return [int(batch.tokens[seq, row]) for row in path]

    def _launch(self, paths: Mapping[int, list[int]], begins: Callback) -> None:
        """Enqueue the commit of paths of at least one row each."""
        state, at = self._stage.state, (max(map(len, paths.values())), len(paths))
        moves = any(path != list(range(len(path))) for path in paths.values())
        built = self.graph(*at, moves)  # first: building one may use the device
        self._fill(*at, paths, moves)
        begins()
        self._graphs.launch(built, f"the commit of {sum(map(len, paths.values()))} rows")
        if self._has_head:  # the last stage has them too
            for slot, path in paths.items():
                state.n_past[slot] += len(path)

    def graph(self, n: int, n_seqs: int, moves: bool) -> BuiltGraph:
        """Return the commit of up to n rows of each of n_seqs sequences.

        moves: K and V of some rows are not where they belong.
        """
        return self._graphs.get(
            ("commit", n, n_seqs, moves),
            64 * len(self._stage.layers),
            lambda b: self._build(b, n, n_seqs, moves),
        )

    def _fill(self, n: int, n_seqs: int, paths: Mapping[int, list[int]], moves: bool) -> None:
        """Write the inputs and enqueue their upload; waits for the upload of the last commit."""
        state, kept = self._stage.state, self._stage.hidden_states
        rows: dict[str, npt.NDArray[np.int32]] = {}
        host = self._sender.begin()
        for name, at in self._offsets.items():
            n_words = n_seqs if name in ("slots", "lengths") else n_seqs * n
            rows[name] = host[at : at + 4 * n_words].view(np.int32).reshape(n_seqs, -1)
        for seq, (slot, path) in enumerate(paths.items()):
            m, first = len(path), state.n_past[slot]
            batch, place_in_pass = self.pending[slot]
            rows["slots"][seq], rows["lengths"][seq] = slot, m
            # rows are counted over all sequences of the pass; those after the first m do not matter
            rows["path"][seq] = place_in_pass * batch.tokens.shape[1]
            rows["path"][seq, :m] += np.array(path, dtype=np.int32)
            if kept.n_kept:
                rows["hidden_rows"][seq] = kept.spare_row
                rows["hidden_rows"][seq, :m] = kept.ring_rows(slot, first, m)
            if moves:
                rows["sources"][seq] = rows["targets"][seq] = state.spare_row
                rows["sources"][seq, :m] = [state.pool.row(slot, first + row) for row in path]
                rows["targets"][seq, :m] = [state.pool.row(slot, first + i) for i in range(m)]
            if moves and state.ring:
                for name, places in (("ring_sources", path), ("ring_targets", range(m))):
                    rows[name][seq] = state.ring_spare_row
                    each = first + np.array(places)
                    rows[name][seq, :m] = state.ring_rows(np.array(slot), each)
        self._sender.send(self._block.tensors["all"], self._n_bytes)

    def _build(self, b: Builder, n: int, n_seqs: int, moves: bool) -> None:
        stage, s = self._stage, n_seqs
        shapes = {"slots": (s,), "lengths": (s,), "path": (n, s)}
        leaves = {
            name: self._block.put(
                b.leaf(I32, shapes.get(name, (n * s,)), f"commit_{name}"), "all", at
            )
            for name, at in self._offsets.items()
        }
        C.ggml_set_input(leaves["slots"])  # kernels read it early
        for il in stage.layers:
            layer = stage.hp.layer(il)
            if layer.states:
                rows, w = stage.state.drafts.leaves(b, il), stage.weights.layer(il)
                inputs = leaves["slots"], leaves["path"], leaves["lengths"]
                stage.hp.commit(b, w, stage.state, rows, *inputs, il)
            if layer.kv and moves:
                words = (stage.state.k_words, stage.state.v_words)
                kind = "ring_" if layer.window else ""
                for cache in [part[il] for part in words if il in part]:
                    copy = b.get_rows(cache, leaves[f"{kind}sources"])
                    b.expand(b.set_rows(cache, copy, leaves[f"{kind}targets"]))
        path = b.reshape(leaves["path"], n * s)
        stage.hidden_states.append_path(b, path, leaves["hidden_rows"])


_PREFILL, _DECODE = Kind.PREFILL, Kind.DECODE  # members of an Enum are slow to look up


class PassShapes:
    """Decides what determines the graphs of a pass over a stage.

    can_page: attention can read K and V through pages. widths: numbers of sequences to which decode
    passes are padded; without any, none is.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage, self._state, self._device = stage, stage.state, stage.device
        self.can_page, self._has_head = can_page(stage), stage.has_head
        counts = range(1, stage.state.n_seq + 1)
        self._most_kv = [0, *map(stage.state.shape.most_kv, counts)]  # by sequences of a pass
        self.widths = PADDED_WIDTHS if self._device.can.streams else ()

    def is_paged(self, n_rows: int, kind: Kind = _DECODE) -> bool:
        """Return whether a pass of n_rows rows reads K and V through pages.

        A prompt does only where its bits must be those of any other pass.
        """
        is_fit = kind is not _PREFILL or self._device.is_invariant
        return self.can_page and n_rows <= MAX_PAGED_ROWS and is_fit

    def of(self, batch: Batch) -> PassShape:
        """Return what determines the graphs of a pass."""
        state, (n_seqs, n_seq_tokens) = self._state, batch.tokens.shape
        slots, n_past = batch.slots, state.n_past
        longest = n_past[slots[0]] if n_seqs == 1 else max(n_past[slot] for slot in slots)
        is_paged = self.is_paged(batch.tokens.size, batch.kind)
        n_kv = PAGED if is_paged else state.positions.n_kv(longest + n_seq_tokens)
        n_out, tree = n_seqs * n_seq_tokens if batch.all_rows else n_seqs, batch.tree
        if not self._has_head:
            n_out = 0
        if tree is None and batch.kind is _DECODE and n_seqs > 1:
            n_pad = self._width(n_seqs) - n_seqs
            n_out += n_pad if n_out else 0
            return PassShape(n_seq_tokens, n_seqs + n_pad, n_kv, n_out, False, n_pad > 0)
        if tree is None:
            return PassShape(n_seq_tokens, n_seqs, n_kv, n_out)
        return PassShape(n_seq_tokens, n_seqs, n_kv, n_out, True, tree.is_ragged)

    def _width(self, n_seqs: int) -> int:
        """Return how many sequences a decode pass of n_seqs has, padding included.

        Padding does not keep a pass from leaving its rows to drafters.
        """
        width = next((width for width in self.widths if width >= n_seqs), n_seqs)
        is_lost = n_seqs <= self._stage.hidden_states.n_rows < width
        return n_seqs if is_lost or width > self._state.n_seq else width

    def longest(self, shape: PassShape) -> PassShape:
        """Return the shape whose graphs serve this one too, with `BuiltGraph.set_length`.

        If a device has streams, a graph may be running, or be captured. Then it is shape itself.
        """
        if self._device.can.streams or shape.n_kv == PAGED:
            return shape
        if self._state.ring and shape.n_tokens == 1:  # see `Window`
            return shape
        return shape._replace(n_kv=self._most_kv[shape.n_seqs])


class Runner(Owner, ABC):
    """Runs passes over one stage, one at a time: `submit`, then `collect`.

    Only one pass may be in flight, because there is memory for the results of one.

    hidden: the rows between graphs and stages. A stage without the embedding needs the rows of a
    pass there before `submit`; a stage without the head leaves them there. The device is
    `stage.device`. sweeps: what computes prompts layer by layer.
    max_rows: most rows of a pass. sequences: of all stages. commits: of verified rows. results: of
    the last pass. pending: the pass in flight.
    """

    mode: str
    sweeps: Sweeps

    def __init__(self, stage: Stage, n_ubatch: int, hidden: HiddenRows) -> None:
        self.stage = stage
        self.device = device = stage.device
        self.sequences = stage.sequences
        self.hp = stage.hp
        self.n_ubatch = n_ubatch
        self.hidden = self.own(hidden)
        self.graphs = GraphCache(device, graph_bytes(stage.state.n_seq, device.can.streams))
        self.shapes = PassShapes(stage)
        self.max_rows = stage.state.shape.pass_rows(n_ubatch)
        self._inputs = self.own(InputBlock(stage, n_ubatch, hidden))
        self.results = self.own(ResultMemory(device, stage.hp.n_vocab))
        self.commits = self.own(Commits(stage, self.graphs))
        self.own(self.graphs)  # of memory that the others have
        self._has_head = stage.has_head
        self.pending: Batch | None = None
        self._dropped: set[int] = set()  # sequences whose results in flight are not wanted

    @property
    def parts(self) -> tuple[Runner, ...]:
        """Return the runners of all stages: this one."""
        return (self,)

    @property
    def n_built(self) -> int:
        """Return how many graphs were built."""
        return self.graphs.n_built

    @property
    def compute_bytes(self) -> int:
        """Device bytes of inputs, intermediates, rows between graphs and rows of a sweep."""
        parts = self._inputs, self.graphs, self.hidden, self.sweeps.memory
        return sum(part.n_bytes for part in parts)

    def require_idle(self) -> None:
        """Check that no pass is in flight."""
        if self.pending is not None:
            raise RequestError("a pass is in flight; collect its results first")

    def drop(self, slot: int) -> None:
        """Forget a sequence's verified rows, and its results in flight.

        The pass in flight is dropped once all its sequences are.
        """
        self.commits.pending.pop(slot, None)
        if self.pending is not None and slot in self.pending.slots:
            self._dropped.add(slot)
            if self._dropped.issuperset(self.pending.slots):
                self.give_up()  # the next pass reuses host memory of this one

    def give_up(self) -> None:
        """Wait for the pass in flight, if there is one, and forget it; undo one that failed."""
        if self.pending is not None:
            self.device.synchronize()
            self.pending = None

    def fill(self, batch: Batch, shape: PassShape) -> None:
        """Give the sequences pages for their rows, and enqueue the upload of the inputs."""
        state = self.stage.state
        for seq, slot in enumerate(batch.slots):
            state.pool.grow(slot, state.n_past[slot] + batch.n_rows(seq))
        self._inputs.fill(shape, batch.tokens, batch.slots, batch.tree, batch.draws)

    def advance(self, batch: Batch) -> None:
        """Record that the sequences hold the rows of a pass, once the last stage has them too.

        A verify pass must not change them: its rows are committed later, if at all.
        """
        if batch.tree is None and self._has_head:
            for slot in batch.slots:
                self.stage.state.n_past[slot] += batch.tokens.shape[1]

    def submit(
        self, batch: Batch, cancelled: Predicate = lambda: False, begins: Callback = lambda: None,
        meanwhile: Once | None = None,
    ) -> None:  # fmt: skip
        """Start a pass. The caller has checked token ids and context length.

        begins: called before the first graph is launched. After an error that comes later, the
        caller must reset the sequences of the pass. After an earlier one, or after any error of a
        verify pass, it must truncate them to what they held. meanwhile: called if the host would
        wait for the device; it must not use the device.
        """
        shape = self.prepare(batch)
        self.fill(batch, shape)
        run_out(self, batch, shape, cancelled, begins, meanwhile)

    def prepare(self, batch: Batch) -> PassShape:
        """Build what a pass needs; `fill` and `launch` follow. After an error nothing has changed.

        Return what determines its graphs.
        """
        self.require_idle()
        shape = self.shapes.of(batch)
        self.results.forget()
        if batch.tree or self.commits.pending:
            self.commits.begin(batch)
        # graphs first: building one may use the device, and must not disturb the uploaded inputs
        self._prepare(shape, batch)
        return shape

    def launch(
        self, batch: Batch, shape: PassShape, cancelled: Predicate, begins: Callback,
        may_pause: Predicate | None = None,
    ) -> Generator[None, None, None]:  # fmt: skip
        """Start the pass whose inputs are on their way, with pauses: the host may do other work.

        may_pause: whether to pause rather than to wait for the device; None: never. If the
        iterator is closed before its end, the pass has failed.
        """
        try:
            yield from self._launch(shape, cancelled, begins, may_pause)
            self.advance(batch)
            self._dropped.clear()
            self.pending = batch
        except BaseException:
            self.device.synchronize()  # the next pass reuses host memory of this one
            raise
        if batch.tree:
            self.commits.verified(batch)

    def sweep(self, *batches: SweepBatch) -> Sweep:
        """Return a sweep over prompts of different sequences; `Sweep.begin` begins it.

        Several have no results of all rows, and `may_join` is true of them.
        """
        return Sweep([self.sweeps], batches)

    def commit(
        self, paths: Mapping[int, list[int]], begins: Callback = lambda: None
    ) -> dict[int, list[int]]:
        """Enqueue the commit of verified rows; see `Commits.commit`."""
        self.require_idle()
        self.results.forget()
        return self.commits.commit(paths, begins)

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results."""
        batch = self.pending
        if batch is None:
            raise RequestError("no pass is in flight; submit one first")
        C.ggml_backend_synchronize(self.device.compute.ptr)
        self.pending = None
        self.device.check_alive()
        if not self._has_head:
            return Output()
        n_out = batch.tokens.size if batch.all_rows else len(batch.slots)
        output, finite = self.results.read(batch.results, n_out)
        if batch.tree:
            finite = finite | ~batch.tree.real.reshape(-1)  # padding rows have no results
        if not all(finite.tolist()):
            n_each = n_out // len(batch.slots)
            seqs = dict.fromkeys((np.flatnonzero(~finite) // n_each).tolist())
            bad = [batch.slots[seq] for seq in seqs if batch.slots[seq] not in self._dropped]
            if bad:
                message = f"{self.device.name} computed logits that are not finite"
                raise NotFinite(message, tuple(bad), output)
        return output

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a row of the pass that was collected last, F32 [n_vocab].

        The memory is used again by the next call. Call this before anything else is computed.
        """
        return self.results.logits(row)

    @abstractmethod
    def build(self, shape: PassShape, kind: Kind, results: Results) -> None:
        """Build the graphs of a pass, if they are not built; also while a pass is in flight."""

    @abstractmethod
    def _prepare(self, shape: PassShape, batch: Batch) -> None:
        """Build every graph of the pass that is not built yet."""

    @abstractmethod
    def _launch(
        self, shape: PassShape, cancelled: Predicate, begins: Callback, may_pause: Predicate | None
    ) -> Iterable[None]:
        """Enqueue the graphs of the pass and the copies of its results; see `launch`."""

    def close(self) -> None:
        """Wait for the device, then free graphs and transfer memory."""
        self.device.synchronize()
        super().close()


def run_out(
    part: Runner, batch: Batch, shape: PassShape, cancelled: Predicate, begins: Callback,
    meanwhile: Once | None,
) -> None:  # fmt: skip
    """Do all of `Runner.launch`, and the other work in its pauses.

    Where a launch computes, there is no waiting, and no pause.
    """
    pauses = meanwhile is not None and part.device.can.streams
    may_pause = (lambda: meanwhile.is_due) if meanwhile and pauses else None
    launch = part.launch(batch, shape, cancelled, begins, may_pause)
    try:
        for _ in launch:
            if meanwhile:
                meanwhile()
    finally:
        launch.close()  # if the other work fails, the pass has failed


def reserve_graphs(parts: Sequence[Runner], n_draft: int = 0) -> None:
    """Build the graphs of the largest passes of stages, so that shared blocks never grow later.

    n_draft: drafted tokens of each sequence in the largest verify pass; 0 for none. Passes of a
    prompt that return results of all rows may still need more.
    """
    for part in parts:
        n_rows = min(n_draft + 1, part.n_ubatch)
        state, can_page = part.stage.state, part.shapes.can_page
        if n_draft:
            part.commits.make_room(n_rows * state.n_seq)  # drops graphs
        _reserve(part, Kind.PREFILL, part.n_ubatch, part.n_ubatch * state.shape.n_whole)
        # whose attention over pages has memory of its own
        if can_page:
            _reserve(part, Kind.DECODE, 1, MAX_PAGED_ROWS)
        part.sweeps.graphs.reserve()
        part.sequences.snapshots.reserve()
        if not n_draft:
            continue
        _reserve(part, Kind.VERIFY, n_rows)
        if can_page and n_rows <= MAX_PAGED_ROWS:
            _reserve(part, Kind.VERIFY, n_rows, MAX_PAGED_ROWS)
        part.commits.graph(n_rows, state.n_seq, True)


def _reserve(part: Runner, kind: Kind, n_rows: int, most: int = 1 << 30) -> None:
    """Build the largest pass of n_rows rows for each sequence, and of at most `most` rows."""
    state, is_tree = part.stage.state, kind is Kind.VERIFY
    n_seqs = max(1, min(state.n_seq, state.pool.n_pages, most // n_rows))
    is_paged = part.shapes.is_paged(n_rows * n_seqs, kind)
    n_kv = PAGED if is_paged else state.shape.most_kv(n_seqs)
    n_out = n_seqs * n_rows if is_tree else n_seqs
    n_out *= part.stage.has_head
    shape = PassShape(n_rows, n_seqs, n_kv, n_out, is_tree, is_tree)
    # what takes most memory
    part.build(shape, kind, Results.CANDIDATES if n_out <= DRAW_ROWS else Results.ARGMAX)
