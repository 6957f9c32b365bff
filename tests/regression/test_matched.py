"""Matched settings: the same bits as unpatched upstream, node by node and token by token."""

from __future__ import annotations

import pytest
from oracle.client import Step
from regression.compare import (
    DECODE_STEPS,
    FORCED_POSITIONS,
    FREE_PROMPTS,
    FREE_TOKENS,
    PROMPT_LENGTHS,
    assert_logits_equal,
    assert_nodes_equal,
)
from regression.harness import (
    KV_TYPES,
    MODELS,
    QUANTIZED_KV,
    TEXT_MODELS,
    THREADS,
    Models,
    Upstream,
    held_out_text,
    open_engine,
    our_logits,
    random_ids,
)

# Two threads of single rows mostly wait for one another: f16 alone has two.
KV_MODES = (("f16", "whole"), ("f16", "layered"), ("q8_0", "layered"), ("q4_0", "whole"))


@pytest.mark.parametrize(
    ("name", "kv"),
    [(name, "f16") for name in MODELS]
    + [(name, kv) for name in QUANTIZED_KV for kv in KV_TYPES[1:]],
)
def test_every_named_node_equals_upstreams(
    name: str, kv: str, models: Models, upstream: Upstream
) -> None:
    """A short prompt, one decode step, a chunk of 64 after it, then 300 rows."""
    path = models.path(name)
    with open_engine(path, type_k=kv, type_v=kv) as engine:
        ids = random_ids(engine.hparams.n_vocab, 7 + 1 + 64 + 300)
        chunks = [ids[:7], ids[7:8], ids[8:72], ids[72:]]
        steps = [Step(chunk, "all", ("*",)) for chunk in chunks]
        theirs = upstream.oracle.run(path, steps, n_ctx=1024, threads=THREADS, type_k=kv, type_v=kv)
        pos0 = 0
        for chunk, result in zip(chunks, theirs, strict=True):
            ours = engine.forward_nodes(chunk, pos0=pos0)
            assert_nodes_equal(ours, result.nodes, f"{name} {kv} {len(chunk)} rows at {pos0}")
            pos0 += len(chunk)


@pytest.mark.parametrize("kv, mode", KV_MODES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_prompts_and_decode_steps_equal_upstreams(
    name: str, kv: str, mode: str, models: Models, upstream: Upstream
) -> None:
    path, threads = models.path(name), THREADS if kv == "f16" else 1
    cfg = {"n_ctx": 1024, "threads": threads, "type_k": kv, "type_v": kv}
    with open_engine(path, type_k=kv, type_v=kv, mode=mode, n_threads=threads) as engine:
        for n in PROMPT_LENGTHS:
            ids = random_ids(engine.hparams.n_vocab, n, seed=n)
            theirs = upstream.logits(path, ids, **cfg)
            assert_logits_equal(our_logits(engine, ids), theirs, f"{name} {kv} {mode} {n} rows")
        more = random_ids(engine.hparams.n_vocab, DECODE_STEPS, seed=1)
        theirs = upstream.decode_steps(path, ids, more, **cfg)
        for i, token in enumerate(more):
            ours = engine.forward_logits([token], pos0=len(ids) + i)
            assert_logits_equal(ours, theirs[i : i + 1], f"{name} {kv} {mode} decode step {i}")


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_argmax_equals_upstreams_at_2000_positions_of_held_out_text(
    name: str, models: Models, upstream: Upstream
) -> None:
    path = models.path(name)
    ids = upstream.oracle.tokenize(path, held_out_text())[:FORCED_POSITIONS]
    assert len(ids) == FORCED_POSITIONS
    theirs = upstream.logits(path, ids, n_ctx=2048, threads=THREADS)
    with open_engine(path, n_ctx=2048) as engine:
        assert_logits_equal(our_logits(engine, ids, 512), theirs, f"{name} teacher-forced")
    if name in ("tiny", "tiny-oss"):
        n_right = sum(theirs[:-1].argmax(axis=1) == ids[1:])
        assert n_right > 0.5 * FORCED_POSITIONS, "it was trained on such text"


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_20_prompts_run_free_for_64_tokens_as_upstream_does(
    name: str, models: Models, upstream: Upstream
) -> None:
    path = models.path(name)
    text = upstream.oracle.tokenize(path, held_out_text())
    prompts = [text[97 * i : 97 * i + 1 + 5 * i] for i in range(FREE_PROMPTS)]
    # One thread: single rows of small models only wait for a second. Decode steps above have two.
    theirs, _ = upstream.oracle.greedy(path, prompts, FREE_TOKENS, n_ctx=1024, threads=1)
    with open_engine(path, n_threads=1) as engine:
        for i, prompt in enumerate(prompts):
            events = engine.generate(prompt, max_tokens=FREE_TOKENS, text=False)
            ours = [event.token for event in events if event.token is not None]
            assert ours == theirs[i], f"{name}: prompt {i} of {len(prompt)} tokens"


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_chunks_equals_upstreams_at_the_same_ubatch(
    name: str, models: Models, upstream: Upstream
) -> None:
    path = models.path(name)
    with open_engine(path, n_ubatch=48) as engine:
        ids = random_ids(engine.hparams.n_vocab, 300)
        theirs = upstream.logits(path, ids, n_ctx=1024, n_ubatch=48, threads=THREADS)
        assert_logits_equal(our_logits(engine, ids, 48), theirs, f"{name} ubatch 48")


@pytest.mark.parametrize("name, deep", [("legacy32", 8192), ("mini35b", 3000)])
def test_rows_after_a_deep_prompt_equal_upstreams(
    name: str, deep: int, models: Models, upstream: Upstream
) -> None:
    """The prompt is computed layer by layer, with missing experts; then a chunk and single rows."""
    path, n_ctx = models.path(name), deep + 256
    missing = {"pin_layers": 1, "cache_slots": 40, "miss": "stream"}
    with open_engine(path, n_ctx=n_ctx, n_ubatch=512, profile="none", **missing) as engine:
        ids = random_ids(engine.hparams.n_vocab, deep + 64 + 4, seed=deep)
        parts = [ids[:deep], ids[deep : deep + 64], *([token] for token in ids[deep + 64 :])]
        steps = [Step(parts[0], "none"), *(Step(part) for part in parts[1:])]
        cfg = {"n_ctx": n_ctx, "n_batch": deep, "n_ubatch": 512, "threads": THREADS}
        theirs = upstream.oracle.run(path, steps, **cfg)
        engine.prefill(parts[0])
        at = deep
        for part, result in zip(parts[1:], theirs[1:], strict=True):
            ours = engine.forward_logits(part, pos0=at)
            assert_logits_equal(ours, result.logits, f"{name} {len(part)} rows at {at}")
            at += len(part)


@pytest.mark.parametrize("type_k, type_v", [("q8_0", "f16"), ("f16", "q4_0"), ("q4_0", "q8_0")])
@pytest.mark.parametrize("name", ("legacy32", "mini35b"))
def test_caches_of_two_types_equal_upstreams(
    name: str, type_k: str, type_v: str, models: Models, upstream: Upstream
) -> None:
    path = models.path(name)
    kv = {"type_k": type_k, "type_v": type_v}
    with open_engine(path, **kv) as engine:
        ids = random_ids(engine.hparams.n_vocab, 70)
        theirs = upstream.logits(path, ids, n_ctx=1024, threads=THREADS, **kv)
        assert_logits_equal(our_logits(engine, ids), theirs, f"{name} K {type_k} V {type_v}")
