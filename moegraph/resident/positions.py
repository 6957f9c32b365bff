"""Which positions the sequences of an engine hold, and the pages where these are: books, no bytes.

There is one such book, however many devices the layers are on.
"""

from __future__ import annotations

from ..units import round_up
from .kvpool import KVPool
from .layout import PAGE
from .poolshape import PoolShape


class Positions:
    """The positions of all sequences.

    shape: how many positions they may have. n_ctx, n_seq: of it. pool: the pages of the sequences.
    n_past: positions that each sequence holds.
    """

    def __init__(self, shape: PoolShape) -> None:
        self.shape, self.n_ctx, self.n_seq = shape, shape.n_ctx, shape.n_seq
        self.pool = KVPool(shape.n_seq, shape.n_seq_pages, shape.n_pages)
        self.n_past = [0] * shape.n_seq

    @property
    def spare_row(self) -> int:
        """Return the last row of the KV caches, where padding rows of a pass are written."""
        return self.shape.n_rows

    def n_kv(self, n_used: int) -> int:
        """Return the KV length of a graph for n_used positions: a multiple of PAGE."""
        return min(self.n_ctx, max(PAGE, round_up(n_used, PAGE)))
