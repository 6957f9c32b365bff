"""How many KV rows the sequences of an engine share, and which positions each one holds.

The planner reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import EngineConfig
from ..errors import ConfigError
from ..units import round_up
from .kvpool import KVPool
from .layout import PAGE


@dataclass(frozen=True)
class PoolShape:
    """The positions of n_seq sequences, up to n_ctx of each and n_rows of all together.

    n_ctx and n_rows are multiples of PAGE. n_verified: rows of each sequence in the largest verify
    pass over all of them.
    """

    n_ctx: int
    n_seq: int
    n_rows: int
    n_verified: int

    @classmethod
    def of(cls, config: EngineConfig, n_ctx: int) -> PoolShape:
        """Return the shape for a context; its n_seq, n_kv and n_draft count."""
        padded, n_seq, n_kv = round_up(n_ctx, PAGE), config.n_seq, config.n_kv
        if 0 < n_kv < n_ctx:
            raise ConfigError(
                f"n_kv is {n_kv}: all sequences together need at least the context of one, {n_ctx}"
            )
        n_rows = padded * n_seq if n_kv == 0 else padded if n_kv < 0 else round_up(n_kv, PAGE)
        return cls(padded, n_seq, min(n_rows, padded * n_seq), config.n_draft + 1)

    @property
    def n_seq_pages(self) -> int:
        """Most pages of a sequence."""
        return self.n_ctx // PAGE

    @property
    def n_pages(self) -> int:
        """Pages of all sequences."""
        return self.n_rows // PAGE

    @property
    def n_whole(self) -> int:
        """How many sequences can be at their longest at once."""
        return self.n_rows // self.n_ctx

    def pass_rows(self, n_ubatch: int) -> int:
        """Return the most rows of a pass, with up to n_ubatch rows of each sequence."""
        return max(n_ubatch * self.n_whole, min(n_ubatch, self.n_verified) * self.n_seq)

    def most_seen(self, limit: int = 0) -> int:
        """Return how many positions of each sequence a drafter's layers without a window see.

        That is memory of each sequence, so they see what it has if all have equally many. limit: 0
        for no other one.
        """
        n_share = max(PAGE, self.n_rows // self.n_seq)
        return min(limit, n_share) if limit else n_share

    def most_kv(self, n_seqs: int) -> int:
        """Return the longest KV length of a pass that gathers the rows of n_seqs sequences.

        No pass gathers more rows than the pool has.
        """
        return max(PAGE, min(self.n_ctx, self.n_pages // n_seqs * PAGE))

    def groups(self, lengths: dict[int, int]) -> list[tuple[int, ...]]:
        """Divide sequences among as few passes as `most_kv` allows, the longest first.

        lengths: by sequence, the positions that it will hold.
        """
        found: list[list[int]] = []
        longest = 0
        for seq in sorted(lengths, key=lambda seq: (-lengths[seq], seq)):
            if not found or longest > self.most_kv(len(found[-1]) + 1):
                found.append([])
                longest = lengths[seq]
            found[-1].append(seq)
        return [tuple(sorted(group)) for group in found]


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
