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


class MissingPlaces:
    """The places of one layer where experts were chosen that have no slot.

    ids: I32 numpy [n_rows * n_used], the choice of all rows. absent: bool, same shape: the expert
    had no slot when the row was computed.
    """

    def __init__(
        self, ids: Ints, absent: npt.NDArray[np.bool_], n_expert: int, n_used: int
    ) -> None:
        self._n_used, self._n_rows = n_used, len(ids) // n_used
        self._sorted = np.empty(len(ids), dtype=np.int32)
        self._bounds = np.empty(n_expert + 1, dtype=np.int32)
        self._ends = np.empty(self._n_rows + 1, dtype=np.int32)
        flags = absent.view(np.uint8)
        n = C.mg_sort_places(
            _ints(ids), ffi.cast("uint8_t *", ffi.from_buffer(flags)), len(ids), n_expert,
            _ints(self._bounds), _ints(self._sorted),
        )  # fmt: skip
        if n < 0:
            raise InternalError(f"a router chose ids outside 0..{n_expert - 1}")

    @property
    def n_experts(self) -> int:
        """How many experts were chosen that had no slot."""
        return int((np.diff(self._bounds) > 0).sum())

    def of(self, experts: Sequence[int]) -> Ints:
        """Return the places where one of these experts was chosen, I32 numpy, ascending."""
        chosen, bounds = np.array(experts, dtype=np.int32), self._bounds
        found = np.empty(int((bounds[chosen + 1] - bounds[chosen]).sum()), dtype=np.int32)
        C.mg_merge_places(
            _ints(self._sorted), _ints(bounds), _ints(chosen), len(chosen), self._n_used,
            self._n_rows, _ints(self._ends), _ints(found),
        )  # fmt: skip
        return found


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
        _ints(places), len(places), _ints(ids), _ints(slots), n_used, n_rows, n_padded,
        max_rounds, -1, _ints(words),
    )  # fmt: skip
    if n_rounds < 0:
        raise InternalError(f"a row chose more than {max_rounds} experts of a group")
    return int(n_rounds)


def _ints(array: Ints) -> Any:
    return ffi.cast("int32_t *", ffi.from_buffer(array))
