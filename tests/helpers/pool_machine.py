"""Sequences that share a pool of KV rows and their beginnings, at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.sequence_machine import N_VOCAB, Machine
from moegraph.engine import Engine
from moegraph.errors import PoolFull


def rows_left(engine: Engine, slot: int) -> int:
    """Return how many more rows a sequence can take while the others keep their pages."""
    return min(engine.state.pool.room(slot), engine.n_ctx) - engine.state.n_past[slot]


class PoolMachine(Machine):
    """Sequences that do not all fit, some of which wait in host memory or share pages."""

    longest = 450

    def __init__(self, engine: Engine, alone: Engine, seed: int) -> None:
        super().__init__(engine, alone, seed)
        self.away: list[tuple[Any, list[int]]] = []
        self.n_full = self.n_shared = 0

    def some_slots(self) -> list[int]:
        """Return sequences that can take a few rows, and that one pass can compute."""
        room, free, found = self.engine.passes.room, self.engine.passes.room.n_free_pages, []
        for slot in super().some_slots():
            n = room.pages_for(slot, 8)
            if n <= free and len(room.groups([*found, slot], 8)) == 1:
                free -= n
                found.append(slot)
        while not found:
            slot = int(self.rng.integers(0, self.n_seq))
            self.engine.reset(slot)
            self.empty(slot)
            found = [slot] if room.pages_for(slot, 8) <= room.n_free_pages else []
        return found

    def overflow(self) -> None:
        slot = int(self.rng.integers(0, self.n_seq))
        n = rows_left(self.engine, slot) + 1
        if len(self.held[slot]) + n > 512:
            return
        ids = self.rng.integers(0, 1000, n)
        with pytest.raises(PoolFull):
            self.engine.prefill(ids, slot)
        self.n_full += 1

    def swap_out(self) -> None:
        slot = int(self.rng.integers(0, self.n_seq))
        swapped = self.attempt(lambda: self.engine.copies.swap_out(slot))
        if swapped is not None:
            self.away.append((swapped, list(self.held[slot])))
            self.empty(slot)

    def swap_in(self) -> None:
        if not self.away:
            return
        at, slot = int(self.rng.integers(0, len(self.away))), int(self.rng.integers(0, self.n_seq))
        swapped, tokens = self.away[at]
        room = self.engine.passes.room
        if room.pages_for(slot, len(tokens) - len(self.held[slot])) > room.n_free_pages:
            with pytest.raises(PoolFull):
                self.engine.copies.swap_in(slot, swapped)
            self.n_full += 1
            return
        self.engine.copies.swap_in(slot, swapped)
        del self.away[at]
        self.empty(slot)
        self.held[slot] += tokens

    def read(self) -> None:
        """Have a sequence read a prompt of a page or so."""
        slot, n = int(self.rng.integers(0, self.n_seq)), int(self.rng.integers(100, 300))
        if n > rows_left(self.engine, slot):
            return
        ids = self.rng.integers(0, N_VOCAB, n)
        logits = self.engine.prefill(ids, slot).logits
        self.held[slot] += ids.tolist()
        np.testing.assert_array_equal(logits[-1], self.expected(self.held[slot])[-1])

    def resume(self) -> None:
        """Have a sequence begin as another one does, as far as that needs no computing."""
        slot, other = (int(n) for n in self.rng.integers(0, self.n_seq, 2))
        if self.rng.random() < 0.7:
            other = max(range(self.n_seq), key=lambda seq: len(self.held[seq]))
        self.engine.prefixes.save(other)
        n = len(self.held[other])
        n -= int(self.rng.integers(0, n + 1)) if self.rng.random() < 0.3 else 0
        ids = np.array([*self.held[other][:n], 999], dtype=np.int32)
        known = self.engine.prefixes.n_saved(ids)
        try:
            n = self.engine.prefixes.resume(slot, ids)
        except PoolFull:
            self.n_full += 1
            return
        assert n >= known and self.engine.held(slot) == ids[:n].tolist()
        self.held[slot] = ids[:n].tolist()
        for entry in self.snapshots:
            if entry[0].slot == slot and entry[0].is_valid:
                assert entry[1] == self.held[slot][: len(entry[1])]
            entry[2] = entry[0].is_valid
        pool = self.engine.state.pool
        pages = [set(pool.pages(seq)) for seq in range(self.n_seq)]
        self.n_shared += any(pages[slot] & pages[seq] for seq in range(self.n_seq) if seq != slot)

    def run(self, n_turns: int) -> None:
        """Take random steps, among them those of the pool."""
        once = (self.overflow, self.swap_out, self.swap_in)
        steps = (*once, *(self.read, self.resume, self.resume) * 2)
        for _ in range(n_turns):
            super().run(2)
            steps[self.rng.integers(0, len(steps))]()
            if len(self.away) > 3:
                self.away.pop(0)[0].close()
            self.check()
