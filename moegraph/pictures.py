"""Pictures in prompts: rows of embeddings with positions on axes, and ids that stand for them.

The ids are below 0, and made from a hash of what the rows depend on. So whatever compares ids, such
as what finds the beginning that two prompts share, tells pictures apart. The last id of a picture
says how many positions it has fewer than rows: text goes on after the larger of height and width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import RequestError

Ids = npt.NDArray[np.int32]

_HASH = (1 << 30) - 1
# From here on an id is the last one of a picture; the others are below.
_LAST = -(1 << 30)


@dataclass(frozen=True, eq=False)
class Picture:
    """What a model reads of a picture.

    key: hash of all that the rows depend on. rows: F32 numpy [n, n_embd]. places: I32 numpy [3, n],
    position of each row on the axes time, height and width, counted from the first. n_positions:
    how many positions later the text goes on.
    """

    key: bytes
    rows: npt.NDArray[np.float32]
    places: Ids
    n_positions: int

    @property
    def ids(self) -> Ids:
        """Return the ids that stand for the rows, I32 numpy [n]."""
        n = len(self.rows)
        words = np.frombuffer(hashlib.shake_128(self.key).digest(4 * n), np.uint32) & _HASH
        found = words.astype(np.int32) + np.int32(2 * _LAST)
        found[-1] = _LAST + n - self.n_positions
        return found


def positions_saved(ids: Sequence[int] | Ids) -> int:
    """Return how many positions fewer than ids there are, because of pictures."""
    found = np.asarray(ids, dtype=np.int64)
    found = found[(found < 0) & (found >= _LAST)]
    return int((found - _LAST).sum())


class PictureRows:
    """The pictures of a prompt.

    cuts: where pictures begin and end. positions: I32 numpy [3, n] of all rows, text included. end:
    of the last picture. n_rows: of all pictures.
    """

    def __init__(self, ids: Ids, pictures: Sequence[tuple[int, Picture]], n_embd: int) -> None:
        """pictures: each with its first row, in order.

        Raises:
            RequestError: the ids there are not those of the picture, or its rows have another size.
        """
        self._pictures = pictures
        self.cuts: list[int] = []
        self.positions = np.tile(np.arange(len(ids), dtype=np.int32), (3, 1))
        for first, picture in pictures:
            end = first + len(picture.rows)
            if picture.rows.shape[1] != n_embd:
                n = picture.rows.shape[1]
                raise RequestError(f"rows of a picture have {n} numbers; the model's have {n_embd}")
            if not np.array_equal(ids[first:end], picture.ids):
                raise RequestError(f"the prompt has other ids than its picture at {first}")
            start = self.positions[0, first]
            self.positions[:, first:end] = start + picture.places
            after = np.arange(len(ids) - end, dtype=np.int32)
            self.positions[:, end:] = start + picture.n_positions + after
            self.cuts += [first, end]
        self.end, self.n_rows = max(self.cuts), sum(len(one.rows) for _, one in pictures)

    def has(self, row: int) -> bool:
        """Return whether a row is one of a picture."""
        return any(first <= row < first + len(one.rows) for first, one in self._pictures)

    def fill(self, first: int, rows: npt.NDArray[np.float32]) -> None:
        """Write the rows of pictures that are among rows F32 numpy [n, n_embd] from first on."""
        for start, one in self._pictures:
            begin, end = max(first, start), min(first + len(rows), start + len(one.rows))
            if begin < end:
                rows[begin - first : end - first] = one.rows[begin - start : end - start]
