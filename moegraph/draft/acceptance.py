"""Which drafted tokens the text takes: those that the target draws itself."""

from __future__ import annotations

from collections.abc import Callable

from .tree import DraftTree


def walk(tree: DraftTree, draw: Callable[[int], int | None]) -> list[int]:
    """Return the accepted rows of a tree, from the anchor on.

    draw: returns the token that the target draws after a row; the text takes it, whether it was
    drafted or not. None: the text has ended, or ends with the token that was drawn there. So a
    token is drawn after each row that is returned, and the walk ends at the first that was not
    drafted there.

    Each row's draw is a draw of the target after exactly these tokens. So the text has the
    target's distribution with any sampler and any tree.
    """
    path, row = [0], 0
    while True:
        token = draw(row)
        child = None if token is None else tree.child(row, token)
        if child is None:
            return path
        path.append(child)
        row = child
