"""qwen3next: 512 experts of which a token uses 10, and the older form of its files."""

from __future__ import annotations

import pytest
from helpers.shared import greedy_tokens
from oracle.client import Step
from regression.compare import assert_logits_equal, assert_nodes_equal
from regression.harness import THREADS, Models, Upstream, open_engine, random_ids

from moegraph.kinds import MAX_FETCH_IDS

FETCHED = {"pin_layers": 0, "policy": "lru", "miss": "stream", "host_pin": "all"}
CFG = {"n_ctx": 1024, "threads": THREADS}


def parts_of(ids: list[int], widths: tuple[int, ...]) -> list[list[int]]:
    """Return consecutive parts of ids."""
    return [ids[sum(widths[:i]) : sum(widths[: i + 1])] for i in range(len(widths))]


def test_passes_with_more_ids_than_a_graph_fetches(models: Models, upstream: Upstream) -> None:
    """25 rows are the most whose graphs fetch; layers have more slots than fit into a byte."""
    path, at = models.path("qwen3next"), 0
    with open_engine(path, cache_slots=1600, spec="off", **FETCHED) as engine:
        hp = engine.hparams
        assert max(engine.plan.n_slots) > 256 and MAX_FETCH_IDS // hp.n_expert_used == 25
        parts = parts_of(random_ids(hp.n_vocab, 160), (25, 26, 32, 1, 25, 33, 18))
        theirs = upstream.parts(path, parts, **CFG)
        for part in parts:
            ours = engine.forward_logits(part, pos0=at)
            assert_logits_equal(ours, theirs[at : at + len(part)], f"{len(part)} rows at {at}")
            at += len(part)
        stats = engine.expert_stats()
        assert stats is not None and stats.n_fetching > 0 and stats.cache.missing.sum() > 0


def test_every_node_of_the_older_form_equals_upstreams(models: Models, upstream: Upstream) -> None:
    path, at = models.path("qwen3next-fused"), 0
    with open_engine(path) as engine:
        parts = parts_of(random_ids(engine.hparams.n_vocab, 372), (7, 1, 64, 300))
        steps = [Step(part, "all", ("*",)) for part in parts]
        for part, result in zip(parts, upstream.oracle.run(path, steps, **CFG), strict=True):
            ours = engine.forward_nodes(part, pos0=at)
            assert_nodes_equal(ours, result.nodes, f"{len(part)} rows at {at}")
            at += len(part)


@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_the_older_form_has_upstreams_texts_with_missing_experts(
    models: Models, upstream: Upstream, device: str
) -> None:
    path = models.path("qwen3next-fused")
    with open_engine(path, cache_slots=48, spec="lookup", device=device, **FETCHED) as engine:
        prompts = [random_ids(engine.hparams.n_vocab, n, seed=n) * 3 for n in (2, 9, 40)]
        texts, _ = upstream.oracle.greedy(path, prompts, 16, **CFG)
        assert [greedy_tokens(engine, prompt, 16) for prompt in prompts] == texts
        stats = engine.expert_stats()
        assert stats is not None and stats.n_fetching > 0
