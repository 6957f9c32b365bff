"""The tree of token runs: what it finds, what it divides, what goes first."""

from __future__ import annotations

import numpy as np
import pytest

from moegraph.passes.prefixtree import Path, PrefixTree


class States:
    """Stands for saved states of 100 bytes; knows after which ids they were saved."""

    n_bytes = 100

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class Rows:
    """Stands for the saved KV rows of positions: the ids themselves, 4 bytes each."""

    has_arrived = True

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    @property
    def n_bytes(self) -> int:
        return 4 * len(self.ids)

    def split(self, n: int) -> tuple[Rows, Rows]:
        return Rows(self.ids[:n]), Rows(self.ids[n:])


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def save(tree: PrefixTree, *tokens: int, with_rows: bool = True) -> Path:
    """Save a beginning as `Prefixes` does; return its path."""
    path = tree.reach(ids(*tokens))
    path[-1].states = path[-1].states or States(list(tokens))
    tree.touch(path)
    for node in path:
        if node.rows is None and with_rows:
            node.rows = Rows(node.tokens.tolist())
    return path


def found(tree: PrefixTree, *tokens: int, n_kept: int = 0) -> list[int]:
    """Return the ids after which a sequence could go on."""
    path = tree.find(ids(*tokens), n_kept)
    return [token for node in path for token in node.tokens.tolist()]


def check(tree: PrefixTree) -> None:
    """Verify that children begin with their keys and differ, and that rows belong to tokens."""
    roots = tree._roots.items()
    assert all(node.owner == owner for owner, root in roots for node in root.children.values())
    waiting = [(n, [], str(key)) for _, root in roots for key, n in root.children.items()]
    while waiting:
        node, before, key = waiting.pop()
        tokens = node.tokens.tolist()
        assert tokens and str(tokens[0]) == key
        if node.rows is not None:
            assert node.rows.ids == tokens
        if node.states is not None:
            assert node.states.ids == before + tokens
        waiting += [(n, before + tokens, str(k)) for k, n in node.children.items()]


def test_rows_that_are_not_saved_must_be_in_the_sequence() -> None:
    tree = PrefixTree()
    save(tree, 1, 2, 3, with_rows=False)
    assert found(tree, 1, 2, 3, 4, n_kept=2) == []
    assert found(tree, 1, 2, 3, 4, n_kept=3) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_list_of_all_saved_beginnings_finds(seed: int) -> None:
    rng, tree = np.random.default_rng(seed), PrefixTree()
    clock: dict[tuple[int, ...], float] = {}
    for turn in range(300):
        tokens = tuple(rng.integers(0, 2, rng.integers(1, 9)).tolist())
        if rng.random() < 0.5:
            save(tree, *tokens)
            clock[tokens] = 0.0
            way = sorted((a for a in clock if a == tokens[: len(a)]), key=len)
            for a in way:
                follow = {c[len(a)] for c in clock if len(c) > len(a) and c[: len(a)] == a}
                if a in (way[0], tokens) or len(follow) > 1:
                    clock[a] = turn + 0.5 / len(a)  # the end of a prompt goes before its beginning
        elif rng.random() < 0.1:
            limit = int(rng.integers(0, 1500))
            tree.shrink(limit, [])
            assert tree.n_bytes <= limit
            n_left = tree.n_states
            kept = sorted(clock, key=clock.__getitem__)[len(clock) - n_left :]
            clock = {name: clock[name] for name in kept}
        usable = [a for a in clock if a == tokens[: len(a)]]
        best = max(usable, key=len, default=())
        assert tuple(found(tree, *tokens)) == best, f"turn {turn}"
        assert tree.n_states == len(clock)
        check(tree)


def test_owners_share_the_room_and_nothing_else() -> None:
    tree = PrefixTree()
    save(tree, 1, 2, 3)
    for owner in ("a", "b"):
        path = tree.reach(ids(1, 2, 3), owner)
        path[-1].states, path[-1].rows = States([1, 2, 3]), Rows([1, 2, 3])
        tree.touch(path)
        assert tree.reach(ids(1, 2), owner)[0] is not path[0]  # divided
    check(tree)
    assert [len(tree.find(ids(1, 2, 3), 0, owner)) for owner in ("", "a", "b", "c")] == [1, 2, 2, 0]
    assert len(tree.places()) == tree.n_states == 3
    tree.shrink(tree.n_bytes - 1, [])
    assert found(tree, 1, 2, 3) == [] and len(tree.find(ids(1, 2, 3), 0, "b")) == 2
    assert set(tree._roots) == {"a", "b"}  # nothing is left of an owner without states
    tree.clear()
    assert not list(tree.nodes()) and not tree.find(ids(1, 2, 3), 0, "b")


def test_of_what_is_to_stay_only_the_last_states_do() -> None:
    tree = PrefixTree()
    save(tree, 1, 2)
    kept = save(tree, 1, 2, 3, 4)
    save(tree, 5)
    assert not tree.shrink(0, kept)
    assert found(tree, 1, 2, 3, 4) == [1, 2, 3, 4] and found(tree, 1, 2, 9) == found(tree, 5) == []
    assert tree.n_bytes == 100 + 2 * 4 * 4
    assert tree.shrink(0, []) and tree.n_bytes == 0


def test_the_beginning_that_all_have_stays_longest() -> None:
    tree = PrefixTree()
    save(tree, 1)
    for n in range(2, 6):
        save(tree, 1, n)
        save(tree, 1, n, 7)
    while tree.n_states > 1:
        tree.shrink(tree.n_bytes - 1, [])
        assert found(tree, 1, 9) == [1]
    check(tree)
