"""The prompts of a sweep: how their rows are cut into chunks and parts, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..errors import InternalError, NativeError
from ..ggml.ops import Tensor
from ..graphs.chunk import MAX_SEQS, Segment, rounded_places, rounded_seqs
from ..pictures import PictureRows
from ..resident.hostcopies import Snapshot, StatesCopy
from ..resident.sequences import Sequences
from .results import NotFinite, Output

HiddenReader = Callable[[Tensor, int, int, int], None]
# Sequence -> layer -> its reader.
HiddenReaders = Mapping[int, Mapping[int, HiddenReader]]


@dataclass(frozen=True)
class SweepBatch:
    """What a sweep computes.

    tokens: I32 numpy [n]. slot: the sequence that they continue. all_rows, greedy, draws: as in
    `Batch`; draws only without all_rows. n_skipped: of all rows, the first ones without results.
    cuts: positions at which chunks are cut and the recurrent states copied to host memory: they are
    in `Sweep.saved` once it has ended, as far as there was memory for them.
    as_pass: compute it as one pass.
    max_rows: most rows of a chunk, if fewer than there is memory for; 0: as many as that.
    is_rounded: rows of chunks are rounded up, so that few graphs serve prompts of all lengths.
    pictures: of the prompt, which begins with position 0; None if none of these rows is one's.
    readers: layer -> called with the outputs of that layer for some rows of the prompt: F32
    [n_embd, n_rows], the first of these rows in it, their number n, and the position of the first
    one. The rows come in order of position. The call enqueues on the compute stream what it wants
    of them, because the next layer overwrites them.
    """

    tokens: npt.NDArray[np.int32]
    slot: int = 0
    all_rows: bool = False
    greedy: bool = False
    draws: npt.NDArray[np.int32] | None = None
    cuts: Sequence[int] = ()
    as_pass: bool = False
    max_rows: int = 0
    is_rounded: bool = False
    pictures: PictureRows | None = None
    n_skipped: int = 0
    readers: Mapping[int, HiddenReader] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """Rows [row, row + n) of a part: those of each segment, one segment after the other."""

    row: int
    segments: tuple[Segment, ...]

    @property
    def n(self) -> int:
        """Return the rows of all segments."""
        return sum(segment.n for segment in self.segments)

    @property
    def end(self) -> int:
        """Return the row after the last one."""
        return self.row + self.n

    @property
    def rows(self) -> list[tuple[int, Segment]]:
        """Return each segment, and the row of its first position."""
        found, row = [], self.row
        for segment in self.segments:
            found.append((row, segment))
            row += segment.n
        return found


Cut = tuple[Segment, ...]


def _spans(n: int, first: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and end of what is between two cuts, of n positions from first on."""
    ends = sorted({cut for cut in cuts if first < cut < first + n} | {first + n})
    return list(zip([first, *ends], ends))


def cut_together(
    prompts: Sequence[tuple[int, int, int, Sequence[int]]],
    max_rows: int,
    fits: Callable[[Cut], bool],
    is_rounded: bool = False,
    pictures: Mapping[int, PictureRows] = MappingProxyType({}),
) -> list[Cut]:
    """Return chunks that have the rows of prompts.

    prompts: slot, first position, tokens and cuts of each. fits: whether there is memory for such a
    chunk; there is for one segment. The rows of a chunk, and the places of its rectangle (see
    `JointRows`), are at most max_rows, also if both are rounded up. pictures: of sequences; there
    are cuts where they begin and end.
    """
    left = {slot: _spans(n, first, cuts) for slot, first, n, cuts in prompts}
    found: list[Cut] = []
    while left:
        firsts = {
            slot: Segment(slot, at, end - at, slot in pictures and pictures[slot].has(at))
            for slot, ((at, end), *_) in left.items()
        }
        cut = _widest(firsts, max_rows, fits, is_rounded)
        for segment in cut:
            spans = left[segment.slot]
            spans[0] = (segment.end, spans[0][1])
            if spans[0][0] == spans[0][1]:
                spans.pop(0)
            if not spans:
                del left[segment.slot]
        found.append(cut)
    return found


