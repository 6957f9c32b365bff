"""Text from drafts has the distribution of the target: chi-square over many short texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from moegraph.draft.drafter import Draft, DraftTree, spine_tree
from moegraph.draft.tree import DDTree
from moegraph.sampling import Sampler, SamplingParams

N_VOCAB, N_TOKENS, N_TEXTS = 5, 3, 4000
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": OFF,
    "top-k-top-p": {**OFF, "top_k": 4, "top_p": 0.9},
    "penalties": {**OFF, "repeat_penalty": 1.5, "presence_penalty": 0.4, "temperature": 1.3},
}
SHAPES: dict[str, Callable[[int, Draft], DraftTree]] = {
    "chain": lambda anchor, draft: spine_tree(anchor, draft, 2),
    "ddtree": lambda anchor, draft: DDTree(7, chain_seed=False).tree(anchor, draft),
}
# the target's logits after each token
LOGITS = (np.random.default_rng(5).standard_normal((N_VOCAB, N_VOCAB)) * 1.2).astype(np.float32)
# what the drafter thinks of each depth: far from the target, and the same in each text
DRAFT = Draft(
    np.array([[0, 3, 1], [2, 1, 0]], dtype=np.int32),
    np.log(np.array([[0.8, 0.1, 0.05], [0.5, 0.3, 0.1]], dtype=np.float32)),
)


def probability(params: SamplingParams, text: tuple[int, ...]) -> float:
    """Return the probability that plain sampling gives a text after token 0."""
    sampler, p, last = Sampler(params, N_VOCAB), 1.0, 0
    sampler.accept(0)
    for token in text:
        ids, probs = sampler.distribution(LOGITS[last])
        p *= float(probs[ids == token].sum())
        sampler.accept(token)
        last = token
    return p


def drafted(params: SamplingParams, shape: Callable[[int, Draft], DraftTree]) -> tuple[int, ...]:
    """Return a text after token 0, drawn with drafts."""
    sampler, text = Sampler(params, N_VOCAB), [0]
    sampler.accept(0)
    while len(text) <= N_TOKENS:
        tree = shape(text[-1], DRAFT)

        def draw(row: int, tree: DraftTree = tree) -> int:
            token = sampler.sample(LOGITS[tree.tokens[row]])
            sampler.accept(token)
            text.append(token)
            return token

        tree.walk(draw)
    return tuple(text[1 : N_TOKENS + 1])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("plain", "chain"), ("top-k-top-p", "chain"), ("penalties", "ddtree"), ("plain", "ddtree")],
)
def test_texts_from_drafts_follow_the_target(name: str, shape: str) -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(N_TEXTS):
        text = drafted(SamplingParams(**SAMPLERS[name], seed=seed), SHAPES[shape])
        counts[text] = counts.get(text, 0) + 1
    params = SamplingParams(**SAMPLERS[name], seed=0)
    expected = {
        text: N_TEXTS * probability(params, text)
        for text in product(range(N_VOCAB), repeat=N_TOKENS)
    }
    assert sum(expected.values()) == pytest.approx(N_TEXTS)
    assert all(expected[text] > 0 for text in counts)
    large = [text for text in expected if expected[text] >= 5]
    rest = N_TEXTS - sum(expected[text] for text in large)
    seen = [counts.get(text, 0) for text in large]
    pairs = [*zip(seen, (expected[text] for text in large)), (N_TEXTS - sum(seen), max(rest, 1e-9))]
    pairs = [pair for pair in pairs if pair[1] > 1]
    dof = len(pairs) - 1
    assert sum((a - b) ** 2 / b for a, b in pairs) <= dof + 4 * math.sqrt(2 * dof)
