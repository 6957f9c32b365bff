"""What both runners share: inputs, results, and the NaN/inf check of the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PAGED, PassShape
from ..errors import InternalError, RequestError
from ..ggml.choose import DRAW_ROWS
from ..ggml.lib import C, ffi
from ..graphs.cache import GraphCache
from ..graphs.head import HeadOutputs, Results
from ..graphs.hidden import HiddenRows
from ..graphs.inputs import InputBlock
from ..graphs.paged import can_page
from ..kinds import Kind
from ..resident.layout import MAX_PAGED_ROWS, PADDED_WIDTHS, graph_bytes
from ..resident.stage import Stage
from .batch import Batch, Callback, Once, Predicate
from .commit import Commits
from .results import NotFinite, Output, ResultMemory
from .sweep import Sweep
from .sweep_batch import SweepBatch
from .sweeps import Sweeps

_PREFILL, _DECODE = Kind.PREFILL, Kind.DECODE  # members of an Enum are slow to look up


class Runner(ABC):
    """Runs passes over one stage, one at a time: `submit`, then `collect`.

    Only one pass may be in flight, because there is memory for the results of one.

    hidden: the rows between graphs and stages, or None. A stage without the embedding needs the
    rows of a pass there before `submit`; a stage without the head leaves them there. The device is
    `stage.device`. sweeps: what computes prompts layer by layer; None if it was not asked for.
    max_rows: most rows of a pass. sequences: of all stages. widths: numbers of sequences to which
    decode passes are padded; without any, none is.
    """

    mode: str
    sweeps: Sweeps | None = None

    def __init__(self, stage: Stage, n_ubatch: int, hidden: HiddenRows | None) -> None:
        self.stage = stage
        self.device = device = stage.device
        self.sequences = stage.sequences
        self.hp = stage.hp
        self.n_ubatch = n_ubatch
        self.hidden = hidden
        self.graphs = GraphCache(device, graph_bytes(stage.state.n_seq, device.can.streams))
        self.max_rows = stage.state.shape.pass_rows(n_ubatch)
        self._inputs = InputBlock(stage, n_ubatch, hidden)
        self._results = ResultMemory(device, stage.hp.n_vocab)
        self._commits = Commits(stage, self.graphs)
        self._can_page = can_page(stage)
        counts = range(1, stage.state.n_seq + 1)
        self._most_kv = [0, *map(stage.state.shape.most_kv, counts)]  # by sequences of a pass
        self.widths = PADDED_WIDTHS if self.device.can.streams else ()
        self._has_head = stage.has_head
        self._pending: Batch | None = None
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
    def is_idle(self) -> bool:
        """Whether no pass is in flight."""
        return self._pending is None

    def watch_results(self) -> None:
        """Have `has_results` know the results of the passes from now on."""
        self._results.is_watched = True

    def keep_logits(self) -> bool:
        """Have `logits` return rows of now until `release_logits`, whatever is computed meanwhile.

        Return False if there is no device memory for a copy.
        """
        return self._results.keep()

    def release_logits(self) -> None:
        """End what `keep_logits` began."""
        self._results.release()

    def has_results(self) -> bool:
        """Whether `collect` would not wait; may be false although it would not."""
        return self._results.have_arrived()

    @property
    def compute_bytes(self) -> int:
        """Device bytes of inputs, intermediates, rows between graphs and rows of a sweep."""
        parts = [part.n_bytes for part in (self.hidden, self.sweeps) if part]
        return self._inputs.n_bytes + self.graphs.n_bytes + sum(parts)

    def require_idle(self) -> None:
        """Check that no pass is in flight."""
        if self._pending is not None:
            raise RequestError("a pass is in flight; collect its results first")

    def drop(self, slot: int) -> None:
        """Forget a sequence's verified rows, and its results in flight.

        The pass in flight is dropped once all its sequences are.
        """
        self._commits.forget(slot)
        if self._pending is not None and slot in self._pending.slots:
            self._dropped.add(slot)
            if self._dropped.issuperset(self._pending.slots):
                self.give_up()  # the next pass reuses host memory of this one

    def give_up(self) -> None:
        """Wait for the pass in flight, if there is one, and forget its results."""
        if self._pending is not None:
            self.device.synchronize()
            self._pending = None

    def recover(self) -> None:  # noqa: B027
        """Undo what is left of a pass that failed; before a sweep goes on."""

    def is_paged(self, n_rows: int, kind: Kind = _DECODE) -> bool:
        """Return whether a pass of n_rows rows reads K and V through pages.

        A prompt does only where its bits must be those of any other pass.
        """
        is_fit = kind is not _PREFILL or self.device.is_invariant
        return self._can_page and n_rows <= MAX_PAGED_ROWS and is_fit

    def shape_of(self, batch: Batch) -> PassShape:
        """Return what determines the graphs of a pass."""
        state, (n_seqs, n_seq_tokens) = self.stage.state, batch.tokens.shape
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
        taps = self.stage.taps
        is_lost = n_seqs <= taps.n_rows < width
        return n_seqs if is_lost or width > self.stage.state.n_seq else width

    def longest(self, shape: PassShape) -> PassShape:
        """Return the shape whose graphs serve this one too, with `BuiltGraph.set_length`.

        If a device has streams, a graph may be running, or be captured. Then it is shape itself.
        """
        if self.device.can.streams or shape.n_kv == PAGED:
            return shape
        return shape._replace(n_kv=self._most_kv[shape.n_seqs])

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
        self,
        batch: Batch,
        cancelled: Predicate = lambda: False,
        begins: Callback = lambda: None,
        meanwhile: Once | None = None,
    ) -> None:
        """Start a pass. The caller has checked token ids and context length.

        begins: called before the first graph is launched. After an error that comes later, the
        caller must reset the sequences of the pass. After an earlier one, or after any error of a
        verify pass, it must truncate them to what they held. meanwhile: called if the host would
        wait for the device; it must not use the device.
        """
        shape = self.prepare(batch)
        self.fill(batch, shape)
        run_out(self.launch(batch, shape, cancelled, begins, self.pauses(meanwhile)), meanwhile)

    def prepare(self, batch: Batch) -> PassShape:
        """Build what a pass needs; `fill` and `launch` follow. After an error nothing has changed.

        Return what determines its graphs.
        """
        self.require_idle()
        shape = self.shape_of(batch)
        self._results.forget()
        if self._commits.pending:
            self._commits.begin(batch)
        if batch.tree:
            self._reserve_drafts(batch.tokens.size)
        # graphs first: building one may use the device, and must not disturb the uploaded inputs
        self._prepare(shape, batch)
        return shape

    def pauses(self, meanwhile: Once | None) -> Predicate | None:
        """Return whether `launch` is to pause while there is other work; None: never."""
        if meanwhile is None or not self.device.can.streams:  # there a launch computes: no waiting
            return None
        return lambda: meanwhile.is_due

    def launch(
        self,
        batch: Batch,
        shape: PassShape,
        cancelled: Predicate,
        begins: Callback,
        may_pause: Predicate | None = None,
    ) -> Generator[None, None, None]:
        """Start the pass whose inputs are on their way, with pauses: the host may do other work.

        may_pause: whether to pause rather than to wait for the device; None: never. If the
        iterator is closed before its end, the pass has failed.
        """
        yield from self._launch(shape, cancelled, begins, may_pause)
        self.advance(batch)
        self._dropped.clear()
        self._pending = batch
        if batch.tree:
            self._commits.verified(batch)

    def sweep(self, *batches: SweepBatch) -> Sweep:
        """Return a sweep over prompts of different sequences; `Sweep.begin` begins it.

        Several have no results of all rows, and `may_join` is true of them.
        """
        if self.sweeps is None:
            raise InternalError("this runner has no memory for prompts")
        return Sweep([self.sweeps], batches)

    def _reserve_drafts(self, n_rows: int) -> None:
        """Make room for what a verify pass keeps of its rows."""
        state = self.stage.state
        if state.drafts.n_rows < n_rows:
            state.require_words("a verify pass")
            self.device.synchronize()
            # first, because an interrupt must not leave graphs with the addresses of freed memory
            self.graphs.clear()
            state.drafts.reserve(n_rows)

    def commit(
        self, paths: Mapping[int, list[int]], begins: Callback = lambda: None
    ) -> dict[int, list[int]]:
        """Enqueue the commit of verified rows; see `Commits.commit`."""
        self.require_idle()
        self._results.forget()
        return self._commits.commit(paths, begins)

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results."""
        batch = self._pending
        if batch is None:
            raise RequestError("no pass is in flight; submit one first")
        C.ggml_backend_synchronize(self.device.compute.ptr)
        self._pending = None
        self.device.check_alive()
        if not self._has_head:
            return Output()
        n_out = batch.tokens.size if batch.all_rows else len(batch.slots)
        output, finite = self._results.read(batch.results, n_out)
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
        if self._pending is not None and not self._results.is_kept:
            raise InternalError(f"the logits of row {row} are not computed yet")
        return self._results.logits(row)

    def _result_reads(self, head: HeadOutputs | None) -> tuple[object, int]:
        """Return the copies of the results to the host and how many they are.

        They are check, then main; none without a head.
        """
        if head is None:
            return ffi.NULL, 0
        return self._results.reads(head), 2

    def reserve_graphs(self, n_draft: int = 0) -> None:
        """Build the graphs of the largest passes, so that the shared block never grows later.

        n_draft: drafted tokens of each sequence in the largest verify pass; 0 for none. Passes of a
        prompt that return results of all rows may still need more.
        """
        n_rows = min(n_draft + 1, self.n_ubatch)
        if n_draft:
            self._reserve_drafts(n_rows * self.stage.state.n_seq)  # drops graphs
        n_whole = self.stage.state.shape.n_whole
        self._reserve(Kind.PREFILL, self.n_ubatch, self.n_ubatch * n_whole)
        # whose attention over pages has memory of its own
        if self._can_page:
            self._reserve(Kind.DECODE, 1, MAX_PAGED_ROWS)
        if self.sweeps:
            self.sweeps.reserve()
            self.sequences.snapshots.reserve()
        if not n_draft:
            return
        self._reserve(Kind.VERIFY, n_rows)
        if self._can_page and n_rows <= MAX_PAGED_ROWS:
            self._reserve(Kind.VERIFY, n_rows, MAX_PAGED_ROWS)
        self._commits.reserve(n_rows)

    def _reserve(self, kind: Kind, n_rows: int, most: int = 1 << 30) -> None:
        """Build the largest pass of n_rows rows for each sequence, and of at most `most` rows."""
        state, is_tree = self.stage.state, kind is Kind.VERIFY
        n_seqs = max(1, min(state.n_seq, state.pool.n_pages, most // n_rows))
        is_paged = self.is_paged(n_rows * n_seqs, kind)
        n_kv = PAGED if is_paged else state.shape.most_kv(n_seqs)
        n_out = n_seqs * n_rows if is_tree else n_seqs
        n_out *= self._has_head
        shape = PassShape(n_rows, n_seqs, n_kv, n_out, is_tree, is_tree)
        # what takes most memory
        self._build(shape, kind, Results.CANDIDATES if n_out <= DRAW_ROWS else Results.ARGMAX)

    @abstractmethod
    def _build(self, shape: PassShape, kind: Kind, results: Results) -> None:
        """Build the graphs of a pass."""

    @abstractmethod
    def build_ahead(self, batch: Batch) -> None:
        """Build the graphs of a pass that will be submitted later, also while one is in flight."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Leave which experts are on the device as it is; see `LayeredRunner.rehearsing`."""
        return nullcontext()

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
        if self.sweeps:
            self.sweeps.close()
        self.graphs.close()
        self._commits.close()
        self._inputs.close()
        if self.hidden:
            self.hidden.close()
        self._results.close()


def run_out(launch: Generator[None, None, None], meanwhile: Once | None) -> None:
    """Do all of `Runner.launch`, and the other work in its pauses."""
    try:
        for _ in launch:
            if meanwhile:
                meanwhile()
    finally:
        launch.close()  # if the other work fails, the pass has failed
