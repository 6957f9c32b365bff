"""Many clients at once, on a model of a GPU that misses experts: what they get together."""

from __future__ import annotations

from random import Random

import pytest
from helpers.scheduled import Machine

from moegraph.kinds import SweepStep


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


@pytest.mark.parametrize("seed", range(3))
def test_many_prompts_that_come_at_once_go_before_the_few_that_decode(seed: int) -> None:
    machine = served(32, 200, seed)
    seconds = dict.fromkeys(("read", "piece", "decode"), 0.0)
    at = machine.log[0][0]
    for now, what, _ in machine.log:
        seconds[what] = seconds.get(what, 0.0) + now - at
        at = now
    assert seconds["piece"] < 0.2 and seconds["read"] < 1.3
    widths = [len(names) for _, what, names in machine.log if what == "decode"]
    assert sum(widths) / len(widths) > 22


def test_while_prompts_go_first_the_few_that_decode_still_get_tokens() -> None:
    machine = served(32, 200)
    assert machine.longest_gap("0") < 0.1 + 0.02


def test_a_long_prompt_that_comes_during_a_pass_does_not_begin_with_a_long_slice() -> None:
    machine = at_60_percent(12)
    names = [f"{i}" for i in range(8)]
    for name in names:
        machine.add(name, 300, 5000)
    while not all(machine.tokens.values()):
        machine.turn()
    for long in ("first", "second"):  # what steps take is known then
        begun = machine.now
        machine.add(long, 8192, 2)
        machine.decode(names)  # a request waits, so this pass earns more than usual
        while not machine.tokens[long]:
            machine.turn()
    at = [now for now in machine.tokens["0"] if now > begun]
    assert max(b - a for a, b in zip(at, at[1:])) < 2 * machine.pass_of(8)


@pytest.mark.parametrize("begin_s", [1e-4, 5e-3])
def test_a_pass_runs_between_the_begin_of_a_prompt_and_its_first_step(begin_s: float) -> None:
    """Else others would wait for both."""
    machine = at_60_percent(9)
    machine.begin_s = begin_s
    for i in range(8):
        machine.add(f"{i}", 24, 400)
    machine.add("before", 8192, 1)  # what steps take is known then
    while machine.left["before"]:
        machine.turn()
    for _ in range(5):
        machine.turn()
    since, n_before = machine.now, len(machine.log)
    machine.add("long", 8192, 1)
    while not machine.tokens["long"]:
        machine.turn()
    assert [what for _, what, _ in machine.log[n_before:]][:2] == ["begin", "decode"]
    at = [now for now in machine.tokens["0"] if now >= since]
    assert max(b - a for a, b in zip(at, at[1:])) < 2 * machine.pass_of(8)
