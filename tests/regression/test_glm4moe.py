"""glm4moe: dense layers, choices with a bias, and texts that the MTP block drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from regression.harness import THREADS, Models, Upstream, open_engine, random_ids

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.experts.machines import MACHINES
from moegraph.experts.policy import parse_policy
from moegraph.placement.footprint import needed_bytes, slot_bytes
from moegraph.placement.identity import router_shape
from moegraph.placement.profile import read_profile
from moegraph.placement.simulate import simulate
from moegraph.placement.trace import TraceRecorder

NAME, GROUPS = "glm4moe", "glm4moe-groups"
PART = {"mode": "layered", "cache_slots": 30, "policy": "lru", "pin_layers": 0, "miss": "stream"}
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"spec": "mtp"},
    "a part": {**PART, "spec": "mtp"},
    "the first stage is dense": {**PART, "device": "cpu,cpu", "split": "1,3", "spec": "off"},
}


@pytest.mark.parametrize("settings", WAYS.values(), ids=list(WAYS))
def test_greedy_text_is_upstreams(
    settings: dict[str, Any], models: Models, upstream: Upstream
) -> None:
    """Prompts in sweeps, rows one by one, and drafts; layer 0 never lacks anything."""
    path = models.path(NAME)
    with open_engine(path, **settings) as engine:
        prompt = random_ids(engine.hparams.n_vocab, 40) * 3  # repeats itself: look-up drafts
        ((theirs,), _) = upstream.oracle.greedy(path, [prompt], 24, n_ctx=1024, threads=THREADS)
        events = [*engine.generate(prompt, max_tokens=24, text=False)]
        assert [event.token for event in events if event.token is not None] == theirs
        assert engine.plan.n_slots[0] == engine.hparams.n_expert
        stats = engine.expert_stats()
        if stats:
            assert not stats.cache.hits[0] and not stats.cache.misses[0]
            assert stats.cache.misses[1:].all()


def test_the_bias_changes_the_choice_and_not_the_weights(models: Models) -> None:
    with open_engine(models.path(NAME)) as engine:
        nodes = engine.forward_nodes(random_ids(engine.hparams.n_vocab, 20), pos0=0)
        scores, chosen = nodes["ffn_moe_probs", 1], nodes["ffn_moe_topk", 1]
        scores, chosen = scores.reshape(20, -1), chosen.reshape(20, -1)
        alone = np.argsort(-scores, axis=1)[:, : chosen.shape[1]]
        differ = [set(a) != set(b) for a, b in zip(alone.tolist(), chosen.tolist())]
        assert sum(differ) > 10
        weights = nodes["ffn_moe_weights", 1].reshape(chosen.shape)
        np.testing.assert_array_equal(weights, np.take_along_axis(scores, chosen, axis=1))


def test_plan_profile_trace_and_simulator_leave_dense_layers_out(
    models: Models, tmp_path: Path
) -> None:
    path, profile = models.path(GROUPS), tmp_path / "p.json"
    settings = {**PART, "n_ctx": 512, "profile": str(profile), "cache_slots": 12}
    with open_model(path) as model:
        assert model.warnings == ()
        hp, sizes = model.hparams, slot_bytes(model)
        assert (hp.routed_layers, sizes[:2]) == ([2], (0, 0))
        needed = needed_bytes(model, EngineConfig(device="cpu", n_ctx=512), 512)
        shape = router_shape(model)
    with open_engine(path, **settings) as engine:
        assert engine.plan.n_slots == (32, 32, 12)
        assert engine.memory()["kv_bytes"] == needed.kv
        recorder = TraceRecorder(shape, sizes)
        engine.runner.observers.append(recorder)
        ids = np.array(random_ids(hp.n_vocab, 60), dtype=np.int32)
        engine.prefill(ids, greedy=True)
        before = engine.runner.cache.stats
        for token in ids[:30]:
            engine.forward(token[None], greedy=True)
        counted = engine.runner.cache.stats.since(before)
        counts = engine.runner.residency.routing.counts
        assert engine.save_profile().n_tokens == 90
    trace = recorder.trace(60, "")
    assert trace.n_tokens == 90 and trace.counts().tolist() == counts
    assert read_profile(profile, shape).classes["default"].counts.tolist() == counts
    found = simulate(
        trace, (4, 4, 12), parse_policy("lru"), MACHINES["h200"], mode="stream", is_pinned=False
    )
    for name in ("hits", "misses", "missing"):
        assert getattr(found.stats, name).tolist() == getattr(counted, name).tolist(), name
    assert counted.misses[2] > 0
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=256, **PART)
    with Engine.load(path, config, routing=trace.ids[:60].astype(np.int32)) as engine:
        replayed: list[list[int]] = []
        engine.runner.observers.append(lambda il, ids: replayed.append([il, *ids.tolist()]))
        for token in ids[:9]:
            engine.forward(token[None], greedy=True)
    assert replayed == [[2, *row] for row in trace.ids[:9, 2].tolist()]
