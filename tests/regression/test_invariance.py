"""Ours against ours: what must not change the numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.shared import greedy_tokens
from regression.compare import first_differences
from regression.harness import (
    KV_TYPES,
    MODELS,
    QUANTIZED_KV,
    Models,
    Upstream,
    held_out_text,
    open_engine,
    random_ids,
)

if TYPE_CHECKING:
    from moegraph.engine import Engine

# Rows of the passes that cut up one sequence: below and above the tiled kernels (8 rows) and flash
# attention tiles (64), single rows at its start and past position 512, where threads share one row.
FALLING = (300, 64, 64, 64, 9, 9, 8, 8, 7, 7, *([1] * 24))
RISING = FALLING[::-1]
N = sum(FALLING)


def in_passes(engine: Engine, ids: Sequence[int], widths: Sequence[int]) -> tuple[Any, Any]:
    """Run ids in passes of the given widths; return all logits and the recurrent states after."""
    engine.reset()
    rows, at = [], 0
    for width in widths:
        rows.append(engine.forward_logits(ids[at : at + width], pos0=at))
        at += width
    nodes = engine.forward_nodes([1], pos0=at)
    states = {key: value for key, value in nodes.items() if key[0] == "new_state"}
    return np.concatenate(rows), states


def assert_same_bits(got: tuple[Any, Any], wanted: tuple[Any, Any], what: str) -> None:
    """Fail unless logits and states are equal, naming the first row that is not."""
    first = np.flatnonzero((got[0] != wanted[0]).any(axis=1))
    assert first.size == 0, f"{what}: logits differ from row {first[0]} on"
    for key, value in wanted[1].items():
        assert np.array_equal(value, got[1][key]), f"{what}: {key}"


@pytest.mark.parametrize(
    ("name", "kv"),
    [(name, "f16") for name in MODELS]
    + [(name, kv) for name in QUANTIZED_KV for kv in KV_TYPES[1:]],
)
def test_reference_mode_gives_the_same_bits_at_every_width_and_thread_count(
    name: str, kv: str, models: Models
) -> None:
    path = models.path(name)
    settings = {"cpu_reference": True, "type_k": kv, "type_v": kv, "n_ubatch": N}
    with open_engine(path, n_threads=2, **settings) as engine:
        ids = random_ids(engine.hparams.n_vocab, N)
        whole = in_passes(engine, ids, [N])
        hp = engine.hparams
        recurrent = [il for il in range(hp.n_layer) if not hp.layer(il).kv]
        assert len(whole[1]) >= len(recurrent), "not all states of recurrent layers were seen"
        # quantized K and V: the other order is for one thread
        for widths in (FALLING, RISING)[: 2 if kv == "f16" else 1]:
            assert_same_bits(in_passes(engine, ids, widths), whole, f"{name} {kv} {widths[:3]}...")
    with open_engine(path, n_threads=1, mode="layered", **settings) as engine:
        got = in_passes(engine, ids, RISING)
        assert_same_bits(got, whole, f"{name} {kv} one thread, layered, {RISING[:3]}...")


@pytest.mark.parametrize("name", ("tiny", "kquant40"))
def test_text_at_another_width_is_upstreams_text_at_that_width(
    name: str, models: Models, upstream: Upstream
) -> None:
    """Prompts in other chunks may give other text; then it is the text upstream gives for them."""
    path = models.path(name)
    text = upstream.oracle.tokenize(path, held_out_text())
    prompts = [text[211 * i : 211 * i + 65] for i in range(6)]
    found = []
    for n_ubatch in (512, 16, 1):
        cfg = {"n_ctx": 1024, "n_ubatch": n_ubatch, "threads": 1}
        theirs, _ = upstream.oracle.greedy(path, prompts, 48, **cfg)
        with open_engine(path, n_ubatch=n_ubatch, n_threads=1) as engine:
            ours = [greedy_tokens(engine, prompt, 48) for prompt in prompts]
        assert ours == theirs, f"{name} ubatch {n_ubatch}"
        found.append(ours)
    for n_ubatch, texts in zip((16, 1), found[1:], strict=True):
        parting = first_differences(texts, found[0])
        print(f"{name}: ubatch {n_ubatch} parts from 512 at (prompt, token) {parting}")
