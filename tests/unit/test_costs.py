"""What work takes, as learned from rounds; the sizes of chunks and pieces that follow from it."""

from __future__ import annotations

import pytest

from moegraph.kinds import SweepStep
from moegraph.loop.costs import PIECES, Costs


def layer(n_rows: int, n_kv: int = 0) -> SweepStep:
    return SweepStep("attention" if n_kv else "recurrent", n_rows, n_kv)


def test_chunks_of_a_prompt_are_shorter_where_a_step_would_take_too_long() -> None:
    costs = Costs()
    assert costs.chunk_rows(2048, 32, 8, 9000) == 2048  # no pass to be beside
    costs.note_round((), 8, 0.005)
    assert costs.chunk_rows(2048, 32, 8, 9000) == 32  # nothing is known of steps
    costs.note_round([layer(2048)] * 100, 0, 0.5)  # 5 ms a step
    assert costs.chunk_rows(2048, 32, 8, 9000) == 512  # 3.1 ms by a guess
    assert costs.chunk_rows(2048, 1100, 8, 9000) == 2048
    assert costs.chunk_rows(300, 160, 8, 9000) == 300
    costs.note_round([layer(2048, 4096)] * 10, 0, 0.05)
    assert costs.chunk_rows(2048, 32, 8, 4000) == 512
    costs.note_round([layer(2048, 9216)] * 10, 0, 0.2)
    assert costs.chunk_rows(2048, 32, 8, 9000) == 32
    costs.note_round((), 32, 1.0)
    assert costs.chunk_rows(2048, 32, 32, 9000) == 2048


@pytest.mark.parametrize("n_rows", [16, 1024])
def test_steps_do_not_seem_to_cost_nothing_beside_a_pass_that_took_long_once(n_rows: int) -> None:
    """Else all of them would run at once, and nothing would bring their costs back."""
    costs = Costs()
    costs.note_round([layer(1024)], 0, 0.0024)
    costs.note_round((), 26, 0.047)  # it had to wait; such a pass takes 0.014
    for _ in range(30):
        costs.note_round([layer(n_rows)], 26, 0.014 + (0.0024 if n_rows == 1024 else 0.0006))
    assert 0.0006 < (costs.of_step(layer(1024)) or 0.0) < 0.0048
    assert 0.012 < (costs.pass_s(26) or 0.0) < 0.016
    costs.note_round([layer(200, 4096)], 26, 0.001)  # whatever a round says
    assert (costs.of_step(layer(200, 4096)) or 0.0) > 1e-5


def test_rows_of_pieces() -> None:
    costs = Costs()
    assert costs.piece_rows(900, 1.0) == costs.piece_rows(900, 0.0) == PIECES[-1]
    costs.note_piece(32, 0.01)
    assert costs.piece_rows(500, 0.02) == 128  # a guess: four times the rows, twice the time
    costs.note_piece(128, 0.03)
    assert costs.piece_rows(500, 0.02) == 32
    assert costs.piece_rows(500, 0.03) == 128
    assert costs.piece_rows(90, 0.03) == 90
    assert costs.piece_rows(500, 0.001) == 500  # nothing fits: 60 ms for all, by a guess
    costs.note_piece(500, 0.2)
    assert costs.piece_rows(500, 0.001) == 128


def test_costs_of_steps_beside_a_pass() -> None:
    costs, steps = Costs(), [layer(32)] * 5
    costs.upcoming = steps[0]
    assert costs.pass_s(3) is costs.step_s is None
    costs.note_round(steps, 2, 0.03)  # nothing is known of a pass: all of it counts as one
    costs.note_round((), 2, 0.01)
    assert costs.step_s is None and 0.01 <= (costs.pass_s(1) or 0.0) < 0.03
    for _ in range(100):
        costs.note_round((), 2, 0.01)
        costs.note_round((), 8, 0.02)
        costs.note_round(steps, 2, 0.03)
    assert costs.pass_s(2) == pytest.approx(0.01)
    assert costs.step_s == pytest.approx(0.004)
    assert (costs.pass_s(1), costs.pass_s(4), costs.pass_s(100)) == (
        costs.pass_s(2), costs.pass_s(2), costs.pass_s(8),
    )  # fmt: skip


def test_what_was_measured_while_graphs_were_built_is_an_upper_bound() -> None:
    costs, steps = Costs(), [layer(512)] * 2
    costs.note_round((), 2, 0.1, has_built=True)
    assert costs.pass_s(2) == pytest.approx(0.1)
    costs.note_round((), 2, 0.005)
    assert costs.pass_s(2) == pytest.approx(0.005)
    costs.note_round((), 2, 0.03, has_built=True)
    assert costs.pass_s(2) == pytest.approx(0.005)
    costs.note_round(steps, 2, 0.045, has_built=True)
    assert costs.of_step(layer(512)) == pytest.approx(0.02)
    for _ in range(20):  # each builds, because each layer has graphs of its own
        costs.note_round(steps, 2, 0.009, has_built=True)
    assert costs.of_step(layer(512)) == pytest.approx(0.0045, rel=0.1)
    costs.note_round((), 2, 0.02)  # even if a pass seems to take longer than it does
    for _ in range(20):
        costs.note_round(steps, 2, 0.009, has_built=True)
    assert costs.of_step(layer(512)) == pytest.approx(0.0045, rel=0.1)
    costs.note_round(steps, 2, 0.045, has_built=True)
    assert costs.of_step(layer(512)) == pytest.approx(0.0045, rel=0.1)
