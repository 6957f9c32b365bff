"""deepseek2: a position keeps one compressed row, and V is a part of it.

GLM-4.7-Flash is in FAMILIES; this is DeepSeek-V2-Lite.
"""

from __future__ import annotations

import pytest
from oracle.client import Step
from regression.compare import assert_logits_equal, assert_nodes_equal
from regression.harness import (
    MODES,
    THREADS,
    Models,
    Upstream,
    open_engine,
    our_logits,
    random_ids,
)

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.errors import ConfigError
from moegraph.placement.footprint import needed_bytes

NAME = "mla-lite"
ROW = 512 + 64


@pytest.mark.parametrize("kv, n_bytes", [("f16", 2 * ROW), ("q8_0", ROW // 32 * 34)])
def test_a_layer_keeps_the_compressed_rows_alone(kv: str, n_bytes: int, models: Models) -> None:
    path, n_ctx = models.path(NAME), 512
    config = EngineConfig(device="cpu", n_ctx=n_ctx, type_k=kv, type_v=kv)
    with open_model(path) as model:
        assert {model.hparams.layer(il).mixer for il in range(3)} == {"MLA"}
        needed = needed_bytes(model, config, n_ctx)
    with open_engine(path, n_ctx=n_ctx, type_k=kv, type_v=kv) as engine:
        assert engine.memory()["kv_bytes"] == needed.kv == 3 * n_bytes * (n_ctx + 1)


def test_k_and_v_of_two_types_are_refused(models: Models) -> None:
    with pytest.raises(ConfigError, match="V is a part of its K"):
        with open_engine(models.path(NAME), type_k="q8_0"):
            pass


@pytest.mark.parametrize("mode", MODES)
def test_every_named_node_equals_upstreams(mode: str, models: Models, upstream: Upstream) -> None:
    path = models.path(NAME)
    with open_engine(path, mode=mode) as engine:
        ids = random_ids(engine.hparams.n_vocab, 7 + 1 + 64)
        chunks = [ids[:7], ids[7:8], ids[8:]]
        steps = [Step(chunk, "all", ("*",)) for chunk in chunks]
        results = upstream.oracle.run(path, steps, n_ctx=1024, threads=THREADS)
        for chunk, result, pos0 in zip(chunks, results, (0, 7, 8), strict=True):
            ours = engine.forward_nodes(chunk, pos0=pos0)
            assert_nodes_equal(ours, result.nodes, f"{len(chunk)} rows at {pos0}")


def test_single_rows_after_a_long_prompt_are_upstreams(models: Models, upstream: Upstream) -> None:
    """From 512 positions on, llama.cpp divides the sum of a single row."""
    path = models.path(NAME)
    with open_engine(path, n_ubatch=128) as engine:
        ids = random_ids(engine.hparams.n_vocab, 603)
        steps = [Step(ids[:600]), *(Step([token]) for token in ids[600:])]
        results = upstream.oracle.run(path, steps, n_ctx=1024, n_ubatch=128, threads=THREADS)
        assert_logits_equal(our_logits(engine, ids[:600], 128), results[0].logits, "the prompt")
        for at, result in enumerate(results[1:], 600):
            ours = engine.forward_logits([ids[at]], pos0=at)
            assert_logits_equal(ours, result.logits, f"row {at}")
