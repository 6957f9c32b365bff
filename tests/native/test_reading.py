"""How prompts are read: which share a sweep, how long chunks and parts are; without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moegraph.kinds import SHORT_PROMPT
from moegraph.loop.reading import _SHARED, Reading
from moegraph.runner.sweep_batch import SweepBatch


def ids(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def request(n: int, owner: str = "", reuse: bool = True) -> Any:
    """Return a request for a prompt that begins as all others do, whose answer has slot n."""
    return SimpleNamespace(ids=ids(n), slot=n, rest=None, request=SimpleNamespace(
        owner=owner, reuse=reuse,
    ))  # fmt: skip


def holding(n_held: int) -> Any:
    return SimpleNamespace(held=lambda slot: [0] * n_held)


@pytest.mark.parametrize(
    ("owner", "reuse", "is_on", "n", "expected"),
    [
        ("", True, True, _SHARED + 11, True), ("", True, True, _SHARED + 10, False),
        ("a", True, True, 999, False), ("", False, True, 999, False), ("", True, False, 999, False),
    ],
)  # fmt: skip
def test_a_prompt_waits_for_a_beginning_that_is_long_enough(
    owner: str, reuse: bool, is_on: bool, n: int, expected: bool
) -> None:
    """Longer than what it goes on from already, by more than _SHARED."""
    reading: Any = SimpleNamespace(_prefixes=SimpleNamespace(store=SimpleNamespace(is_on=is_on)))
    reading.n_rest = lambda answer: len(answer.ids) - 10
    other = request(2000)
    assert Reading._shares(reading, request(n, owner, reuse), other) == expected
    assert not Reading._shares(reading, request(n), request(2000, reuse=False))


@pytest.mark.parametrize("n_prompt", [39, 40, 41])
def test_a_slot_counts_if_the_prompt_goes_on_after_all_of_it(n_prompt: int) -> None:
    reading: Any = SimpleNamespace(_passes=holding(40))
    for n_same in (39, 40):
        reading._prefixes = SimpleNamespace(n_common=lambda *_, n=n_same: min(n, n_prompt))
        n_kept = 40 if n_same == 40 and n_prompt == 41 else 0
        assert Reading._n_kept(reading, 0, request(n_prompt)) == n_kept


@pytest.mark.parametrize(
    ("sweeps_few", "n_busy", "piece_s", "n_rows", "expected"),
    [
        (False, 4, 9.0, SHORT_PROMPT, True), (False, 4, 0.0, SHORT_PROMPT + 1, False),
        (True, 1, 9.0, 8, True), (True, 4, 0.5, 8, True), (True, 4, 0.6, 8, False),
        (True, 4, None, 8, False),
    ],
)  # fmt: skip
def test_a_short_prompt_is_one_pass_unless_others_would_wait_too_long(
    sweeps_few: bool, n_busy: int, piece_s: float | None, n_rows: int, expected: bool
) -> None:
    costs = SimpleNamespace(share=0.5, seconds=lambda _: piece_s, pass_s=lambda n: n / 3)
    reading: Any = SimpleNamespace(
        _sweeps_few=sweeps_few, _tally=SimpleNamespace(costs=costs),
        _answers=SimpleNamespace(n_busy=n_busy),
    )  # fmt: skip
    assert Reading._is_piece(reading, n_rows) == expected


def test_the_first_part_of_a_prompt_is_as_long_as_a_sweep() -> None:
    """A mark where it ends is in neither part: the states are kept between them."""
    reading: Any = SimpleNamespace(_passes=holding(3))
    answer, draws = request(0), np.zeros((1, 1), np.int32)
    whole = SweepBatch(ids(8), cuts=(5, 7), draws=draws)
    assert Reading._first_part(reading, answer, whole, 8) is whole and answer.rest is None
    batch = SweepBatch(ids(20), cuts=(5, 11, 12), draws=draws)
    part = Reading._first_part(reading, answer, batch, 8)
    assert (part.tokens.tolist(), part.cuts, part.draws) == ([*range(8)], (5,), None)
    assert (answer.rest.tokens.tolist(), answer.rest.cuts) == ([*range(8, 20)], (12,))
    assert part.greedy and answer.rest.draws is draws


def test_chunks_beside_others_are_short_but_no_more_than_one_sweep_has() -> None:
    asked: list[Any] = []
    costs = SimpleNamespace(
        prompt_share=lambda n_reading, n_busy: n_reading / n_busy, pass_s=lambda n: 3.0 * n,
        chunk_rows=lambda *args: asked.append(args) or 1,
    )  # fmt: skip
    reading: Any = SimpleNamespace(
        _n_chunks=12, _n_sweep=1000, _n_ubatch=512, _streams=False, _passes=holding(100),
        _answers=SimpleNamespace(n_busy=6), _tally=SimpleNamespace(costs=costs),
    )  # fmt: skip
    batches = [SweepBatch(ids(300), cuts=(7, 9)), SweepBatch(ids(200))]
    Reading._chunk_rows(reading, batches)
    reading._n_chunks = 4
    Reading._chunk_rows(reading, batches[:1])
    # rows: most, least, of the longest context; seconds
    assert asked == [(500, 63, 400, 0.5 * 12.0), (300, 300, 400, 0.2 * 15.0)]
