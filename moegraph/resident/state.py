"""KV caches and recurrent states.

A sequence has a slot: a row of every recurrent state, and a list of pages of the KV caches
(kvpool.py). Passes over any slots run with the same graphs. An engine with one sequence has its
state at row 0 and its positions in order, so its graphs read both in place.

A layer with a window has no pages. Each slot has a ring in its KV cache: position p is in row p
modulo the ring's length. What is in the ring depends on the last position, as a recurrent state
does, so it goes where those go: the rows of the window are parts of snapshots and marks, and a
sequence goes back to these alone.

These are the bytes of some layers, on one device. Which sequence has which positions is the same on
all devices, and `Sequences` decides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch.base import Architecture
from ..errors import ConfigError, InternalError
from ..ggml.device import Device
from ..ggml.handles import Context, Owner
from ..ggml.lib import C, ffi
from ..ggml.memory import Block
from ..ggml.ops import F32, Builder, Tensor, type_id
from ..kinds import MOST_BEHIND
from .kvpool import KVPool, PoolShape, Positions
from .layout import PAGE, draft_room, hidden_bytes, hidden_room, ring_room, zeros_bytes


class _Reserved:
    """Device memory that there is from a call of `reserve` on.

    n_rows: of a pass that it has room for.
    """

    _block: Block | None = None
    n_rows = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the memory."""
        return self._block.n_bytes if self._block else 0

    @property
    def _memory(self) -> Block:
        if self._block is None:
            raise InternalError("a graph uses memory for drafts that was not reserved")
        return self._block

    def close(self) -> None:
        """Free the memory; graphs that use it must be dropped before."""
        if self._block:
            self._block.close()
        self._block, self.n_rows = None, 0


class DraftRows(_Reserved):
    """Device memory for what layers with states keep of the rows of one verify pass.

    `Layer.drafts` has the widths, which are the same in all these layers. There is no memory before
    the first verify pass.
    """

    def __init__(self, device: Device, hp: Architecture, layers: range) -> None:
        self._device = device
        self._widths = {il: hp.layer(il).drafts for il in layers if hp.layer(il).drafts}

    def reserve(self, n_rows: int) -> None:
        """Make room for n_rows rows; the device is idle, and no graph uses the old memory."""
        if n_rows <= self.n_rows:
            return
        n, smaller = draft_room(n_rows), self._block
        shapes = {(il, i): (w, n) for il, each in self._widths.items() for i, w in enumerate(each)}
        if shapes:
            what = f"{n} rows of verify passes"
            self._block = Block(self._device, shapes, what, "draft fewer tokens")
        self.n_rows = n
        if smaller:
            smaller.close()

    def keep(self, b: Builder, rows: Sequence[Tensor], il: int) -> None:
        """Have a graph leave the rows of layer il here: F32, each kind's width times the rows."""
        for i, tensor in enumerate(rows):
            base = tensor if tensor.view_src == ffi.NULL else tensor.view_src
            if C.ggml_nbytes(base) == C.ggml_nbytes(tensor) and base.data == ffi.NULL:
                # no copy: the node that computes the rows writes them here
                self._memory.put(base, (il, i))
            else:
                n_rows = C.ggml_nelements(tensor) // self._widths[il][i]
                b.expand(b.cpy(tensor, self._leaf(b, il, i, n_rows)))

    def leaves(self, b: Builder, il: int) -> list[Tensor]:
        """Return the rows of layer il: F32 [width, n_rows] of each kind."""
        return [self._leaf(b, il, i, self.n_rows) for i in range(len(self._widths[il]))]

    def _leaf(self, b: Builder, il: int, i: int, n_rows: int) -> Tensor:
        return self._memory.leaf(b, (il, i), F32, self._widths[il][i], n_rows)


_ROT_MIN = 64


