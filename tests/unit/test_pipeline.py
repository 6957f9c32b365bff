"""Stages in a row: what one sequence and many get, and how many groups are best."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moegraph.experts.rowlaw import pass_time
from moegraph.placement.pipeline import throughput

WHOLE = 2.334e-3  # a token of a 35B-A3B on an H200, measured


def test_several_sequences_keep_two_stages_busy() -> None:
    """The bars of two cards with 8 and 32 sequences come from here."""
    for n_seq, least in ((8, 1.2), (32, 1.3)):
        one = throughput([WHOLE], 0.0, n_seq)
        two = throughput([WHOLE / 2] * 2, 30e-6, n_seq)
        assert two.n_groups == 2 and two.busy > 0.9
        assert least < two.tokens_per_s / one.tokens_per_s < 1.5
        in_one = throughput([WHOLE / 2] * 2, 30e-6, n_seq, n_groups=1)
        assert in_one.tokens_per_s < one.tokens_per_s


@given(
    st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=10), st.floats(0, 1e-2),
    st.integers(1, 64),
)  # fmt: skip
def test_a_stage_is_never_busier_than_always(stages: list[float], hop: float, n: int) -> None:
    found = throughput(stages, hop, n)
    assert 0 < found.busy <= 1 + 1e-9
    assert 1 <= found.n_groups <= n
    # no faster than if all work were spread without bubbles
    best = len(stages) * n / (sum(stages) * pass_time(n))
    assert found.tokens_per_s <= best * (1 + 1e-9)
