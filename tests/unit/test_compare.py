"""What the regression tests rest on: the comparison notices differences and names the first."""

from __future__ import annotations

import numpy as np
import pytest
from regression.compare import (
    Difference,
    assert_logits_equal,
    node_diffs,
    report,
    same_bits,
)


def nodes() -> dict[tuple[str, int], np.ndarray]:
    rng = np.random.default_rng(0)
    made = {("attn_norm", il): rng.standard_normal((3, 8)) for il in range(3)}
    made |= {("ffn_moe_topk", il): rng.integers(0, 8, (3, 2)) for il in range(3)}
    made["norm", 0] = rng.standard_normal((3, 8))
    return made


def test_the_report_names_the_first_node_in_upstreams_order() -> None:
    theirs, ours = nodes(), nodes()
    ours["attn_norm", 2] = ours["attn_norm", 2] + 1
    ours["attn_norm", 1] = ours["attn_norm", 1].copy()
    ours["attn_norm", 1][2, 5] += 0.5
    diffs = node_diffs(ours, theirs)
    assert [d.key for d in diffs] == [("attn_norm", 1), ("attn_norm", 2)]
    text = report(diffs, len(theirs))
    assert "2 of 7 nodes differ; the first is attn_norm of layer 1" in text
    assert "worst at (2, 5)" in text


def test_one_other_router_id_fails() -> None:
    theirs, ours = nodes(), nodes()
    ours["ffn_moe_topk", 1] = ours["ffn_moe_topk", 1].copy()
    ours["ffn_moe_topk", 1][2, 0] += 1
    (diff,) = node_diffs(ours, theirs)
    assert "1 router ids differ, first in row 2" in str(diff)


def test_a_missing_node_and_a_wrong_shape_fail() -> None:
    theirs, ours = nodes(), nodes()
    del ours["attn_norm", 0]
    ours["attn_norm", 1] = ours["attn_norm", 1][:2]
    problems = [d.problem for d in node_diffs(ours, theirs)]
    assert problems == ["missing on our side", "shape (2, 8), upstream (3, 8)"]


def test_the_last_bit_counts() -> None:
    theirs, ours = nodes(), nodes()
    value = ours["attn_norm", 1] = ours["attn_norm", 1].copy()
    value[1, 3] = np.nextafter(value[1, 3], np.inf)
    assert [d.key for d in node_diffs(ours, theirs)] == [("attn_norm", 1)]
    assert not same_bits(np.array([0.0]), np.array([-0.0])), "equal, but not the same bits"
    assert not same_bits(np.zeros(2), np.zeros(2, np.float32))
    assert not same_bits(np.array([np.nan]), np.array([np.nan]))


def test_logits_fail_on_one_bit_and_the_first_row_is_named() -> None:
    theirs = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], np.float32)
    assert_logits_equal(theirs.copy(), theirs, "same")
    near = theirs.copy()
    near[1, 0] = np.nextafter(near[1, 0], np.float32(4))
    with pytest.raises(AssertionError, match="1 of 2 rows differ, first in row 1, NMSE"):
        assert_logits_equal(near, theirs, "a bit")
    with pytest.raises(AssertionError, match="shape"):
        assert_logits_equal(theirs[:1], theirs, "short")


def test_the_allowance_is_twice_upstreams_own_difference_and_no_more() -> None:
    assert Difference(2e-4, 1e-4).within
    assert not Difference(2.1e-4, 1e-4).within
    assert Difference(0.0, 0.0).within
    assert not Difference(1e-12, 0.0).within
    assert not Difference(float("nan"), 1.0).within
    assert not Difference(float("inf"), 1.0).within
    assert str(Difference(3, 2, "flips")) == "flips 3, upstream from itself 2 (1.50 times)"
    assert str(Difference(0, 0)) == "NMSE 0, upstream from itself 0"
