"""The inputs of paged attention name the same keys, in the same order, as mask and rows do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.tree_shapes import TREES

from moegraph.arch.inputs import PAGED, PassInputs, PassShape
from moegraph.engine import Engine
from moegraph.ggml.handles import Context
from moegraph.ggml.ops import Builder
from moegraph.graphs.paged import ROW_WORDS
from moegraph.resident.layout import PAGE
from moegraph.runner import Batch
from moegraph.runner.inspect import read_tensor

Open = Callable[..., Engine]
N_SEQ = 5


def filled(engine: Engine, batch: Batch, shape: PassShape) -> dict[str, np.ndarray]:
    """Fill the inputs of a pass; return what arrived on the device, by name."""
    block, found = engine.runner._inputs, {}
    with Context(16, 16) as context:
        inputs: PassInputs = block.leaves(Builder(context, 16), shape)
        engine.runner.fill(batch, shape)
        for name, tensor in vars(inputs).items():
            if tensor is not None:
                found[name] = read_tensor(tensor)
    return found


def keys_by_mask(inputs: dict[str, np.ndarray], shape: PassShape) -> list[list[int]]:
    """Return the KV rows that each row attends to, in order."""
    mask = inputs["kq_mask"].reshape(shape.n_seqs, shape.n_seq_tokens, shape.n_kv)
    rows = inputs["kv_rows"].reshape(shape.n_seqs, shape.n_kv)
    return [rows[seq][row == 0].tolist() for seq in range(shape.n_seqs) for row in mask[seq]]


def keys_by_pages(inputs: dict[str, np.ndarray], shape: PassShape) -> list[list[int]]:
    """Return the KV rows that the op reads for each row, in order."""
    pages = inputs["pages"].reshape(shape.n_seqs, -1)
    found = []
    for words in inputs["rows"].reshape(-1, ROW_WORDS):
        seq, n_past, n_keys = words[:3].tolist()
        places = [*range(n_past), *(n_past + words[4 : 4 + max(n_keys - n_past, 0)])]
        found.append([int(pages[seq, p // PAGE] * PAGE + p % PAGE) for p in places[:n_keys]])
    return found


def grown(open_engine: Open) -> Engine:
    """Return an engine whose sequences have pages in mixed order."""
    engine = open_engine("float32", n_seq=N_SEQ, n_ctx=768, n_ubatch=250)
    for slot, n in ((0, 250), (3, 200), (1, 3), (0, 250), (3, 100), (2, 250), (2, 6)):
        engine.forward(np.zeros(n, np.int32), slot, greedy=True)
    return engine


def test_trees_with_padding(open_engine: Open) -> None:
    engine, rng = grown(open_engine), np.random.default_rng(1)
    for _ in range(40):
        slots = rng.permutation(N_SEQ)[: rng.integers(1, N_SEQ + 1)].tolist()
        n = int(rng.integers(1, 7))
        lengths = rng.integers(1, n + 1, len(slots)).tolist()
        parents = [TREES[rng.integers(0, len(TREES))](n, rng) for _ in slots]
        tokens = rng.integers(0, 9, (len(slots), n)).astype(np.int32)
        batch = Batch.verify(tokens, slots, parents, lengths)
        shape = engine.runner.shape_of(batch)
        paged = shape._replace(n_kv=PAGED)
        by_mask, by_pages = filled(engine, batch, shape), filled(engine, batch, paged)
        wanted, real = keys_by_mask(by_mask, shape), batch.tree.real.reshape(-1)
        got = keys_by_pages(by_pages, paged)
        assert got == [keys if r else [] for keys, r in zip(wanted, real)]
        assert shape.is_ragged == paged.is_ragged == (not real.all())
        names = ("parents", "padding", "absent") if shape.is_ragged else ("parents",)
        for name in names:
            np.testing.assert_array_equal(by_pages[name], by_mask[name])
        if shape.is_ragged:
            assert set(by_mask["padding"].reshape(-1)) == set(np.flatnonzero(~real))
            assert (by_mask["absent"].view(np.int32) == -1).all()


@pytest.mark.parametrize("n_seq", [1, 2])
def test_single_rows_that_go_on_or_change_place(open_engine: Open, n_seq: int) -> None:
    """What a pass leaves in the block must not be taken for the next one's."""
    engine, rng = open_engine("float32", n_seq=n_seq, n_ctx=768), np.random.default_rng(2)
    for turn in range(60):
        slot = int(rng.integers(0, n_seq))
        batch = Batch(np.array([[1]], np.int32), (slot,))
        paged = engine.runner.shape_of(batch)._replace(n_kv=PAGED)
        got = keys_by_pages(filled(engine, batch, paged), paged)[0]
        n_past = engine.state.n_past[slot]
        assert got == [engine.state.pool.row(slot, p) for p in range(n_past + 1)]
        engine.state.n_past[slot] += 1 if turn % 9 else int(rng.integers(2, 60))
        if turn % 25 == 24:
            engine.state.truncate(slot, 0)
