"""A batch that says two things at once is refused before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest

from moegraph.errors import InternalError, RequestError
from moegraph.graphs.rows import Tree
from moegraph.kinds import Kind
from moegraph.runner import Batch

ROWS = np.array([[1, 2, 3], [4, 5, 6]], np.int32)


@pytest.mark.parametrize(("path", "words"), [
    ([0, 2, 3], ""),
    ([4], ""),
    ([], ""),
    ([0, 3], "the parent of row 3 is 2, not 0"),
    ([2], "the parent of row 2 is 0, not -1"),
    ([0, 5], "the tree has rows 0 to 4, not 5"),
    ([-1], "the tree has rows 0 to 4, not -1"),
])  # fmt: skip
def test_a_path_goes_from_a_root_from_parent_to_child(path: list[int], words: str) -> None:
    tree = Tree(np.array([[-1, 0, 0, 2, -1, 0]], np.int32), (5,))
    assert tree.require_path(0, path) == words


@pytest.mark.parametrize(("make", "kind", "words"), [
    (lambda: Batch(ROWS, (1, 1)), RequestError, "sequence 1 is named twice in one pass"),
    (lambda: Batch(ROWS, (1,)), RequestError, "token ids for 2 sequences, but 1 sequences"),
    (lambda: Batch(ROWS, (0, 1), Kind.VERIFY), InternalError, "a verify pass has no tree"),
    (lambda: Batch(ROWS, (0, 1), tree=Tree(ROWS, (3, 3))), InternalError, "decode pass has a tree"),
    (lambda: Batch.verify(ROWS, [0, 1], lengths=[3]), RequestError, "lengths"),
    (lambda: Batch.verify(ROWS, [0, 1], lengths=[3, 0]), RequestError, "sequences of 1 to 3 rows"),
    (lambda: Batch.verify(ROWS, [0, 1], lengths=[4, 1]), RequestError, r"lengths \[4, 1\]"),
    (lambda: Batch.verify(ROWS, [0, 1], [[-1, 0, 2], [-1, 0, 1]]), InternalError, "tree 0: the p"),
    (lambda: Batch.verify(ROWS, [0, 0]), RequestError, "sequence 0 is named twice"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(make, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        make()
