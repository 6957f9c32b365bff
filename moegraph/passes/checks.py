"""Checks before a pass: what callers give for it (ids, sequences, cancel tokens), and what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..arch.base import Architecture
from ..errors import ContextOverflow, PoolFull, RequestError
from ..events import CancelToken
from ..pictures import Picture, PictureRows
from ..resident.layout import PAGE
from ..runner import AnyRunner, Batch

# A sequence for each row of token ids, or the first of consecutive sequences.
Seqs = int | Sequence[int]
# One token for all sequences of a pass, or one for each of them; None cancels nothing.
Cancel = CancelToken | list[CancelToken | None] | tuple[CancelToken | None, ...] | None


def checked_ids(tokens: object, n_vocab: int) -> npt.NDArray[np.int32]:
    """Return token ids as I32, in the same numpy shape."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.size == 1:
        one: npt.NDArray[np.int32] = tokens  # one row of decode: the device waits for it
        if 0 <= one.item() < n_vocab:
            return one
    try:
        ids = np.asarray(tokens)
    except ValueError as error:  # rows of different lengths
        raise RequestError(f"token ids must be a list of integers: {error}") from error
    if ids.size == 0:
        return ids.astype(np.int32)
    is_large = ids.dtype.kind == "O" and all(isinstance(i, int) for i in ids.reshape(-1))
    if ids.dtype.kind not in "iu" and not is_large:
        got = {"f": "floats", "U": "text", "b": "booleans"}.get(ids.dtype.kind, "other values")
        raise RequestError(f"token ids must be integers, got {got}")
    if ids.min() < 0 or ids.max() >= n_vocab:
        at = int(np.flatnonzero((ids < 0) | (ids >= n_vocab))[0])
        raise RequestError(
            f"token id {ids.reshape(-1)[at]} at position {at} is out of range; "
            f"the vocabulary has ids 0 to {n_vocab - 1}"
        )
    return ids.astype(np.int32, copy=False)


def prompt_ids(tokens: object, n_vocab: int, has_pictures: bool = False) -> npt.NDArray[np.int32]:
    """Return the token ids of a prompt as I32 [n]."""
    if has_pictures:  # their ids are below 0
        ids = np.asarray(tokens, dtype=np.int32)
        checked_ids(np.maximum(ids, 0), n_vocab)
    else:
        ids = checked_ids(tokens, n_vocab)
    if ids.ndim != 1:
        raise RequestError(f"a prompt has token ids of shape {list(ids.shape)}; allowed: [n]")
    return ids


def picture_rows(
    ids: npt.NDArray[np.int32], pictures: Sequence[tuple[int, Picture]], hp: Architecture
) -> PictureRows | None:
    """Return the pictures of a prompt; None without any.

    Raises:
        RequestError: the prompt does not have their ids, or the model reads no pictures.
    """
    if not pictures:
        return None
    if not hp.rope_sections:
        raise RequestError(f"moegraph reads no pictures with models of the kind {hp.name}")
    rows = PictureRows(ids, pictures, hp.n_embd)
    if rows.n_rows != np.count_nonzero(ids < 0):
        raise RequestError("the prompt has ids of a picture that is not given")
    return rows


def checked_rows(tokens: object, n_vocab: int, n_ubatch: int) -> npt.NDArray[np.int32]:
    """Return the token ids of a pass as I32, numpy [n_seqs, n_seq_tokens]."""
    rows = np.ascontiguousarray(checked_ids(tokens, n_vocab))
    if rows.ndim < 2:
        rows = rows.reshape(1, -1)
    if rows.ndim > 2:
        raise RequestError(f"token ids have shape {rows.shape}; allowed: [n_seqs, n_tokens]")
    n_tokens = rows.shape[1]
    if not 1 <= n_tokens <= n_ubatch:
        raise RequestError(f"{n_tokens} rows in a pass; allowed: 1 to {n_ubatch} (-ub)")
    return rows


def slots_of(seq: Seqs, n_rows: int, n_seq: int) -> tuple[int, ...]:
    """Return the sequence of each of n_rows rows of token ids; the engine has n_seq sequences."""
    if not isinstance(seq, int):
        for slot in seq:
            require_seq(slot, n_seq)
        return tuple(seq)
    last = seq + n_rows - 1
    if not 0 <= seq <= last < n_seq:
        raise RequestError(
            f"the pass needs sequences {seq} to {last}; the engine has 0 to {n_seq - 1}"
        )
    return tuple(range(seq, last + 1))


def require_seq(seq: int, n_seq: int) -> None:
    """Check that an engine with n_seq sequences has this one."""
    if not 0 <= seq < n_seq:
        raise RequestError(f"there is no sequence {seq}; the engine has 0 to {n_seq - 1}")


def cancelled_of(cancel: Cancel, n_seqs: int) -> Callable[[], bool]:
    """Return whether all n_seqs sequences of a pass are cancelled, as a function."""
    if cancel is None:
        return bool
    if not isinstance(cancel, (list, tuple)):
        return cancel.is_set
    tokens = [token for token in cancel if token is not None]
    if len(cancel) != n_seqs:
        raise RequestError(f"{len(cancel)} cancel tokens for {n_seqs} sequences")
    return (lambda: all(token.is_set() for token in tokens)) if len(tokens) == n_seqs else bool


class Room:
    """Tells what fits: more positions into a sequence and into the pool, sequences into a pass."""

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
            self._require_length(last)
            n_needed += self._state.pool.needed(seq, last)
        if n_needed and n_needed > self.n_free_pages:
            raise PoolFull(n_needed, self.n_free_pages)

    def _require_length(self, n: int) -> None:
        if n > self._n_ctx:
            raise ContextOverflow(f"{n} positions, the context holds {self._n_ctx}; raise -c")

    def require_place(self, seq: int, n_rows: int, n_kept: int, n_shared: int = 0) -> None:
        """Check that a sequence can have n_rows positions once it gives up others than n_kept.

        n_shared: positions that it gets from another one, whose whole pages it shares.
        """
        self._require_length(n_rows)
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
