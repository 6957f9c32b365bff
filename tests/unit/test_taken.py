"""Accepted tokens that wait for their K and V: what is taken back is what was added, in order."""

from __future__ import annotations

import numpy as np
import pytest

from moegraph.draft.taken import Taken

N_ROWS, N_SLOTS = 24, 3


@pytest.mark.parametrize("seed", range(20))
def test_any_calls_give_what_a_list_of_positions_gives(seed: int) -> None:
    rng, taken = np.random.default_rng(seed), Taken(N_ROWS)
    held: list[list[int]] = [[] for _ in range(N_SLOTS)]  # tokens of every position
    known = [0] * N_SLOTS  # positions whose K and V are computed, or were forgotten
    memory = np.full(N_ROWS, -1)
    for _ in range(300):
        slot, act = int(rng.integers(N_SLOTS)), rng.random()
        if act < 0.6:
            tokens = rng.integers(0, 99, rng.integers(1, 6)).tolist()
            if taken.room() < len(tokens):
                for other in taken.slots:
                    known[other] = check(taken, other, held[other], known[other], memory)
            row = taken.add(slot, len(held[slot]), tokens)
            memory[row : row + len(tokens)] = tokens
            held[slot] += tokens
        elif act < 0.8:
            known[slot] = check(taken, slot, held[slot], known[slot], memory)
        elif act < 0.9:
            n = int(rng.integers(0, len(held[slot]) + 1))
            taken.cut(slot, n)
            del held[slot][n:]
            known[slot] = min(known[slot], n)
        else:  # positions that it is not told of: what waits is of no use
            held[slot] += [0, 0]
            assert taken.take(slot, len(held[slot])) is None
            known[slot] = len(held[slot])


def check(taken: Taken, slot: int, held: list[int], known: int, memory: np.ndarray) -> int:
    """Take what waits of a sequence; return how many positions are known then."""
    run = taken.take(slot, len(held))
    if known == len(held):
        assert run is None
        return known
    assert run is not None and (run.first, run.end) == (known, len(held))
    assert run.tokens == held[known:] == memory[run.rows].tolist()
    return len(held)


def test_a_gap_forgets_what_waited() -> None:
    taken = Taken(8)
    taken.add(0, 5, [1, 2])
    taken.add(0, 9, [3])
    run = taken.take(0, 10)
    assert run is not None and (run.first, run.tokens) == (9, [3])
    assert taken.room() == 8 and taken.take(0, 10) is None
