"""Trees of drafted tokens against all trees that there are, and the walk through them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from moegraph.draft.drafter import Draft, DraftTree, spine_tree
from moegraph.draft.tree import DDTree, tempered

ANCHOR = 900


def random_draft(rng: np.random.Generator, n_depth: int, n_top: int) -> Draft:
    """Return a draft whose tokens say their place: 10 * depth + rank."""
    p = -np.sort(-rng.dirichlet(np.full(n_top + 3, 0.5), n_depth), axis=1)[:, :n_top]
    tokens = 10 * np.arange(n_depth)[:, None] + np.arange(n_top)
    return Draft(tokens.astype(np.int32), np.log(p).astype(np.float32))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the ranks of the path to each drafted row, in the order of rows."""
    return [tuple(token % 10 for token in tree.ahead(row)) for row in range(1, tree.n_rows)]


def check_tree(tree: DraftTree, draft: Draft) -> None:
    assert tree.tokens[0] == ANCHOR and tree.parents[0] == -1
    for row in range(1, tree.n_rows):
        parent = tree.parents[row]
        assert 0 <= parent < row
        assert tree.child(parent, tree.tokens[row]) == row
        ahead = tree.ahead(row)
        assert ahead[:-1] == tree.ahead(parent)
        assert all(token in draft.tokens[depth] for depth, token in enumerate(ahead))
    assert len(set(paths_of(tree))) == tree.n_rows - 1


@pytest.mark.parametrize("seed", range(20))
def test_ddtree_has_the_likeliest_paths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_depth, n_top = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    draft = random_draft(rng, n_depth, n_top)
    assert draft.log_p is not None
    lp = draft.log_p.astype(np.float64)
    every = [p for n in range(1, n_depth + 1) for p in product(range(n_top), repeat=n)]
    value = {p: sum(lp[depth, rank] for depth, rank in enumerate(p)) for p in every}
    order = sorted(every, key=lambda p: -value[p])
    for budget in (1, 2, 5, 17, 64):
        tree = DDTree(budget, chain_seed=False).tree(ANCHOR, draft)
        check_tree(tree, draft)
        assert paths_of(tree) == order[:budget]
        # with the seed: the spine, then the likeliest of the others
        seeded = DDTree(budget).tree(ANCHOR, draft)
        check_tree(seeded, draft)
        spine = [(0,) * n for n in range(1, min(n_depth, budget) + 1)]
        others = [p for p in order if any(p)]
        assert paths_of(seeded) == (spine + others)[:budget]
        for n in (0, 1, 4, 99):
            cut = seeded.cut(n)
            check_tree(cut, draft)
            assert paths_of(cut) == paths_of(seeded)[: max(0, n - 1)]


def test_a_draft_without_probabilities_becomes_a_chain() -> None:
    draft = Draft(np.array([[5], [6], [7]], dtype=np.int32))
    for chain_seed in (True, False):
        tree = DDTree(2, chain_seed=chain_seed).tree(ANCHOR, draft)
        assert tree == DraftTree((ANCHOR, 5, 6), (-1, 0, 1))
    assert spine_tree(ANCHOR, draft, 2) == DraftTree((ANCHOR, 5, 6), (-1, 0, 1))
    for nothing in (DDTree().tree(ANCHOR, Draft.empty()), spine_tree(ANCHOR, Draft.empty(), 3)):
        assert nothing == DraftTree((ANCHOR,), (-1,))


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_the_temperature_is_that_of_a_softmax(temperature: float) -> None:
    """Exact where everything is listed; the rest counts as tokens as likely as the last one."""
    rng = np.random.default_rng(1)
    logits = np.sort(rng.standard_normal((4, 9)))[:, ::-1]
    logits[:, 5:] = logits[:, 4:5]

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    wanted = log_softmax(logits / temperature)
    for n_top in (5, 9):
        listed = log_softmax(logits)[:, :n_top].astype(np.float32)
        np.testing.assert_allclose(tempered(listed, temperature), wanted[:, :n_top], rtol=1e-5)


def test_probabilities_that_f32_loses_do_no_harm() -> None:
    log_p = np.array([[0.0, -np.inf], [-0.1, -np.inf]], dtype=np.float32)
    draft = Draft(np.array([[1, 2], [13, 14]], dtype=np.int32), log_p)
    assert draft.problem(20) == ""
    for temperature in (0.0, 0.5, 1.0, 2.0):
        tree = DDTree(4, temperature).tree(ANCHOR, draft)
        assert tree.tokens[:3] == (ANCHOR, 1, 13) and tree.n_rows == 5
        assert np.isfinite(tempered(log_p, temperature)).all()


def test_what_is_wrong_with_a_draft_is_said() -> None:
    tokens = np.array([[1, 2], [3, 4]], dtype=np.int32)
    log_p = np.full((2, 2), -1, dtype=np.float32)
    assert Draft(tokens, log_p, np.ones(2, dtype=np.float32)).problem(5) == ""
    assert Draft.empty().problem(5) == ""
    assert Draft(tokens).problem(4) == "it proposes token 4 of 4"
    assert Draft(-tokens).problem(5) == "it proposes token -1 of 5"
    for value in (np.nan, np.inf):
        wrong = log_p.copy()
        wrong[1, 1] = value
        assert Draft(tokens, wrong).problem(5) == "its probabilities are not numbers"
        assert Draft(tokens, log_p, wrong[1]).problem(5) == "its probabilities are not numbers"
    assert "4 probabilities for 2 tokens" in Draft(tokens[:1], log_p).problem(5)
    assert "shape (2,)" in Draft(tokens[0]).problem(5)
    cut = Draft(tokens, log_p, log_p[:, 0]).cut(1)
    assert cut.n_depth == 1 and cut.problem(5) == "" and cut.confidence is not None


def test_the_walk_draws_after_each_accepted_row_and_stops_at_the_first_surprise() -> None:
    tree = DraftTree((ANCHOR, 1, 2, 3, 1), (-1, 0, 1, 1, 2))
    for tokens, path in (
        ((7,), [0]),
        ((1, 7), [0, 1]),
        ((1, 3, 7), [0, 1, 3]),
        ((1, 2, 1, 7), [0, 1, 2, 4]),
        ((1, None), [0, 1]),
        ((None,), [0]),
    ):
        seen: list[int] = []
        drawn = iter(tokens)

        def draw(row: int, seen: list[int] = seen, drawn=drawn) -> int | None:
            seen.append(row)
            return next(drawn)

        assert tree.walk(draw) == path == seen
        assert list(drawn) == []
