"""What a pass may do about missing experts follows from its kind, within the room that there is."""

from __future__ import annotations

import pytest

from moegraph.kinds import MAX_CPU_ROWS, MAX_FETCH_ROWS, Kind, MissRules, rules_of


def test_the_next_row_of_one_sequence_may_do_everything() -> None:
    assert rules_of(Kind.DECODE, 1) == MissRules(True, True, True)


@pytest.mark.parametrize("n", [2, 8, 9, 32, 33, 64])
def test_many_sequences_that_decode_give_experts_slots(n: int) -> None:
    fetches, on_cpu = n <= MAX_FETCH_ROWS, n <= MAX_CPU_ROWS
    assert rules_of(Kind.DECODE, n) == MissRules(True, fetches, on_cpu)


@pytest.mark.parametrize("n", [1, 8, 9, 32, 33, 64])
def test_a_verify_pass_does_what_decode_does(n: int) -> None:
    assert rules_of(Kind.VERIFY, n) == rules_of(Kind.DECODE, n)


def test_a_prompt_leaves_the_slots_alone_unless_it_is_short() -> None:
    assert rules_of(Kind.PREFILL, 33) == MissRules(False, False, False)
    assert rules_of(Kind.PREFILL, 512) == MissRules(False, False, False)
    for n in (1, 2, 8, 32):
        assert rules_of(Kind.PREFILL, n) == rules_of(Kind.DECODE, n)


def test_equal_passes_have_one_value() -> None:
    assert rules_of(Kind.VERIFY, 5) is rules_of(Kind.VERIFY, 5)
