"""The op of candidates on the CPU: lists, sums and scores against their definitions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.candidates_case import (
    N_IDS,
    N_LISTED,
    ROW,
    CandidatesBench,
    check_any_row,
    check_not_finite,
    check_rows_alone,
    draw_words,
)
from helpers.reference_sampler import gumbel

from moegraph.ggml.device import Device
from moegraph.sampling import gumbel as all_gumbel


@pytest.fixture(scope="module", params=[1, 3])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield the CPU device with one and with three threads."""
    opened = Device("cpu", n_threads=request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("n_vocab", [1, 2, 127, 384, 385, 513, 4096, 30_001])
def test_any_row_gives_its_lists_and_sums(n_vocab: int, device: Device) -> None:
    check_any_row(device, n_vocab)


def test_the_random_numbers_are_those_of_the_definition() -> None:
    ids = np.array([0, 1, 2, 248_319, (1 << 30) - 1])
    for key in (0, 1, (1 << 64) - 1, 0x123456789ABCDEF0):
        assert all_gumbel(key, ids).tolist() == pytest.approx(
            [gumbel(key, int(i)) for i in ids], rel=1e-14
        )


def test_rows_have_inputs_and_results_of_their_own(device: Device) -> None:
    check_rows_alone(device, 5, 3000, 1)


def test_wanted_logits_are_looked_up_and_other_ids_give_nan(device: Device) -> None:
    logits = np.arange(1000, dtype=np.float32)
    wanted = (999, 0, 17, 17, 1000, -5, 2**31 - 1, 3)
    with CandidatesBench(device, 1000) as bench:
        row = bench.run(logits, draw_words(wanted=wanted)).view(ROW)[0, 0]
    expected = [999, 0, 17, 17, np.nan, np.nan, np.nan, 3] + [np.nan] * (N_IDS - 8)
    np.testing.assert_array_equal(row["wanted"], np.array(expected, dtype=np.float32))


def test_a_logit_that_is_not_finite_shows_in_the_sum(device: Device) -> None:
    check_not_finite(device, 3000)


def test_more_equal_logits_than_there_is_room_for_are_counted(device: Device) -> None:
    with CandidatesBench(device, N_LISTED + 1) as bench:
        logits = np.zeros(N_LISTED + 1, dtype=np.float32)
        row = bench.run(logits, draw_words()).view(ROW)[0, 0]
        assert (row["n_likely"], row["floor"]) == (N_LISTED + 1, 0.0)
