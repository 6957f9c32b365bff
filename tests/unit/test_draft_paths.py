"""Trees of the likeliest paths: against every path of small lists."""

from __future__ import annotations

from itertools import count

import numpy as np

from moegraph.draft.tree import PathLists, best_paths


def random_lists(rng: np.random.Generator, n: int, m: int, n_top: int, n_vocab: int) -> PathLists:
    """Return lists for n depths over a vocabulary of n_vocab tokens."""
    tokens, log_p = [], []
    for depth in range(n):
        k = m if depth else 1
        tokens.append(np.array([rng.permutation(n_vocab)[:n_top] for _ in range(k)], np.int32))
        p = -np.sort(-rng.dirichlet(np.full(n_vocab, 0.3), k), axis=1)[:, :n_top]
        log_p.append(np.log(p + 1e-30).astype(np.float32))
    return listed(tokens, log_p)


def listed(tokens: list[np.ndarray], log_p: list[np.ndarray]) -> PathLists:
    """Return lists that follow the first tokens of the depth before."""
    before = [tokens[d - 1][0, : len(ids)].tolist() if d else [] for d, ids in enumerate(tokens)]
    return PathLists(tokens, log_p, before)


def every_path(lists: PathLists) -> dict[tuple[int, ...], float]:
    """Return the log probability of every path that the lists know."""
    found: dict[tuple[int, ...], float] = {}
    front: list[tuple[tuple[int, ...], float, int]] = [((), 0.0, 0)]
    for depth in count():
        if depth == len(lists.tokens):
            return found
        after = []
        for path, value, column in front:
            rows = zip(lists.tokens[depth][column].tolist(), lists.log_p[depth][column].tolist())
            for token, log_p in rows:
                longer, total = (*path, token), value + max(log_p, -100.0)
                found[longer] = total
                last = depth + 1 == len(lists.tokens)
                known = [] if last else list(lists.before[depth + 1])
                if token in known:
                    after.append((longer, total, known.index(token)))
        front = after


def test_the_rows_are_the_likeliest_paths() -> None:
    rng = np.random.default_rng(3)
    for turn in range(60):
        lists = random_lists(rng, int(rng.integers(1, 5)), 3, 4, 9)
        paths = every_path(lists)
        n_nodes = int(rng.integers(1, 20))
        tree = best_paths(99, lists, n_nodes)
        assert tree.n_rows == 1 + min(n_nodes, len(paths)) and tree.tokens[0] == 99
        taken = [tree.ahead(row) for row in range(1, tree.n_rows)]
        assert len(set(taken)) == len(taken)
        values = [paths[path] for path in taken]
        best = sorted(paths.values(), reverse=True)[: len(values)]
        np.testing.assert_allclose(values, best, err_msg=str(turn))
        assert all(parent < row for row, parent in enumerate(tree.parents))


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    lists = random_lists(np.random.default_rng(5), 4, 3, 5, 12)
    large = best_paths(1, lists, 30)
    for n in range(1, 30):
        assert best_paths(1, lists, n) == large.cut(n + 1)


def test_lists_in_another_order_than_what_follows_them() -> None:
    """The likeliest token is the second that the next lists follow; after 3, nothing is known."""
    tokens = [np.array([[2, 3, 1]], np.int32), np.array([[4, 5, 6], [7, 8, 9]], np.int32)]
    log_p = [np.array([[-0.1, -0.2, -3]]), np.array([[-0.1, -2, -3], [-0.5, -2, -3]])]
    lists = PathLists(tokens, log_p, [[], [1, 2]])
    tree = best_paths(0, lists, 20)
    assert tree.child(0, 3) and not any(tree.child(tree.child(0, 3) or 0, t) for t in range(10))
    assert tree.child(tree.child(0, 2) or 0, 7) and tree.child(tree.child(0, 1) or 0, 4)
    spine, probabilities = lists.spine()
    assert [ids[0] for ids in spine] == [2, 7] and [lp[0] for lp in probabilities] == [-0.1, -0.5]
    assert len(PathLists(tokens, log_p, [[], [1, 3]]).spine()[0]) == 1