class State(Owner):
    """KV cache and recurrent states of all sequences in some layers, on one device.

    positions: of the sequences; `shape`, `n_ctx`, `n_seq`, `pool`, `n_past` and `saved` are its
        own.
    k, v: of each layer with a KV cache, [n_embd_gqa, shape.cache_rows(window) + 1]; v only where V
        is not in K. `pool` knows which row has which position, and `ring_rows` in layers with a
        window. Padding rows of a pass are written to the last row, which nothing reads.
    k_words, v_words: the same memory as F32, to move rows byte for byte; empty if a row is not a
        multiple of 4 bytes.
    drafts: what a verify pass keeps of its rows.
    page_size: positions of a page.
    layer_states: of each layer with recurrent states (`Layer.states`), F32 [size, n_seq] each.
    last_out: F32 [n_embd, n_seq], the output of the last layer at each sequence's last position,
        from which an MTP block drafts; None unless the layers have one, which is layer n_layer. It
        is zeros in an empty sequence, and who runs a pass keeps it up to date.
    recurrent: all tensors with a row for each sequence. caches: k, then v, of layers without a
        window. rings: k_words and v_words of each layer with one. kept: recurrent, then rings.
    window, ring: positions of the window, and rows of a ring; 0 without any.
    rot_k, rot_v: Walsh-Hadamard matrices F32 [n, n] of each layer whose K or V is quantized, if 64
        divides its heads, and V is not in K.
    spare_row: the last row of the caches.
    kv_bytes, mtp_bytes, recurrent_bytes: of the caches of the model's layers, and of the MTP
        block; of the states.
    n_attention_parts: see `Device`.
    """

    def __init__(
        self, device: Device, hp: Architecture, layers: range, positions: Positions,
        type_k: str, type_v: str,
    ) -> None:  # fmt: skip
        self.positions, self.device = positions, device
        self.shape: PoolShape = positions.shape
        self.n_ctx, self.n_seq = self.shape.n_ctx, self.shape.n_seq
        self.pool: KVPool = positions.pool
        self.n_past, self.saved = positions.n_past, positions.saved
        self.n_attention_parts = device.n_attention_parts
        self.page_size, self.spare_row = PAGE, positions.spare_row
        self.window = hp.window or 0
        self.ring = self.shape.ring(self.window) if self.window else 0
        self.ring_spare_row = self.n_seq * self.ring
        sizes = {il: hp.layer(il).state_sizes for il in layers if hp.layer(il).states}
        widths = {il: kv for il in layers if (kv := hp.layer(il).cached)}
        block = self._allocate(hp, sizes, widths, (type_k, type_v), hp.n_layer in layers)
        found = block.tensors
        self.layer_states: dict[int, tuple[Tensor, ...]] = {
            il: tuple(found["state", il, i] for i in range(len(each))) for il, each in sizes.items()
        }
        self.k: dict[int, Tensor] = {il: found["k", il] for il in widths}
        self.v: dict[int, Tensor] = {il: found["v", il] for il, kv in widths.items() if len(kv) > 1}
        self.last_out: Tensor | None = found.get("last_out")
        self.recurrent = [t for kind in zip(*self.layer_states.values()) for t in kind]
        if self.last_out is not None:
            self.recurrent.append(self.last_out)
        in_ring = [il for il in widths if hp.layer(il).window]
        both = self.k, self.v
        self.caches = [t for part in both for il, t in part.items() if il not in in_ring]
        if self.n_seq > 1:
            self.require_words("several sequences (n_seq)")
        if in_ring:
            self.require_words("attention in a window")
        sizes_k, sizes_v = _rotations(hp, widths, "k", type_k), _rotations(hp, widths, "v", type_v)
        self.rot_k: dict[int, Tensor] = {il: found["rot", n] for il, n in sizes_k.items()}
        self.rot_v: dict[int, Tensor] = {il: found["rot", n] for il, n in sizes_v.items()}
        for n in {*sizes_k.values(), *sizes_v.values()}:
            block.set(("rot", n), hadamard(n))
        self._zeros = found["zeros"]
        self.k_words, self.v_words = self._words(block, "k"), self._words(block, "v")
        words = self.k_words, self.v_words
        self.rings = {il: [part[il] for part in words if il in part] for il in in_ring}
        self._in_rings = {t for each in self.rings.values() for t in each}
        self.kept = [*self.recurrent, *(t for each in self.rings.values() for t in each)]
        own = [t for part in (self.k, self.v) for il, t in part.items() if il == hp.n_layer]
        self.mtp_bytes = sum(C.ggml_nbytes(t) for t in own)
        caches = [*self.k.values(), *self.v.values()]
        self.kv_bytes = sum(C.ggml_nbytes(t) for t in caches) - self.mtp_bytes
        self.recurrent_bytes = sum(C.ggml_nbytes(t) for t in self.recurrent)
        self.drafts = self.own(DraftRows(device, hp, layers))

    def _allocate(
        self, hp: Architecture, sizes: Mapping[int, Sequence[int]],
        widths: Mapping[int, tuple[int, ...]], types: tuple[str, str], has_mtp: bool,
    ) -> Block:  # fmt: skip
        """Return all memory. sizes, widths: of the states and of rows of KV caches, by layer."""
        shapes: dict[Any, tuple[int, ...]] = {
            ("state", il, i): (n, self.n_seq)
            for il, each in sizes.items()
            for i, n in enumerate(each)
        }
        if has_mtp:
            shapes["last_out"] = hp.n_embd, self.n_seq
        for at, (part, kind) in enumerate(zip("kv", types)):
            for il, kv in widths.items():
                if at < len(kv):
                    n_rows = self.shape.cache_rows(hp.layer(il).window) + 1
                    shapes[part, il] = kv[at], n_rows, type_id(kind)
            rotations = _rotations(hp, widths, part, kind)
            shapes |= {("rot", n): (n, n) for n in rotations.values()}
        shapes["zeros"] = zeros_bytes(hp) // 4, 1
        what = f"the KV cache and states ({self.shape.n_rows} positions)"
        remedy = "lower -c or use -ctk q8_0 -ctv q8_0"
        return self.own(Block(self.device, shapes, what, remedy))

    def _words(self, block: Block, part: str) -> dict[int, Tensor]:
        """Return tensors for the memory of K or V as F32 [bytes of a row / 4, rows]."""
        cache = self.k if part == "k" else self.v
        context = self.own(Context(len(cache) + 1))
        return {
            il: block.put(C.ggml_new_tensor_2d(context.ptr, F32, t.nb[1] // 4, t.ne[1]), (part, il))
            for il, t in cache.items()
            if t.nb[1] % 4 == 0
        }

    def require_words(self, what: str) -> None:
        """Check that KV rows can be moved, which `what` needs."""
        odd = next((t.nb[1] for t in [*self.k.values(), *self.v.values()] if t.nb[1] % 4), 0)
        if odd:
            raise ConfigError(
                f"{what} needs KV cache rows of a multiple of 4 bytes; this model's have "
                f"{odd}; use f16 for the cache"
            )

    def clear_states(self, slot: int) -> None:
        """Enqueue zeros over the recurrent states of a sequence, and over its rings."""
        for tensor in self.recurrent:
            self._clear(tensor, slot * tensor.nb[1], tensor.nb[1])
        self._clear_rings(slot, 0, self.ring)

    def clear_after(self, slot: int, n_past: int) -> None:
        """Enqueue zeros over rows of rings that the row at position n_past does not attend to."""
        self._clear_rings(slot, n_past, self.ring - self.window)

    def _clear_rings(self, slot: int, first: int, n: int) -> None:
        for tensor in self._in_rings:
            for start, _, size in self._runs(tensor, slot, first, n):
                self._clear(tensor, start, size)

    def ring_rows(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the rows of positions in layers with a window; both arrays broadcast."""
        rows: npt.NDArray[np.int64] = slots * self.ring + positions % self.ring
        return rows

    def pieces(self, tensor: Tensor, slot: int, n_past: int) -> list[tuple[int, int, int]]:
        """Return what of a tensor of `kept` is the state of a sequence after n_past positions.

        That is bytes: where they are in the tensor, where in a copy, and their number. Their sum
        is the same for all sequences and positions.
        """
        if tensor in self._in_rings:
            n = min(self.window, self.ring)
            return self._runs(tensor, slot, n_past - n, n)
        return [(slot * tensor.nb[1], 0, tensor.nb[1])]

    def _runs(self, ring: Tensor, slot: int, first: int, n: int) -> list[tuple[int, int, int]]:
        """Return the bytes of n positions in a ring, as `pieces` does."""
        size, at = ring.nb[1], first % self.ring
        n_first = min(n, self.ring - at)
        runs = [(at, 0, n_first), (0, n_first, n - n_first)]
        start = slot * self.ring
        return [((start + i) * size, to * size, m * size) for i, to, m in runs if m > 0]

    def clear_rows(self, runs: Iterable[tuple[int, int]]) -> None:
        """Enqueue zeros over KV rows, given as (first row, rows)."""
        for tensor in self.caches:
            for first, n in runs:
                self._clear(tensor, first * tensor.nb[1], n * tensor.nb[1])

    def copy_rows(self, source: int, to: int, n: int) -> None:
        """Enqueue copies of n KV rows."""
        stream = self.device.compute.ptr
        for tensor in self.caches:
            size = tensor.nb[1]
            C.mg_copy_bytes(stream, tensor, source * size, tensor, to * size, n * size)

    def _clear(self, tensor: Tensor, start: int, size: int) -> None:
        """Enqueue zeros over `size` bytes of a tensor from byte `start`."""
        most = self._zeros.nb[1]
        for at in range(start, start + size, most):
            n = min(most, start + size - at)
            C.mg_copy_bytes(self.device.compute.ptr, self._zeros, 0, tensor, at, n)


def _rotations(
    hp: Architecture, widths: Mapping[int, Sequence[int]], part: str, kind: str
) -> dict[int, int]:
    """Return the size of the matrices that rotate K or V, of each layer where they are rotated.

    Upstream rotates K by the largest power of two that divides the head, V by the least.
    """
    found = {}
    for il, kv in widths.items():
        at = hp.at(il)
        n = at.n_embd_head_k if part == "k" else at.n_embd_head_v
        if kind != "f16" and n % _ROT_MIN == 0 and len(kv) > 1:
            found[il] = math.gcd(n, 1 << 30) if part == "k" else _ROT_MIN
    return found


def hadamard(n: int) -> np.ndarray:
    """Return the orthonormal Walsh-Hadamard matrix F32 [n, n]; n: a power of two."""
    matrix = np.array([[np.float32(1.0 / np.sqrt(np.float32(n)))]], dtype=np.float32)
    while matrix.shape[0] < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.ascontiguousarray(matrix)


class HiddenStates(_Reserved):
    """Device memory for hidden states that drafters read: of the last pass, and a ring of tokens.

    Those of layer il are l_out, complete with all its experts; those of n_layer are h_nextn, the
    normed rows that the head reads. All rows of a pass are kept, padding included, in the order of
    the pass. The next pass overwrites them.

    The ring has what sequences took last: graphs of passes write their rows there themselves, and
    those of commits the rows of accepted paths. Position p of a sequence is in row p modulo
    n_kept of its part. So a drafter can compute a token long after its pass: at most MOST_BEHIND
    positions later, so that another pass fits.

    There is no memory, and graphs keep nothing, before `reserve`.

    layers: the kept ones, ascending. n_rows: the most rows of a pass that keeps them; a longer one
    leaves what was there. n_kept: rows of a sequence in the ring; 0 without a ring.
    """

    def __init__(self, device: Device, hp: Architecture) -> None:
        self._device, self._hp = device, hp
        self.layers: tuple[int, ...] = ()
        self.n_kept = self._n_ring = 0

    def reserve(self, layers: Sequence[int], n_rows: int, n_seq: int = 0) -> None:
        """Have later graphs keep these layers, of passes of up to n_rows rows.

        n_seq: make a ring for so many sequences; 0: none. The device must be idle, and graphs that
        were built before must be dropped.
        """
        wanted = tuple(sorted(set(layers)))
        if wanted and not 0 <= wanted[0] <= wanted[-1] <= self._hp.n_layer:
            raise InternalError(f"layers {list(wanted)} of a model of {self._hp.n_layer} layers")
        size = hidden_bytes(self._hp.n_embd, len(wanted), n_rows, n_seq)
        shapes, what = {"words": (1, size // 4)}, f"{n_rows} rows for drafting"
        larger = Block(self._device, shapes, what, "draft fewer tokens") if size else None
        self.close()
        self._block, self.layers, self.n_rows = larger, wanted, n_rows
        if wanted and n_seq:
            self.n_kept, self._n_ring = MOST_BEHIND + n_rows, ring_room(n_rows, n_seq)

    def keep(self, b: Builder, x: Tensor, il: int) -> None:
        """Have a graph leave layer il here, if it is wanted: x, F32 [n_embd, n_tokens].

        Call this after the norm that reads x is appended, because CUDA computes x and its norm as
        one kernel.
        """
        n_tokens = x.ne[1]
        if il not in self.layers or n_tokens > self.n_rows:
            return
        if x.data == ffi.NULL and x.view_src == ffi.NULL:
            self._memory.put(x, "words", self.offset(il))  # no copy: the node writes it here
        else:
            b.expand(b.cpy(x, self.leaf(b, il, n_tokens)))

    def append(self, b: Builder, rows: Tensor, n_tokens: int) -> None:
        """Append the copy of a pass's rows to the ring, if there is one; all layers are appended.

        rows: I32 [n_tokens], see `ring_rows`.
        """
        if self.n_kept and n_tokens <= self.n_rows:
            size = 4 * self._hp.n_embd
            shape, strides = (self._hp.n_embd, n_tokens, len(self.layers)), (size, self._stride)
            b.expand(b.set_rows(self._ring(b), b.view(self._last(b), shape, strides), rows))

    def append_path(self, b: Builder, path: Tensor, rows: Tensor) -> None:
        """Append the copy of some of the last pass's rows to the ring, if there is one.

        path: I32 [n], rows of the pass. rows: I32 [n], see `ring_rows`.
        """
        if self.n_kept:
            b.expand(b.set_rows(self._ring(b), self._gather(b, self._last(b), path), rows))

    def kept(self, b: Builder, rows: Tensor) -> list[Tensor]:
        """Append reading rows of the ring, I32 [n]: F32 [n_embd, n] of each layer, see `layers`."""
        n_embd, n = self._hp.n_embd, rows.ne[0]
        found, size = self._gather(b, self._ring(b), rows), 4 * n_embd
        return [
            b.view(found, (n_embd, n), (size,), size * n * at) for at in range(len(self.layers))
        ]

    def _gather(self, b: Builder, states: Tensor, rows: Tensor) -> Tensor:
        """Append the same rows of all layers: F32 [n_embd, n, n_layers]."""
        same = b.view(rows, (rows.ne[0],))
        # ggml checks the size of a view as if its columns were not the same bytes
        same.ne[1], same.nb[1], same.nb[2], same.nb[3] = len(self.layers), 0, 0, 0
        return b.get_rows(states, same)

    def ring_rows(self, slot: int, first: int, n: int) -> npt.NDArray[np.int64]:
        """Return the rows of the ring of n positions of a sequence, from position first on."""
        rows: npt.NDArray[np.int64] = slot * self.n_kept + (first + np.arange(n)) % self.n_kept
        return rows

    @property
    def spare_row(self) -> int:
        """A row of the ring that padding may overwrite."""
        return self._n_ring - 1

    def _last(self, b: Builder) -> Tensor:
        """Return a leaf of the rows of the last pass, F32 [n_embd, rows, n_layers]."""
        ne = self._hp.n_embd, hidden_room(self.n_rows), len(self.layers)
        return self._memory.leaf(b, "words", F32, *ne)

    def _ring(self, b: Builder) -> Tensor:
        """Return a leaf of the ring, F32 [n_embd, rows, n_layers]."""
        n_embd, n_layers = self._hp.n_embd, len(self.layers)
        at = n_layers * self._stride
        return self._memory.leaf(b, "words", F32, n_embd, self._n_ring, n_layers, at=at)

    def leaf(self, b: Builder, il: int, n_tokens: int = 0) -> Tensor:
        """Return a leaf that reads layer il of the last pass, F32 [n_embd, n_tokens].

        n_tokens: the first rows of the pass; 0: n_rows.
        """
        ne = self._hp.n_embd, n_tokens or self.n_rows
        return self._memory.leaf(b, "words", F32, *ne, at=self.offset(il))

    def offset(self, il: int) -> int:
        """Return the first byte of layer il."""
        return self._stride * self.layers.index(il)

    @property
    def _stride(self) -> int:
        """Bytes from one layer of the last pass to the next."""
        return 4 * self._hp.n_embd * hidden_room(self.n_rows)

    @property
    def words(self) -> Tensor:
        """Return all of the memory as one tensor."""
        return self._memory.tensors["words"]

    def close(self) -> None:
        """Free the memory; graphs that use it must be dropped before."""
        super().close()
        self.layers, self.n_kept, self._n_ring = (), 0, 0
