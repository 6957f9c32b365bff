"""What the regression tests rest on: the comparison notices differences and names the first."""

from __future__ import annotations

import numpy as np
import pytest
from regression.compare import (
    MATCHED_NMSE,
    Difference,
    assert_logits_match,
    assert_nodes_match,
    first_differences,
    margins,
    nmse,
    node_diffs,
    parting_rate,
    report,
)


def nodes() -> dict[tuple[str, int], np.ndarray]:
    rng = np.random.default_rng(0)
    made = {("attn_norm", il): rng.standard_normal((3, 8)) for il in range(3)}
    made |= {("ffn_moe_topk", il): rng.integers(0, 8, (3, 2)) for il in range(3)}
    made["norm", 0] = rng.standard_normal((3, 8))
    return made


def test_nmse_is_relative_to_the_reference() -> None:
    reference = np.full(100, 2.0, np.float32)
    assert nmse(reference, reference) == 0
    assert nmse(reference * 1.1, reference) == pytest.approx(0.01, rel=1e-5)
    assert nmse(np.zeros(100), np.zeros(100)) == 0
    assert nmse(np.ones(100), np.zeros(100)) == float("inf")
    assert nmse(np.full(100, np.nan), reference) == float("inf")


def test_equal_nodes_pass_whatever_their_leading_dimensions() -> None:
    theirs = nodes()
    assert_nodes_match({k: v[None, None] for k, v in theirs.items()}, theirs, "same")


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


def test_one_other_router_id_fails_whatever_the_limit() -> None:
    theirs, ours = nodes(), nodes()
    ours["ffn_moe_topk", 1] = ours["ffn_moe_topk", 1].copy()
    ours["ffn_moe_topk", 1][2, 0] += 1
    (diff,) = node_diffs(ours, theirs, limit=1e9)
    assert "1 router ids differ, first in row 2" in str(diff)


def test_a_missing_node_and_a_wrong_shape_fail() -> None:
    theirs, ours = nodes(), nodes()
    del ours["attn_norm", 0]
    ours["attn_norm", 1] = ours["attn_norm", 1][:2]
    problems = [d.problem for d in node_diffs(ours, theirs)]
    assert problems == ["missing on our side", "shape (2, 8), upstream (3, 8)"]


def test_plumbing_is_not_compared_and_extra_nodes_of_ours_do_no_harm() -> None:
    theirs, ours = nodes(), nodes()
    del ours["norm", 0]
    ours["bank", 0] = np.zeros(3)
    assert node_diffs(ours, theirs) == []


def test_not_a_number_is_never_equal() -> None:
    theirs, ours = nodes(), nodes()
    ours["attn_norm", 0] = np.full((3, 8), np.nan)
    assert node_diffs(ours, theirs, limit=1e9)[0].key == ("attn_norm", 0)


def test_logits_fail_on_error_and_on_argmax_alone() -> None:
    theirs = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], np.float32)
    assert_logits_match(theirs.copy(), theirs, "same")
    with pytest.raises(AssertionError, match="first in row 1 of 2"):
        assert_logits_match(theirs + np.array([[0], [0.1]], np.float32), theirs, "shifted")
    tie = np.array([[1.0, 1.0 + 1e-7]], np.float32)
    with pytest.raises(AssertionError, match="argmax differs in rows \\[0\\]"):
        assert_logits_match(tie[:, ::-1], tie, "tie")
    with pytest.raises(AssertionError, match="shape"):
        assert_logits_match(theirs[:1], theirs, "short")


def test_margins_are_those_of_the_two_largest() -> None:
    logits = np.array([[0.0, 5.0, 3.0], [1.0, 1.0, 0.0]])
    assert margins(logits).tolist() == [2.0, 0.0]


def test_the_allowance_is_twice_upstreams_own_difference_or_the_matched_bound() -> None:
    assert Difference(2e-4, 1e-4).within
    assert not Difference(2.1e-4, 1e-4).within
    assert Difference(MATCHED_NMSE, 0.0).within
    assert not Difference(1e-9, 0.0).within


def test_the_parting_rate_counts_tokens_up_to_the_first_difference() -> None:
    plain = [[1, 2, 3, 4], [5, 6, 7, 8]]
    other = [[1, 2, 3, 4], [5, 6, 9, 9]]
    assert first_differences(other, plain) == [(1, 2)]
    assert parting_rate(plain, plain) == 0
    assert parting_rate(other, plain) == pytest.approx(1 / (4 + 3))
    assert parting_rate([[0, 2, 3, 4], [0, 6, 7, 8]], plain) == 1
