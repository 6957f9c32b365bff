"""Layers with a window: every kind of pass hides what is before the window, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.shared import prompt
from helpers.tree_shapes import TREES, path

from moegraph.arch.base import Layer
from moegraph.arch.blocks.attention import attention_layer
from moegraph.arch.qwen3moe import Qwen3Moe
from moegraph.engine import Engine
from moegraph.graphs.chunk import _patterns, _window_patterns
from moegraph.graphs.rows import Tree, fill_mask, fill_window
from moegraph.resident.layout import PAGE
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
SHORT, LONG = 5, 300  # within a page of the KV caches, and longer than one


@pytest.fixture(params=[SHORT, LONG])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Give all layers of qwen3moe a window but the last one."""

    def layer(hp: Qwen3Moe, il: int) -> Layer:
        return replace(attention_layer(hp), window=None if il == 2 else request.param)

    monkeypatch.setattr(Qwen3Moe, "layer", layer)
    return int(request.param)


@pytest.mark.parametrize("n_window", [1, SHORT, PAGE - 1, PAGE, PAGE + 1, LONG, 10_000])
def test_masks_show_the_last_positions(n_window: int) -> None:
    places, n_kv = np.array([0, 3, 254, 255, 256, 511, 700]), 3 * PAGE
    distance = places[:, None] - np.arange(n_kv)
    sees = (distance >= 0) & (distance < n_window)
    patterns, ends = _patterns(n_window), places[:, None] + 1 - PAGE * np.arange(3)
    found = patterns[_window_patterns(ends, n_window)].reshape(len(places), n_kv)
    np.testing.assert_array_equal(found, sees)
    whole = patterns[np.clip(ends, 0, PAGE)].reshape(len(places), n_kv)
    np.testing.assert_array_equal(whole, distance >= 0)
    # two chains of rows: a pass
    masks, pos0 = np.zeros((2, 2, 9, n_kv), np.float16), [0, 500]
    fill_mask(masks[0], pos0)
    fill_window(masks[1], masks[0], pos0, n_window)
    distance = (np.array(pos0)[:, None] + np.arange(9))[:, :, None] - np.arange(n_kv)
    np.testing.assert_array_equal(masks[1] == 0, (distance >= 0) & (distance < n_window))


def test_the_window_of_a_drafted_row_follows_its_path() -> None:
    tree, n_window = Tree(np.array([[-1, 0, 0, 2, 3, -2]], np.int32), (5,)), 3
    masks = np.zeros((2, 1, 6, PAGE), np.float16)
    fill_mask(masks[0], [10], tree.sees)
    fill_window(masks[1], masks[0], [10], n_window, tree.depths)
    seen = [np.flatnonzero(row == 0).tolist() for row in masks[1, 0]]
    # the last row is padding
    assert seen == [[8, 9, 10], [9, 10, 11], [9, 10, 12], [10, 12, 13], [12, 13, 14], [8, 9, 10]]


def test_what_is_before_the_windows_of_all_layers_does_not_matter(
    open_engine: Open, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Qwen3Moe, "layer", lambda hp, il: replace(attention_layer(hp), window=window)
    )
    engine = open_engine("qwen3moe", n_ctx=1280)
    ids = prompt(engine, 3 * window + 17, seed=1)
    first = len(ids) - 1 - 3 * (window - 1)  # the first position that the last row depends on
    base = engine.prefill(ids).require_logits().copy()
    # one of 300 positions, seen through three layers, may be too little for quantized activations
    n = 1 if window == SHORT else window
    for at, is_same in ((slice(first), True), (slice(first, first + n), False)):
        other = ids.copy()
        other[at] = (other[at] + 1) % engine.hparams.n_vocab
        engine.reset()
        assert np.array_equal(engine.prefill(other).require_logits(), base) is is_same


@pytest.mark.parametrize("n_seq", [1, 3])
def test_all_kinds_of_passes_give_the_bits_of_single_rows(
    open_engine: Open, window: int, n_seq: int
) -> None:
    alone = open_engine("qwen3moe", n_ctx=1024, cpu_reference=True)
    engine = open_engine("qwen3moe", n_ctx=1024, n_seq=n_seq, cpu_reference=True)
    rng, lengths = np.random.default_rng(n_seq), (70, 45 + window, 33)
    texts = [prompt(engine, n, seed=i) for i, n in enumerate(lengths[:n_seq])]
    sweep = engine.passes.begin_prompts([SweepBatch(ids, i) for i, ids in enumerate(texts)])
    while engine.passes.step_prompt(sweep):
        pass
    for seq, swept in enumerate(sweep.prompts):
        ids, last = texts[seq], swept.output
        alone.reset()
        rows = [alone.forward([token]).require_logits()[0] for token in ids]
        assert last is not None
        np.testing.assert_array_equal(last.require_logits()[0], rows[-1])
        engine.reset(seq)
        found = [engine.forward(ids[at : at + 7], seq, all_rows=True).logits
                 for at in range(0, len(ids), 7)]  # fmt: skip
        np.testing.assert_array_equal(np.concatenate(found), rows)
    parents = [TREES[i](9, rng) for i in range(n_seq)]
    tokens, slots = rng.integers(0, 1000, (n_seq, 9)), list(range(n_seq))
    engine.passes.verify(tokens, slots, parents, [9, 7, 8][:n_seq], greedy=False)
    got = engine.collect().require_logits().reshape(n_seq, 9, -1)
    for seq, row in ((0, 8), (n_seq - 1, 4), (n_seq - 1, 6)):
        alone.reset()
        alone.prefill(texts[seq])
        for token in tokens[seq, path(parents[seq], row)]:
            wanted = alone.forward([token]).require_logits()[0]
        np.testing.assert_array_equal(got[seq, row], wanted)
