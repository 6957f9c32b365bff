"""A tree of token runs: which beginnings of prompts need not be computed. It knows no device.

A node is a run of tokens that follows its parent's. It may own the KV rows of its run, and the
recurrent states after its last token. A sequence can go on after a node with states, if the rows of
all positions before it are in the tree or in the sequence itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..resident.hostcopies import RowsCopy, StatesCopy

Ids = npt.NDArray[np.int32]


@dataclass(eq=False)
class Node:
    """A run of tokens; the token runs from the root to a node are the beginning of a prompt.

    rows: None if they are not saved. states: None if none were saved here. used: when the states
    were last saved or restored; a larger number is later. owner: who may go on from here.
    """

    tokens: Ids
    children: dict[int, Node] = field(default_factory=dict)
    rows: RowsCopy | None = None
    states: StatesCopy | None = None
    used: int = 0
    owner: str = ""

    @property
    def n_bytes(self) -> int:
        """Return the bytes of tokens, rows and states."""
        found = self.tokens.nbytes
        found += self.rows.n_bytes if self.rows else 0
        return found + (self.states.n_bytes if self.states else 0)


# The nodes from a child of the root to some node.
Path = list[Node]
Give = Callable[[Path, "StatesCopy"], None]


def n_common(a: Ids, b: Ids) -> int:
    """Return how many tokens two sequences of ids have in common before they differ."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


class PrefixTree:
    """The tree, its size, and what goes first when it is full.

    Owners have roots of their own: what one has kept is never found for another. An interrupt at
    any point leaves the tree right: every change is one assignment.
    """

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._clock = 0

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes except the root, parents first."""
        found = [node for root in self._roots.values() for node in root.children.values()]
        while found:
            node = found.pop()
            yield node
            found += node.children.values()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all nodes."""
        return sum(node.n_bytes for node in self.nodes())

    @property
    def n_states(self) -> int:
        """Return how many nodes have states."""
        return sum(node.states is not None for node in self.nodes())

    def find(self, ids: Ids, n_kept: int, owner: str = "") -> Path:
        """Return the path to the last node on the way of ids after which a sequence can go on.

        n_kept: positions whose KV rows the sequence has. The path is empty if there is no node.
        """
        path: Path = []
        n_usable = at = 0
        node = self._roots.get(owner) or _root()
        while at < len(ids) and (child := node.children.get(int(ids[at]))) is not None:
            end = at + len(child.tokens)
            if n_common(child.tokens, ids[at:]) < len(child.tokens):
                break
            if child.rows is None and end > n_kept:
                break
            path.append(child)
            if child.states is not None:
                n_usable = len(path)
            node, at = child, end
        return path[:n_usable]

    def reach(self, ids: Ids, owner: str = "") -> Path:
        """Return the path to the node where ids end; add or divide nodes as needed."""
        path: Path = []
        node, at = self._roots.setdefault(owner, _root()), 0
        while at < len(ids):
            first = int(ids[at])
            child = node.children.get(first)
            if child is None:
                child = Node(np.array(ids[at:], dtype=np.int32), owner=owner)
                node.children[first] = child
            n = n_common(child.tokens, ids[at:])
            if n < len(child.tokens):
                child = node.children[first] = _divided(child, n)
            path.append(child)
            node, at = child, at + n
        return path

    def touch(self, path: Path) -> None:
        """Note that the states at the end of a path were used now.

        So were those that several paths go through, and the first ones: most prompts of a client
        begin so, though few go on right after them.
        """
        useful = [at for at, node in enumerate(path) if node.states is not None]
        for at in reversed(useful):
            if at in (useful[0], len(path) - 1) or len(path[at].children) > 1:
                self._clock += 1
                path[at].used = self._clock

    def shrink(self, n_bytes: int, kept: Path, give: Give | None = None) -> bool:
        """Remove the states used longest ago until the tree has at most n_bytes.

        Rows go with the last states that need them. Nodes of the path `kept` stay, and so do the
        states at its end. Return whether the tree is small enough now. give: called with the path
        to states that are removed.
        """
        self._prune(kept)
        while self.n_bytes > n_bytes:
            found = [path for path in self.places() if path[-1] not in kept[-1:]]
            if not found:
                return False
            oldest = found[0]
            states, oldest[-1].states = oldest[-1].states, None
            if states is not None and give:
                give(oldest, states)
            self._prune(kept)
        return True

    def places(self) -> list[Path]:
        """Return the paths to all states, those first that were used longest ago."""
        found: list[Path] = []
        roots = self._roots.values()
        waiting: list[Path] = [[child] for root in roots for child in root.children.values()]
        while waiting:
            path = waiting.pop()
            if path[-1].states is not None:
                found.append(path)
            waiting += [[*path, child] for child in path[-1].children.values()]
        return sorted(found, key=lambda path: path[-1].used)

    def _prune(self, kept: Path) -> None:
        """Remove nodes that lead to no states, except those of a path."""
        stays = {id(node) for node in kept}
        parents = [*self._roots.values(), *self.nodes()]
        edges = [(parent, child) for parent in parents for child in parent.children.values()]
        for parent, child in reversed(edges):  # children before parents
            if child.states is None and not child.children and id(child) not in stays:
                del parent.children[int(child.tokens[0])]
        self._roots = {owner: root for owner, root in self._roots.items() if root.children}

    def clear(self) -> None:
        """Remove everything."""
        self._roots = {}


def _root() -> Node:
    return Node(np.zeros(0, dtype=np.int32))


def _divided(node: Node, n: int) -> Node:
    """Return a node for the first n tokens of a node, with another for the rest as its child."""
    rows = node.rows.split(n) if node.rows and node.rows.has_arrived else (None, None)
    tokens, owner = node.tokens, node.owner
    rest = Node(tokens[n:].copy(), node.children, rows[1], node.states, node.used, owner)
    return Node(tokens[:n].copy(), {int(tokens[n]): rest}, rows[0], owner=owner)
