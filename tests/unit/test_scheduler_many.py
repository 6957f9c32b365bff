"""Many clients at once, on a model of a GPU that misses experts: what they get together."""

from __future__ import annotations

from random import Random

import pytest
from helpers.scheduled import Machine

from moegraph.kinds import SweepStep
from moegraph.units import octave


def at_60_percent(n_slots: int) -> Machine:
    """Return a machine with the costs of a 35B on an H200 that has slots for 60 % of the experts.

    Nearly all that is missing crosses for each sweep, and for each piece, however few its rows are.
    """
    machine = Machine(n_slots=n_slots)
    machine.n_layers, machine.most_rows, machine.least_rows = 40, 1024, 512
    machine.most_joint, machine.lacks, machine.is_rounded = 4096, True, True
    machine.pass_of = lambda n: 2.2e-3 + 0.42e-3 * n
    crossing_s = 102 * 37e-6

    def step_s(step: SweepStep) -> float:
        chunk_s = 0.5e-3 + 2e-6 * step.n_rows
        return max(0.3e-3, crossing_s - chunk_s) if step.kind == "experts" else chunk_s

    machine.step_of = step_s
    machine.piece_s = lambda n: 40 * (0.6e-3 + crossing_s * (1 - 2 ** (-n / 40)))
    return machine


def served(n: int, n_tokens: int, seed: int = 0) -> Machine:
    """Answer n requests that come right after the first one, once others have been answered."""
    machine = at_60_percent(n)
    for i in range(n):
        machine.add(f"before {i}", 40 + 9 * i, 20)
    machine.run()
    rng = Random(seed)
    since = machine.now
    machine.log.clear()
    for i in range(n):
        machine.add(f"{i}", rng.randrange(16, 400), n_tokens)
        if not i:
            machine.turn()
            machine.turn()
    machine.run()
    machine.now -= since
    return machine


@pytest.mark.parametrize("seed", range(3))
def test_with_missing_experts_more_requests_get_more_tokens(seed: int) -> None:
    speeds = [n * 200 / served(n, 200, seed).now for n in (1, 4, 8, 16, 32)]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 1.4 * speeds[2]


@pytest.mark.parametrize("passes_seem", [1.0, 4.0])
@pytest.mark.parametrize("lacks", [False, True])
def test_hardly_anybody_waits_twice_as_long_on_a_noisy_card(
    lacks: bool, passes_seem: float
) -> None:
    """Steps are measured together with the pass behind them, and now and then work has to wait.

    passes_seem: how many times as long passes seem to take when a prompt comes.
    """
    found: list[float] = []
    for seed in range(4):
        rng, machine = Random(seed), noisy_card(lacks, seed)
        for i in range(8):
            machine.add(f"{i}", 32, 20_000)
        while not all(machine.tokens[f"{i}"] for i in range(8)):
            machine.turn()
        for prompt in range(3):
            for _ in range(30 + rng.randrange(9)):
                machine.turn()
            known = machine.scheduler.costs._known
            key = next(key for key in known if key[:2] == ("decode", octave(8)))
            known[key] = known[key]._replace(seconds=passes_seem * known[key].seconds)
            begun = machine.now
            machine.add(f"long {prompt}", 8192, 2)
            while not machine.tokens[f"long {prompt}"]:
                machine.turn()
            at = [now for now in machine.tokens["0"] if now >= begun]
            gaps = sorted(b - a for a, b in zip(at, at[1:]))
            found.append(gaps[int(0.99 * len(gaps))] / machine.pass_of(8))
            assert gaps[-1] < 3.0 * machine.pass_of(8)
    assert sorted(found)[len(found) // 2] < 2.0 and max(found) < 2.3


def noisy_card(lacks: bool, seed: int) -> Machine:
    """Return a machine with the costs of a 35B on an H200, with 60 % of the experts or all."""
    machine, rng = Machine(n_slots=9), Random(seed)
    machine.has_streams, machine.lacks, machine.is_rounded = True, lacks, True
    machine.n_layers, machine.most_rows, machine.least_rows = 40, 1024, 512
    machine.begin_s = 2e-3
    machine.pass_of = lambda n: (2.1e-3 + 0.52e-3 * n) if lacks else (2.2e-3 + 0.36e-3 * n)

    def step_s(step: SweepStep) -> float:
        if step.kind == "experts":
            return 0.35e-3
        chunk_s = (0.4e-3 + 1.1e-6 * step.n_rows) if lacks else (1.1e-3 + 1.25e-6 * step.n_rows)
        return chunk_s * (1.0 + step.n_kv / 60_000)

    machine.step_of = step_s
    machine.noise = lambda: rng.uniform(0.93, 1.07) * (1.5 if rng.random() < 0.01 else 1.0)
    return machine
