"""What fits: more positions into a sequence and into the pool of all, and sequences into a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import ContextOverflow, PoolFull, RequestError
from ..resident.layout import PAGE
from ..runner import AnyRunner, Batch


class Room:
    """Tells what fits, before anything changes."""

    def __init__(self, runner: AnyRunner, n_ctx: int) -> None:
        """n_ctx: most positions of a sequence."""
        self._n_rows = runner.max_rows
        self._shapes = [part.shapes for part in runner.parts]
        self._n_ctx = n_ctx
        self._state = runner.sequences

    @property
    def n_free_pages(self) -> int:
        """Return how many pages of the KV caches belong to no sequence."""
        return self._state.pool.n_free

    def pages_for(self, seq: int, n_rows: int) -> int:
        """Return how many pages a sequence needs, beyond those it has, for n_rows more rows."""
        return self._state.pool.needed(seq, self._state.n_past[seq] + n_rows)

    def rows(self, seq: int) -> int:
        """Return how many more rows a sequence can take while the others keep their pages."""
        most = min(self._state.pool.room(seq), self._n_ctx)
        return max(0, most - self._state.n_past[seq])

    def groups(self, seqs: Iterable[int], n_rows: int = 1) -> list[tuple[int, ...]]:
        """Divide sequences among as few passes of n_rows rows of each as will fit.

        That is one pass, unless sequences share the pool and attention gathers their rows: then a
        pass is as long as its longest sequence times their number.
        """
        n_past, each = self._state.n_past, tuple(seqs)
        for shapes in self._shapes:
            if not shapes.is_paged(len(each) * n_rows):
                break
        else:
            return [each] if each else []
        lengths = {seq: self._state.n_kv(n_past[seq] + n_rows) for seq in each}
        return self._state.shape.groups(lengths)

    def require(self, more: Mapping[int, int]) -> None:
        """Check that sequences can take so many more rows."""
        n_needed = 0
        for seq, n_rows in more.items():
            last = self._state.n_past[seq] + n_rows
            if last > self._n_ctx:
                raise ContextOverflow(
                    f"{last} positions, the context holds {self._n_ctx}; raise -c"
                )
            n_needed += self._state.pool.needed(seq, last)
        if n_needed and n_needed > self.n_free_pages:
            raise PoolFull(n_needed, self.n_free_pages)

    def require_place(self, seq: int, n_rows: int, n_kept: int, n_shared: int = 0) -> None:
        """Check that a sequence can have n_rows positions once it gives up others than n_kept.

        n_shared: positions that it gets from another one, whose whole pages it shares.
        """
        n_needed, n_free = self._state.pool.lacking(seq, n_rows, n_kept, n_shared // PAGE)
        if n_needed > n_free:
            raise PoolFull(n_needed, n_free)

    def require_pass(self, batch: Batch) -> None:
        """Check that the sequences of a pass can take its rows, and that they fit one pass."""
        slots, most = batch.slots, self._n_rows
        self.require({slot: batch.n_rows(at) for at, slot in enumerate(slots)})
        if batch.tokens.size > most:
            raise RequestError(f"{batch.tokens.size} rows in a pass; allowed: 1 to {most} in all")
        if len(slots) == 1:
            return
        n_kv = max(shapes.of(batch).n_kv for shapes in self._shapes)
        if n_kv > self._state.shape.most_kv(len(slots)):
            raise RequestError(
                f"a pass over {len(slots)} sequences reads up to {n_kv} positions of each, and the "
                f"KV cache has {self._state.shape.n_rows} in all; divide them as `groups` says"
            )
