"""Which rows of a prompt chose the experts that have no slot, in the order in which graphs need it.

A place is the number of a choice in a layer: row * n_used + k. The device waits for what is found
here, so it is C (native/py/places.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from .lib import C, ffi

Ints = npt.NDArray[np.int32]


def find_missing(
    il: int, ids: Ints, table: Ints, absent: npt.NDArray[np.bool_]
) -> tuple[list[int], Ints]:  # fmt: skip
    """Return the experts among ids that have no slot, and how often each expert was chosen.

    The most chosen come first; of equals, those with lower ids. ids: I32 numpy [n], the choice of
    some rows in layer il. table: I32 [n_expert], expert -> slot or -1. absent: bool [n], gets
    whether each of ids has no slot. The counts are I32 [n_expert].
    """
    n_expert = len(table)
    counts, found = np.empty((2, n_expert), dtype=np.int32)
    n = C.mg_find_missing(
        _pointer(ids), len(ids), _pointer(table), n_expert, _pointer(absent, "uint8_t[]"),
        _pointer(counts), _pointer(found),
    )  # fmt: skip
    if n < 0:
        raise InternalError(f"layer {il}: router chose ids outside 0..{n_expert - 1}")
    return found[:n].tolist(), counts


class MissingPlaces:
    """The places of one layer where experts were chosen that have no slot.

    ids: I32 numpy [n_rows * n_used], the choice of all rows. absent: bool, same shape: the expert
    had no slot when the row was computed.
    """

    def __init__(
        self, ids: Ints, absent: npt.NDArray[np.bool_], n_expert: int, n_used: int
    ) -> None:
        self._n_used, self._n_rows, n = n_used, len(ids) // n_used, len(ids)
        memory = np.empty(n + n_expert + 1 + self._n_rows + 1, dtype=np.int32)
        self._sorted = _pointer(memory)  # keeps the memory
        self._bounds = self._sorted + n
        self._ends = self._bounds + n_expert + 1
        if C.mg_sort_places(
            _pointer(ids), _pointer(absent, "uint8_t[]"), n, n_expert, self._bounds, self._sorted
        ) < 0:  # fmt: skip
            raise InternalError(f"a router chose ids outside 0..{n_expert - 1}")

    def of(self, experts: Sequence[int]) -> Ints:
        """Return the places where one of these experts was chosen, I32 numpy, ascending."""
        found = np.empty(self._n_rows * self._n_used, dtype=np.int32)
        n = C.mg_merge_places(
            self._sorted, self._bounds, ffi.new("int32_t[]", experts), len(experts), self._n_used,
            self._n_rows, self._ends, _pointer(found),
        )  # fmt: skip
        return found[:n]


def write_unit(
    places: Ints, ids: Ints, slots: Ints, n_used: int, n_rows: int, n_padded: int,
    max_rounds: int, words: Ints,
) -> int:  # fmt: skip
    """Write the inputs of a unit, and return how many rounds of terms it has.

    A unit computes some rows with some experts. places: ascending, fewer than n_padded. slots: I32
    [n_expert], the slots of experts in the ring. n_rows: rows of the sweep; row n_rows is spare,
    and so is place n_rows * n_used. words: gets n_padded words each of

        token, slot, place   of each place: its row, its expert's slot, its number
        target               the distinct rows
        terms                in each round, the place that is added to each of these rows, or -1

    Padding has slot -1 and gives zeros.
    """
    if len(places) >= n_padded or len(words) < (4 + max_rounds) * n_padded:
        raise InternalError(f"{len(places)} places do not fit into a unit of {n_padded}")
    n_rounds = C.mg_unit(
        _pointer(places), len(places), _pointer(ids), _pointer(slots), n_used, n_rows, n_padded,
        max_rounds, -1, _pointer(words),
    )  # fmt: skip
    if n_rounds < 0:
        raise InternalError(f"a row chose more than {max_rounds} experts of a group")
    return int(n_rounds)


def _pointer(array: npt.NDArray[Any], kind: str = "int32_t[]") -> Any:
    return ffi.from_buffer(kind, array)
