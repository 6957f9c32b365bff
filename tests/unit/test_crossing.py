"""What crosses the link in a sweep: each expert once, in order, and few in vain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.errors import InternalError
from moegraph.experts.crossing import Crossing, Forecast


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=40), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
def test_each_expert_is_sent_once_and_read_once(asked, n_groups, n_each, in_order) -> None:
    crossing = Crossing(n_groups, n_each)
    for il, experts in enumerate(asked):
        sent: list[int] = []
        in_ring: dict[int, int] = {}

        def send(il: int = il, sent: list[int] = sent, ring: dict[int, int] = in_ring) -> None:
            for group, pairs, is_new in crossing.sends():
                assert group.il == il and 0 < len(pairs) <= n_each
                ring[group.index] = 0 if is_new else ring[group.index]
                assert [slot for _, slot in pairs] == [
                    ring[group.index] + i for i in range(len(pairs))
                ]
                ring[group.index] += len(pairs)
                sent += [expert for expert, _ in pairs]

        for half in (experts[: len(experts) // 2], experts):
            crossing.ask(il, half)
            send()
        used: list[int] = []
        while held := crossing.held(il):
            group = held[0 if in_order else len(held) // 2]
            used += group.experts
            crossing.give_back(group)
            send()
        assert sent == list(dict.fromkeys(experts))
        assert used == sent if in_order else sorted(used) == sorted(sent)
        crossing.leave(il)
        assert crossing.n_room == n_groups * n_each


def test_a_layer_is_not_left_while_its_experts_are_queued() -> None:
    crossing = Crossing(1, 2)
    crossing.ask(0, [5, 6, 7])
    assert [pairs for _, pairs, _ in crossing.sends()] == [[(5, 0), (6, 1)]]
    with pytest.raises(InternalError, match="layer 0: experts were asked for and not sent"):
        crossing.leave(0)


@pytest.mark.parametrize(("n_rows", "most"), [(512, 0.1), (4096, 0.02)])
def test_little_is_sent_in_vain(n_rows: int, most: float) -> None:
    """Random layers of skewed popularity, known from as many rows as the prompt has, or fewer."""
    rng, n_expert, k = np.random.default_rng(2), 256, 8
    forecast, n_sent, n_wasted, n_ahead = Forecast(n_rows), 0, 0, 0
    for _ in range(40):
        p = rng.dirichlet(np.full(n_expert, 0.3))
        counts = rng.multinomial(n_rows * k // 4, p).astype(np.float64)
        chosen = np.flatnonzero(rng.multinomial(n_rows * k, p))
        absent = rng.permutation(n_expert)[:100]
        forecast.begin(counts, np.sort(absent), k)
        ahead = forecast.likely(48)
        ahead += forecast.likely(64 - len(ahead))
        assert len(ahead) == len(set(ahead)) <= 64 and set(ahead) <= set(absent.tolist())
        used = np.isin(absent, chosen).sum()
        wasted = len(set(ahead) - set(chosen.tolist()))
        forecast.note(int(used), wasted)
        n_sent, n_wasted, n_ahead = n_sent + used, n_wasted + wasted, n_ahead + len(ahead)
    assert n_wasted <= most * n_sent
    assert n_ahead > 10 * 40
