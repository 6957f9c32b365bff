"""A drafter that follows a script, and a controller that tries everything."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moegraph.draft.drafter import Draft, Drafter, Race, Taken
from moegraph.draft.plan import PLAIN, Plan, Step
from moegraph.draft.tree import DDTree

if TYPE_CHECKING:  # it needs the native libraries
    from moegraph.engine import Engine


def told_of(engine: Engine, drafter: ScriptedDrafter) -> list[int]:
    """Have an engine tell its drafters all of sequence 0; return what one knows of it."""
    assert engine.speculation
    engine.speculation.settle(0)
    return drafter.held


class ScriptedDrafter(Drafter):
    """Knows a text and drafts it, right or wrong by chance; checks what it is told.

    text: the prompt and the answer that is expected. right: chance that a depth's likeliest token
    is right; otherwise it may still be among the others.
    """

    def __init__(
        self, text: Sequence[int], n_vocab: int, right: float = 0.7, seed: int = 0,
        name: str = "scripted", max_draft: int = 12,
    ) -> None:  # fmt: skip
        self.name, self.max_draft = name, max_draft
        self.text = list(text)
        self.held: list[int] = []
        self.calls: list[str] = []
        self.spoiled: dict[int, Draft] = {}  # what to return in the n-th call
        self._n_vocab, self._right = n_vocab, right
        self._rng = np.random.default_rng(seed)
        self.n_drafts = 0

    def restart(self, slot: int, ids: np.ndarray) -> None:
        self.calls.append("restart")
        self.held = ids.tolist()

    def prompt_readers(self, slot: int, ids: np.ndarray, first: int) -> dict[int, Any]:
        self.calls.append("prompt")
        assert first == len(self.held)
        self.held += ids.tolist()
        return {}

    def committed(self, taken: Sequence[Taken]) -> None:
        for _, first, tokens in taken:
            assert tokens and first == len(self.held)
            self.held += tokens

    def truncate(self, slot: int, n_past: int) -> None:
        self.calls.append("truncate")
        del self.held[n_past:]

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        assert 1 <= n <= self.max_draft
        self.n_drafts += 1
        if self.n_drafts - 1 in self.spoiled:
            return self.spoiled[self.n_drafts - 1]
        rng, at = self._rng, len(self.held) + 1
        known = self.text[at : at + n] if self.text[:at] == [*self.held, anchor] else []
        if rng.random() < 0.1:
            return Draft.empty()
        n, n_top = int(rng.integers(1, n + 1)), min(n_top, self._n_vocab)
        tokens = np.array([rng.permutation(self._n_vocab)[:n_top] for _ in range(n)])
        for depth, token in enumerate(known[:n]):
            rank = 0 if rng.random() < self._right else int(rng.integers(0, n_top + 1))
            same = np.flatnonzero(tokens[depth] == token)
            if same.size:
                tokens[depth, same[0]] = tokens[depth, 0]
                tokens[depth, 0] = token
            elif rank < n_top:
                tokens[depth, rank] = token
        log_p = np.log(-np.sort(-rng.dirichlet(np.ones(n_top + 2), n), axis=1))[:, :n_top]
        return Draft(tokens.astype(np.int32), log_p.astype(np.float32))

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class AnyController:
    """Chooses by chance: plain steps, chains, DDTrees. Keeps what it observes.

    shapes: what it chooses from: "plain", "chain", "ddtree", or "tree" for a drafter
    that builds trees itself.
    """

    names: Sequence[str]
    shapes: Sequence[str] = ("plain", "chain", "ddtree")
    seed: int = 0
    n_draft: int = 6
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._shape = ""

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        assert n_left > 1
        names = [name for name in self.names if name not in without]
        self._shape = str(self._rng.choice(list(self.shapes)))
        if self._shape == "plain" or not names:
            return PLAIN
        name, n_draft = str(self._rng.choice(names)), int(self._rng.integers(1, self.n_draft + 1))
        if self._shape == "ddtree":
            tree = DDTree(int(self._rng.integers(1, 9)), 1.0, bool(self._rng.integers(0, 2)))
            return Plan(name, n_draft, 4, tree)
        if self._shape == "tree":
            return Plan(name, n_draft, n_nodes=int(self._rng.integers(1, 20)))
        return Plan(name, n_draft)

    def least_tokens(self, source: str) -> dict[int, float]:
        return {2: 0.0}

    def n_spine(self, plan: Plan, draft: Draft) -> int:
        return int(self._rng.integers(0, draft.n_depth + 1))

    def observe(self, step: Step) -> None:
        self.steps.append(step)
