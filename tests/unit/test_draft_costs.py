"""Parts of the controller: rates of acceptance, costs of passes and drafts, shapes, statistics."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from moegraph.draft.estimates import Acceptance, Experts, Known, PassTimes
from moegraph.draft.plan import Shape, Source, Step, grow
from moegraph.draft.stats import Recorder, SpecStats

WIDTHS = (2, 3, 4, 6, 8, 16)
A3B = Experts(40, 256, 8, 43e-6)


def test_a_depth_is_counted_only_where_the_walk_came_to_it() -> None:
    rng, known = random.Random(1), Acceptance(6, 0.5)
    true = (0.9, 0.5, 0.8, 0.3)
    for _ in range(3000):
        ranks = []
        for p in true:
            ranks.append(0 if rng.random() < p else -1)
            if ranks[-1]:
                break
        known.observe(ranks)
    for rate, p in zip(known.rates, true):
        assert rate == pytest.approx(p, abs=0.13)
    # a depth that no draft had is believed to be like the one before it
    assert known.rates[4] == pytest.approx(known.rates[3])


def test_drafts_that_are_cut_for_want_of_confidence_do_not_flatter_the_rest() -> None:
    rng, known, naive = random.Random(2), Acceptance(2, 0.5), Acceptance(2, 0.5)
    sure, unsure = math.log(0.95), math.log(0.3)
    for _ in range(4000):
        log_p = sure if rng.random() < 0.5 else unsure
        if log_p == unsure and rng.random() < 0.9:  # mostly not verified
            known.expect(known.rates_of([log_p]), 0)
            continue
        rank = 0 if rng.random() < (0.95 if log_p == sure else 0.3) else -1
        known.observe([rank], [log_p])
        naive.observe([rank], [log_p])
    assert naive.rates[0] > 0.8  # really 0.625
    assert known.rates[0] == pytest.approx(0.625, abs=0.1)


def test_confidence_tells_good_drafts_from_bad_ones_and_is_calibrated() -> None:
    rng, known = random.Random(3), Acceptance(1, 0.7)
    for _ in range(3000):
        said = rng.choice((0.999, 0.5))  # really 0.9 and 0.4
        right = rng.random() < (0.9 if said > 0.9 else 0.4)
        known.observe([0 if right else 1], [math.log(said)])
    assert known.rates_of([math.log(0.999)])[0] == pytest.approx(0.9, abs=0.08)
    assert known.rates_of([math.log(0.5)])[0] == pytest.approx(0.4, abs=0.08)
    assert 0 < known.rates_of([-math.inf])[0] < 1


def test_the_candidates_beside_the_spine_are_counted_where_it_was_wrong() -> None:
    rng, known = random.Random(4), Acceptance(4, 0.7, n_top=3)
    for _ in range(1500):
        drawn = rng.random()
        known.observe([0, 1 if drawn < 0.5 else 2 if drawn < 0.55 else -1])
    assert known.leaf == pytest.approx((0.5, 0.05), abs=0.08)
    assert Acceptance(4, 0.7).leaf == ()


def test_hopes_are_above_rates_and_come_down_to_them() -> None:
    known = Acceptance(4, 0.6)
    before = [hope - rate for hope, rate in zip(known.hopes(1.0), known.rates)]
    for _ in range(200):
        known.observe([0, -1] if _ % 3 else [-1])
    after = [hope - rate for hope, rate in zip(known.hopes(1.0), known.rates)]
    assert all(gap > 0 for gap in before + after)
    assert after[0] < before[0] / 3 and after[1] < before[1] / 3


def expected_tokens(accept: tuple[float, ...], leaf: tuple[float, ...], shape: Shape) -> float:
    tokens, reach = 1.0, 1.0
    for depth, p in enumerate(accept[: shape.n_spine]):
        n = shape.leaves[depth] if depth < len(shape.leaves) else 0
        tokens += reach * (p + (1 - p) * sum(leaf[:n]))
        reach *= p
    return tokens


@pytest.mark.parametrize("leaf", [(), (0.4,), (0.4, 0.15)])
@pytest.mark.parametrize("accept", [(0.9, 0.5, 0.9), (0.2, 0.9, 0.9), (0.6, 0.6, 0.6)])
def test_rows_are_added_in_the_best_order(
    accept: tuple[float, ...], leaf: tuple[float, ...]
) -> None:
    growth = grow(accept, leaf, 9)
    for n_rows, tokens in enumerate(growth.tokens, 1):
        shape = growth.shape(n_rows)
        assert shape.n_rows == n_rows and len(shape.leaves) <= shape.n_spine
        assert tokens == pytest.approx(expected_tokens(accept, leaf, shape))
        # as good as any shape of that size with at most one leaf more than the spine allows
        for n_spine in range(len(accept) + 1):
            for leaves in itertools.product(range(len(leaf) + 1), repeat=n_spine):
                other = Shape(n_spine, leaves)
                if other.n_rows == n_rows and min(accept) > max(leaf, default=0):
                    assert tokens >= expected_tokens(accept, leaf, other) - 1e-12


def test_distinct_experts_of_a_pass_are_those_that_were_measured() -> None:
    measured = {1: 8, 2: 13.5, 4: 22.2, 8: 34.9, 16: 51.7, 32: 71.6}
    for n_rows, n in measured.items():
        assert A3B.distinct(n_rows) / 40 == pytest.approx(n, rel=0.01)


def test_before_anything_is_measured_the_law_says_what_passes_take() -> None:
    times = PassTimes(WIDTHS)
    assert times.seconds == {} and not times.plain_s
    times.observe(1, 8e-3, 0)  # it built graphs
    times.observe(1, 2e-3, 0)
    times.update()
    assert times.plain_s == 2e-3
    assert times.seconds[4] == pytest.approx(3.12e-3) and times.seconds[16] == pytest.approx(5.4e-3)


def test_missing_experts_make_wide_passes_take_longer() -> None:
    times = PassTimes(WIDTHS, A3B)
    for _ in range(20):
        times.observe(1, 2.4e-3 + 32 * 43e-6, 32)
    times.update()
    missing_s = 32 * 34.9 / 8 * 43e-6
    assert times.seconds[8] == pytest.approx(2.03 * 2.4e-3 + missing_s, rel=0.01)


@pytest.mark.parametrize("power", [0.45, 0.95, 1.2])
def test_how_many_experts_more_rows_lack_is_learned(power: float) -> None:
    """Also of widths that were not measured."""
    times, rng = PassTimes(WIDTHS, A3B), random.Random(7)

    def lacked(n_rows: int) -> float:
        return 30 * (A3B.distinct(n_rows) / A3B.distinct(1)) ** power

    for _ in range(100):
        for n_rows in (1, 4):
            n = round(rng.gauss(lacked(n_rows), 3))
            law = {1: 1.0, 4: 1.56}[n_rows]
            times.observe(n_rows, 2.4e-3 * law + 43e-6 * n, n)
    times.update()
    assert times.seconds[4] == pytest.approx(2.4e-3 * 1.56 + 43e-6 * lacked(4), rel=0.05)
    assert times.seconds[8] == pytest.approx(2.4e-3 * 2.03 + 43e-6 * lacked(8), rel=0.3)


def test_measured_times_replace_the_law_also_at_widths_nearby() -> None:
    times = PassTimes(WIDTHS)
    for _ in range(4):
        times.observe(1, 2e-3, 0)
    for at in range(40):
        times.observe(8, 500.0 if at == 20 else 6e-3, 0)  # once the process slept
    times.update()
    assert times.seconds[8] == pytest.approx(6e-3, rel=0.06)
    by_law = 2e-3 * 1.795  # six rows
    assert by_law * 1.1 < times.seconds[6] < by_law * 1.57
    assert times.seconds[16] > 2e-3 * 2.7 * 1.2
    assert times.seconds[2] == pytest.approx(2.56e-3, rel=0.15)


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.5e-3, 0.0), (0.1e-3, 0.3e-3)])
def test_the_time_of_a_draft_follows_what_was_measured(fixed_s: float, token_s: float) -> None:
    times, drafter = PassTimes(WIDTHS), Known(Source("mtp", 8, 0.2, 0.05), 8)
    for _ in range(2):
        times.observe(1, 2e-3, 0)
    for n in (2, 5, 3, 8, 1, 4) * 20:
        drafter.observe_draft(n, fixed_s + n * token_s, 2e-3)
    for n in (1, 4, 8):
        assert drafter.draft_s(n, times) == pytest.approx(fixed_s + n * token_s, rel=0.15)
    assert drafter.draft_s(0, times) == 0.0


def test_statistics_are_sums_and_rates_of_steps() -> None:
    recorder = Recorder()
    recorder.add(Step("", 2e-3), 0.0)
    recorder.add(Step("mtp", 6e-3, 3, 5, 4, 4, 2, (0, 0, -1), (), 1e-3, 4e-3, 0.5e-3), 2e-3)
    before = recorder.stats
    recorder.add(Step("mtp", 4e-3, 2, 4, 2, 2, 1, (1,), (), 1e-3, 3e-3, 0.5e-3), 2e-3)
    recorder.add(Step("dflash", 0.0, 1, 3, 2, 2, 0, (-1,)), 2e-3)  # its time is not known
    recorder.add(Step("mtp", 2.5e-3, 1, 1, 2), 2e-3)  # not worth a row
    stats = recorder.stats
    assert stats.report() == {
        "source": "mtp", "steps": 3, "plain_steps": 2, "drafted": 9, "accepted": 3,
        "tokens_per_step": 2.0, "accepted_by_position": [0.3333, 0.3333, 0.0, 0.0],
        "drafter_ms": 1.0, "verify_ms": 3.5, "commit_ms": 0.5,
        "speedup": round(12 / 12.5, 4), "chosen": {"dflash": {"3": 1}, "mtp": {"4": 1, "5": 1}},
    }  # fmt: skip
    later = stats.since(before)
    assert (later.steps, later.tokens, later.accepted, later.plain_steps) == (2, 3, 1, 1)
    assert later.accepted_by_position == [0.0, 0.0]
    assert later.chosen == {("mtp", 4): 1, ("dflash", 3): 1}
    assert stats.since(stats) == SpecStats(verified_at=(0,) * 4, accepted_at=(0,) * 4)
    assert SpecStats().report()["source"] is None and SpecStats().report()["speedup"] is None
