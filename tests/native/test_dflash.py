"""DFlash and DSpark drafters: drafts equal a float64 reference, whatever the way to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafter_pair import CHANGES, COARSE, N_VOCAB, TOLERANCE, Pair, pairs
from helpers.faults import FAULTS, faulty

from moegraph.draft.dflash import DSparkDrafter
from moegraph.draft.drafter import Race
from moegraph.engine import Engine
from moegraph.ggml.handles import live_handles
from moegraph.ggml.lib import C, ffi
from moegraph.sampling import SamplingParams, gumbel

Open = Callable[..., Engine]


@pytest.fixture
def pair(open_engine: Open, model_path: Callable[[str], Path], tmp_path: Path) -> Any:
    """Return a function that makes a pair, closed after the test."""
    with pairs(open_engine, model_path, tmp_path) as make:
        yield make


@pytest.mark.parametrize("name", CHANGES)
def test_drafts_equal_the_reference(pair: Callable[..., Pair], name: str) -> None:
    """Over prompts, decoded tokens and verified ones, until the window has wrapped around."""
    both, off = pair(**CHANGES[name]), COARSE if name == "yarn" else TOLERANCE
    both.check(tolerance=off)
    both.prompt(20)
    both.check(tolerance=off)
    both.check(3, off)
    both.decode(3)
    both.check(tolerance=off)
    both.verify([0, 2, 3])
    both.verify([0])
    both.check(tolerance=off)
    both.prompt(280)
    both.check(tolerance=off)
    both.verify([0, 1])
    both.check(1, off)


@pytest.mark.parametrize("n_past", [None, 130])
def test_rows_that_are_forgotten_are_zeros(pair: Callable[..., Pair], n_past: int | None) -> None:
    """A prompt that failed may have left NaN, and a weight of zero times that is NaN."""
    both = pair(**CHANGES["tiny window"])
    both.prompt(300)
    rings = both.drafter._rings
    caches = [*rings.k, *rings.v]
    for cache in caches:
        C.ggml_backend_tensor_memset(cache, 0xFF, 0, cache.nb[1] * cache.ne[1])
    if n_past is None:
        both.drafter.restart(0, np.zeros(0, np.int32))
    else:
        both.drafter.truncate(0, n_past)
    for (kind, shape), cache in zip([(k, rings.shapes[k]) for k in rings.kind] * 2, caches):
        host = np.zeros((cache.ne[1], cache.nb[1]), np.uint8)
        C.ggml_backend_tensor_get(cache, ffi.from_buffer(host), 0, host.nbytes)
        forgotten = np.arange(max(n_past or 0, 300 - shape.n_cells), 300)
        assert not host[rings.rows(kind, 0, forgotten)].any()


def test_after_a_warm_up_no_draft_builds_a_graph(pair: Callable[..., Pair]) -> None:
    """However many tokens the text took since the last one; and drafts are as they were."""
    both = pair()
    drafter = both.drafter
    drafter.warm_up(drafter.max_draft)
    n_built = drafter.graphs.n_built
    both.decode(1)
    both.check(drafter.max_draft)
    for n in (2, 3, 7, 12, 30, 64):
        drafter.committed([(0, 1, [0] * n)])
        drafter.truncate(0, 1)
    assert drafter.graphs.n_built == n_built


@pytest.mark.parametrize("kind", ["dflash-draft", "qwen35-dflash-draft", "safetensors"])
def test_every_format_drafts_the_same(pair: Callable[..., Pair], kind: str) -> None:
    drafts = []
    for both in (pair(), pair(kind=kind)):
        both.prompt(40)
        drafts.append(both.check())
    np.testing.assert_array_equal(drafts[0].tokens, drafts[1].tokens)
    np.testing.assert_array_equal(drafts[0].log_p, drafts[1].log_p)


@pytest.mark.parametrize(
    ("matrices", "as_stored", "tolerance"),
    [("BF16", True, 4.0), ("F16", True, 1.0), ("Q8_0", False, 6.0)],
)
def test_other_types_of_weights(
    pair: Callable[..., Pair], matrices: str, as_stored: bool, tolerance: float
) -> None:
    both = pair(matrices=matrices, as_stored=as_stored)
    both.prompt(40)
    draft = both.check(tolerance=tolerance)
    log_p, _ = both.reference.draft(0, 40, 7)
    assert draft.n_depth == len(log_p)
    kinds = {int(t.type) for name, t in both.drafter._weights.tensors.items() if "ffn_up" in name}
    stored = {"BF16": C.GGML_TYPE_BF16, "F16": C.GGML_TYPE_F16, "Q8_0": C.GGML_TYPE_Q8_0}[matrices]
    assert kinds == {stored if as_stored else C.GGML_TYPE_Q8_0}


@pytest.mark.parametrize("settings", [
    {"mode": "layered"},
    {"cache_slots": 40, "pin_layers": 0, "miss": "stream"},
    {"cache_slots": 40, "pin_layers": 0, "miss": "cpu"},
])  # fmt: skip
def test_drafts_where_experts_are_missing(pair: Callable[..., Pair], settings: Any) -> None:
    both = pair(settings=settings)
    both.prompt(50)
    both.check()
    both.decode(2)
    both.verify([0, 2])
    both.check()


def test_a_drafter_that_does_not_fit_leaves_nothing_open(pair: Callable[..., Pair]) -> None:
    """Every native call of opening a drafter may fail."""
    both = pair()
    before = live_handles()
    for name, (result, error) in FAULTS.items():
        for at in (1, 2, 3):
            with faulty(name, at, result) as library:
                try:
                    both.again().close()
                except error:
                    assert library.n_calls >= at
            assert live_handles() == before, (name, at)


@pytest.mark.parametrize("name", ["dspark", "reduced", "no confidence"])
def test_trees_know_what_follows_each_token(pair: Callable[..., Pair], name: str) -> None:
    """Every row of a tree has the probability that the reference gives it after its parent."""
    both = pair(**CHANGES[name])
    both.prompt(40)
    drafter = both.drafter
    assert isinstance(drafter, DSparkDrafter) and drafter.has_tree
    n, anchor = drafter.max_draft, 17
    draft, tree = drafter.tree(0, anchor, n, 24)
    spine = drafter.draft(0, anchor, n, 8)
    np.testing.assert_array_equal(draft.tokens, spine.tokens)
    np.testing.assert_allclose(draft.log_p, spine.log_p, atol=1e-4)
    assert (draft.confidence is None) == (spine.confidence is None)
    if draft.confidence is not None:
        np.testing.assert_allclose(draft.confidence, spine.confidence, atol=1e-5)
    log_p = both.reference.after(anchor, 40, n)
    values = [0.0]
    for row in range(1, tree.n_rows):
        parent = tree.parents[row]
        given = log_p(len(tree.ahead(row)) - 1, tree.tokens[parent])
        values.append(values[parent] + given[tree.tokens[row]])
    assert tree.n_rows == 25
    assert all(a >= b - 2 * TOLERANCE for a, b in zip(values[1:], values[2:]))
    # paths off the spine go on
    row, on_spine = 0, {0}
    for token in draft.tokens[:, 0].tolist():
        row = tree.child(row, token) or 0
        on_spine.add(row)
    assert len(on_spine) > 2 and any(parent not in on_spine for parent in tree.parents[1:])
    small, of_one = drafter.tree(0, anchor, 1, 24)
    assert small.n_depth == 1 and max(len(of_one.ahead(row)) for row in range(of_one.n_rows)) == 1


@pytest.mark.parametrize("changes", [{}, {"markov_rank": 32}, {**CHANGES["reduced"]}])
def test_a_drafter_that_computes_nan_says_so(
    pair: Callable[..., Pair], changes: dict[str, Any]
) -> None:
    both = pair(**changes)
    both.prompt(20)
    w = both.drafter._weights
    bad = np.full(both.shape.n_embd, np.nan, np.float32)
    C.ggml_backend_tensor_set(w.tensors["output_norm.weight"], ffi.from_buffer(bad), 0, bad.nbytes)
    draft = both.drafter.draft(0, 7, 5, 3)
    assert draft.problem(N_VOCAB) == "its probabilities are not numbers"
    if isinstance(both.drafter, DSparkDrafter):
        spine, tree = both.drafter.tree(0, 7, 5, 9)
        assert spine.problem(N_VOCAB) and max(tree.tokens) < N_VOCAB


@pytest.mark.parametrize("name", ["mg_launch", "mg_graph_alloc", "ggml_init"])
def test_faults_while_drafting(pair: Callable[..., Pair], name: str) -> None:
    """After any native call that fails, the same draft is right."""
    both = pair(markov_rank=32)
    both.prompt(20)
    both.decode(3)
    result, error = FAULTS[name]
    n_failed = 0
    for at in range(1, 9):
        with faulty(name, at, result) as library:
            try:
                both.drafter.draft(0, 7, 1 + at % 7, 3)
                both.drafter.tree(0, 7, 1 + at % 7, 3)
            except error:
                n_failed += 1
            assert library.n_calls >= at or n_failed
        both.drafter.graphs.clear()  # so that they are built again
        both.decode(1)
        both.check()
    assert n_failed >= 2


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 30.0])
def test_drafts_follow_the_winners_of_races(pair: Callable[..., Pair], temperature: float) -> None:
    both = pair(markov_rank=32)
    both.prompt(40)
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    keys = [(0x9E3779B97F4A7C15 * n) % (1 << 64) for n in range(3, 19)]
    plain = both.drafter.draft(0, 17, 8, 4)
    got = both.drafter.draft(0, 17, 8, 4, Race(params, lambda depth: keys[depth]))
    log_p, before = both.reference.after(17, 40, 8), 17
    assert got.log_p is not None and got.problem(N_VOCAB) == ""
    for depth in range(8):
        given = log_p(depth, before)
        ids = np.arange(N_VOCAB)
        values = np.array([given[token] for token in ids])
        scores = values / temperature + gumbel(keys[depth], ids)
        before = int(got.tokens[depth, 0])
        assert scores[before] > scores.max() - 2 * TOLERANCE / temperature
        wanted = [given[token] for token in got.tokens[depth].tolist()]
        np.testing.assert_allclose(got.log_p[depth], wanted, atol=TOLERANCE)
    if temperature == 1e-3:
        np.testing.assert_array_equal(got.tokens, plain.tokens)
    if temperature == 30.0:
        assert (got.tokens[:, 0] != plain.tokens[:, 0]).any()