def _widest(
    firsts: Mapping[int, Segment],
    max_rows: int,
    fits: Callable[[Cut], bool],
    is_rounded: bool,
) -> Cut:
    """Return the chunk with most rows; firsts: slot -> the next rows."""
    longest = sorted(firsts.values(), key=lambda one: -one.n)
    lengths = [one.n for one in longest]
    best: Cut = ()
    n_best = 0
    for n_seqs in range(1, min(len(longest), MAX_SEQS, max_rows) + 1):
        most = max_rows // n_seqs
        if is_rounded and n_seqs > 1:
            most = rounded_places(max_rows // rounded_seqs(n_seqs))
        if not most:
            break
        n = sum([min(length, most) for length in lengths[:n_seqs]])
        if n <= n_best:
            continue
        cut = tuple(one._replace(n=min(one.n, most)) for one in longest[:n_seqs])
        if n_seqs > 1 and not fits(cut):
            break
        best, n_best = cut, n
    return best


def cut_parts(chunks: Sequence[Cut], n_rows: int, n_chunks: int) -> list[list[Chunk]]:
    """Return the chunks of as few parts as possible, of at most n_rows rows in n_chunks chunks."""
    parts: list[list[Chunk]] = []
    n_used = n_rows
    for segments in chunks:
        n = sum(segment.n for segment in segments)
        if n_used + n > n_rows or len(parts[-1]) == n_chunks:
            parts.append([])
            n_used = 0
        parts[-1].append(Chunk(n_used, segments))
        n_used += n
    return parts


class SweptPrompt:
    """A prompt while a sweep computes it, perhaps together with others.

    n_past: positions of its sequence before it. saved: the states at the cuts, which arrive in host
    memory after the last step. n_whole: positions that all layers have. output: the results, after
    the last step; error: why there are none. has_left: nobody wants them; its sequence becomes what
    it was.
    """

    def __init__(self, batch: SweepBatch, sequences: Sequences) -> None:
        self.batch, self.slot = batch, batch.slot
        self._sequences = sequences
        self.n_past = self.n_whole = sequences.n_past[self.slot]
        self.saved: list[StatesCopy] = []
        self.output: Output | None = None
        self.error: NotFinite | None = None
        self.has_left = False
        self._before: Snapshot | None = None

    @property
    def n_end(self) -> int:
        """Return the positions of the sequence after the prompt."""
        return self.n_past + len(self.batch.tokens)

    def begin(self) -> None:
        """Take a snapshot, memory for the states at the cuts, and pages."""
        sequences = self._sequences
        if self.n_past:
            self._before = sequences.snapshot(self.slot)
        for cut in self.batch.cuts:
            try:
                sequences.copies.reserve()
                self.saved.append(sequences.copies.new_states(cut))
            except (NativeError, MemoryError):  # nothing but this copy depends on it
                break
        sequences.pool.grow(self.slot, self.n_end)

    @property
    def is_kept(self) -> bool:
        """Whether the sequence keeps the rows, once the sweep has ended."""
        return not (self.error or self.has_left)

    def end(self) -> None:
        """Have the sequence have the rows; what it was if there are no results."""
        if not self.is_kept:
            self.undo()
            return
        if self.output is None:
            raise InternalError("a prompt has ended without results")
        self._sequences.n_past[self.slot] = self.n_end
        self._sequences.copies.send()

    def undo(self) -> None:
        """Make the sequence what it was; safe to call again if it was interrupted."""
        if self._before:
            self._sequences.restore(self._before)
        elif self.n_past:  # it failed before anything was computed
            self._sequences.truncate(self.slot, self.n_past)
        else:
            self._sequences.reset(self.slot)

    def close(self, is_undone: bool) -> None:
        """Free what was taken to go back, which is impossible then; is_undone: all of it."""
        self.saved = [] if is_undone else self.saved
        if self._before:
            self._before.close()
