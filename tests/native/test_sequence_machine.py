"""Sequences that come, grow, branch, go back and fail at random: each is always what it says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from helpers.sequence_machine import N_CTX, NAMES, SETTINGS, Machine

from moegraph.engine import Engine
from moegraph.ggml.handles import live_handles

Open = Callable[..., Engine]


@pytest.mark.parametrize(
    ("n_seq", "seed", "device", "settings"),
    [
        (4, 0, "cpu", SETTINGS[0]), (1, 3, "cpu", SETTINGS[1]), (4, 1, "cpu", SETTINGS[2]),
        (3, 2, "cpu", SETTINGS[3]), (3, 4, "cpu,cpu,cpu", SETTINGS[0]),
        (3, 4, "cpu,cpu,cpu", SETTINGS[1]),
    ],
    ids=[*NAMES, f"{NAMES[0]}, three devices", f"{NAMES[1]}, three devices"],
)  # fmt: skip
def test_sequences_hold_what_they_say_whatever_fails(
    open_engine: Open, n_seq: int, seed: int, device: str, settings: dict
) -> None:
    """The engine to compare with is on one device."""
    chosen = {"cpu_reference": True, "n_ctx": N_CTX, "deterministic": True}
    engine = open_engine("legacy32", n_seq=n_seq, **chosen, **settings, device=device)
    machine = Machine(engine, open_engine("legacy32", **chosen), seed)
    machine.run(120)
    assert machine.n_faults > 1
    for snapshot, _, _ in machine.snapshots:
        snapshot.close()
    for slot in range(n_seq):
        engine.reset(slot)
    assert engine.state.pool.n_free == engine.state.pool.n_pages
    handles = live_handles()
    machine.empty(*range(n_seq))
    machine.snapshots.clear()
    machine.fault = nullcontext
    machine.run(10)
    for snapshot, _, _ in machine.snapshots:
        snapshot.close()
    # memory of snapshots is used again; buffers of transfers may have grown in place of others
    assert live_handles()["Buffer"] == handles["Buffer"]
