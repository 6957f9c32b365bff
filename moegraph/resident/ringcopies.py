"""Copies in host memory of what a DFlash drafter keeps of a sequence: rows of its rings.

K and V of a position follow from that position alone, as those of the target do. So they are copied
with the target's rows, as far as the rings still have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..ggml.ops import Tensor
from .draftring import DraftRings
from .ringshape import RingShape

Parts = list[npt.NDArray[np.uint8]]


def row_widths(rings: DraftRings) -> list[int]:
    """Return the bytes of a position in K and in V of each layer."""
    return [tensor.nb[1] for tensor, _ in _tensors(rings)]


def take(device: Device, rings: DraftRings, slot: int, first: int, n: int) -> Parts:
    """Copy rows of n positions of a sequence, and wait: K and V of each layer, U8 [m, bytes].

    m: the last of these positions that the layer's ring has. None waits for K and V.
    """
    device.synchronize()
    parts, span = [], rings.spans[slot]
    for tensor, kind in _tensors(rings):
        shape, end, size = rings.shapes[kind], first + n, tensor.nb[1]
        start = max(first, min(end, rings.first_kept(slot, kind)))
        part = np.empty((end - start if end <= span.n_past else 0, size), np.uint8)
        for at, row, m in _runs(shape, start, len(part)):
            target = ffi.from_buffer(part[at : at + m])
            row += slot * shape.n_rows
            C.ggml_backend_tensor_get(tensor, target, row * size, m * size)
        parts.append(part)
    device.check_alive()
    return parts


def put(
    device: Device, rings: DraftRings, slot: int, n_kept: int, n_past: int,
    pieces: Sequence[tuple[int, int, Parts]],
) -> None:  # fmt: skip
    """Have the rings of a sequence of n_past positions be right, from copies of rows, and wait.

    n_kept: its first positions, which the rings are right about. pieces: the first position,
    the number of positions, and the copy of each run, in order. Rows before a gap are of no use.
    """
    stream, firsts = device.compute.ptr, [0] * len(rings.shapes)
    for i, (tensor, kind) in enumerate(_tensors(rings)):
        shape = rings.shapes[kind]
        size, start, held = tensor.nb[1], n_past, []
        for at, n, parts in reversed(pieces):
            if at + n != start:
                break
            part = parts[i] if i < len(parts) else np.empty((0, size), np.uint8)
            start = at + n - len(part)
            held.append((start, part))
            if len(part) < n:
                break
        if start <= n_kept:
            start = min(start, rings.first_kept(slot, kind), n_kept)
        for at, part in reversed(held):
            skipped = min(len(part), max(0, n_past - shape.n_cells - at))
            for source, row, m in _runs(shape, at + skipped, len(part) - skipped):
                rows = ffi.from_buffer(part[skipped + source : skipped + source + m])
                row += slot * shape.n_rows
                C.ggml_backend_tensor_set_async(stream, tensor, rows, row * size, m * size)
        if start > n_past - shape.n_cells:
            firsts[kind] = max(firsts[kind], start)
    device.synchronize()
    span = rings.spans[slot]
    span.restart(n_past)
    span.first, span.firsts = min(firsts), tuple(firsts)


def _tensors(rings: DraftRings) -> Iterator[tuple[Tensor, int]]:
    """Yield K and V of each layer, and the kind of its ring."""
    for il, kind in enumerate(rings.kind):
        for tensor in (rings.k[il], rings.v[il]):
            yield tensor, kind


def _runs(shape: RingShape, first: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, row, rows) of the parts of n positions whose rows are consecutive."""
    at = 0
    while at < n:
        cell = (first + at) % shape.n_cells
        m = min(n - at, shape.n_cells - cell)
        yield at, shape.n_block + cell, m
        at += m
