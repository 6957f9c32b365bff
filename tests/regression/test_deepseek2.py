"""deepseek2: a position keeps one compressed row, and V is a part of it."""

from __future__ import annotations

import pytest
from helpers.shared import greedy_tokens
from oracle.client import Step
from regression.compare import assert_logits_equal
from regression.harness import THREADS, Models, Upstream, open_engine, our_logits, random_ids

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


@pytest.mark.parametrize("spec", ["off", "lookup"])
def test_two_sequences_have_the_bits_of_each_alone(
    spec: str, models: Models, upstream: Upstream
) -> None:
    """Rows are gathered from pages; drafted ones are moved when they are accepted."""
    path = models.path(NAME)
    with open_engine(path, n_seq=2, spec=spec) as engine:
        prompts = [random_ids(engine.hparams.n_vocab, n, n) * 3 for n in (40, 70)]
        theirs, _ = upstream.oracle.greedy(path, prompts, 24, n_ctx=1024, threads=THREADS)
        for prompt, expected in zip(prompts, theirs, strict=True):
            assert greedy_tokens(engine, prompt, 24) == expected


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
