"""Passes over sequence slots on CUDA: any order, trees, commits and snapshots, near each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.tree_shapes import TREES, path

from moegraph.engine import Engine
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder
from moegraph.resident.layout import paged_scratch_bytes
from moegraph.runner import NotFinite

Open = Callable[..., Engine]
N_VOCAB = 1000
# Squared error over squared logits. Rounding differs with the width of a pass, and sometimes that
# changes which experts a random router chooses; a row of another sequence has an error above 1.
LIMIT, USUAL_LIMIT = 0.2, 2e-3
PLACEMENTS: list[dict[str, Any]] = [
    {"mode": "whole"},
    {"mode": "whole", "type_k": "q8_0", "type_v": "q8_0"},
    {"cache_slots": 60, "pin_layers": 0, "miss": "stream"},
    {"cache_slots": 60, "pin_layers": 0, "miss": "cpu"},
]
NAMES = ["whole", "q8_0", "stream", "cpu"]


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    """Return the squared error relative to b."""
    return float(((a - b).astype(np.float64) ** 2).sum() / (b.astype(np.float64) ** 2).sum())


def require_near(errors: list[float]) -> None:
    """Fail unless all errors are what rounding may give."""
    assert max(errors) < LIMIT, f"{max(errors)} at {np.argmax(errors)}"
    assert np.median(errors) < USUAL_LIMIT


class Alone:
    """An engine with one sequence on the same device."""

    def __init__(self, open_cuda: Open, settings: dict[str, Any]) -> None:
        kv = {name: settings[name] for name in ("type_k", "type_v") if name in settings}
        self._engine = open_cuda(mode="whole", **kv)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after each token, F32 [n_tokens, n_vocab]."""
        self._engine.reset()
        return self._engine.forward(tokens, all_rows=True).logits


@pytest.mark.parametrize("settings", PLACEMENTS, ids=NAMES)
def test_any_slots_in_any_order_are_near_each_alone(open_cuda: Open, settings: dict) -> None:
    engine, alone = open_cuda(n_seq=5, **settings), Alone(open_cuda, settings)
    rng, held, errors = np.random.default_rng(1), [[] for _ in range(5)], []
    for turn in range(30):
        slots = rng.permutation(5)[: rng.integers(1, 6)].tolist()
        n = int(rng.choice([1, 1, 1, 3]))
        tokens = rng.integers(0, N_VOCAB, (len(slots), n))
        got = engine.forward(tokens, slots, all_rows=True).logits.reshape(len(slots), n, -1)
        for seq, slot in enumerate(slots):
            held[slot] += tokens[seq].tolist()
            wanted = alone.logits(held[slot])[-n:]
            errors += map(nmse, got[seq], wanted)
        if turn % 9 == 8:
            engine.reset(slots[0])
            held[slots[0]] = []
    require_near(errors)
    check_pool(engine.state.pool)


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("settings", PLACEMENTS, ids=NAMES)
def test_trees_are_near_their_paths_and_commits_near_passes(
    open_cuda: Open, settings: dict, n_seq: int
) -> None:
    engine, alone = open_cuda(n_seq=n_seq, **settings), Alone(open_cuda, settings)
    rng, passes, errors = np.random.default_rng(2), engine.passes, []
    held = [rng.integers(0, N_VOCAB, 5 + slot).tolist() for slot in range(n_seq)]
    for slot, tokens in enumerate(held):
        engine.forward(tokens, slot)
    for turn in range(8):
        slots, n = rng.permutation(n_seq)[: rng.integers(1, n_seq + 1)].tolist(), 1 + turn % 6
        tokens = rng.integers(0, N_VOCAB, (len(slots), n))
        lengths = rng.integers(1, n + 1, len(slots)).tolist()
        parents = [TREES[rng.integers(0, len(TREES))](n, rng) for _ in slots]
        passes.verify(tokens, slots, parents, lengths, greedy=False)
        got = passes.collect().logits.reshape(len(slots), n, -1)
        for seq, slot in enumerate(slots):
            for row in range(lengths[seq]):
                taken = tokens[seq, path(parents[seq], row)].tolist()
                errors.append(nmse(got[seq, row], alone.logits(held[slot] + taken)[-1]))
        paths = {
            slot: path(parents[seq], int(rng.integers(-1, lengths[seq])))
            for seq, slot in enumerate(slots)
        }
        passes.commit(paths)
        for seq, (slot, rows) in enumerate(paths.items()):
            held[slot] += tokens[seq, rows].tolist()
        slot, token = int(rng.integers(0, n_seq)), int(rng.integers(0, N_VOCAB))
        held[slot].append(token)
        got_next = engine.forward([token], slot).logits[0]
        errors.append(nmse(got_next, alone.logits(held[slot])[-1]))
    require_near(errors)


@pytest.mark.parametrize("settings", PLACEMENTS[::2], ids=NAMES[::2])
def test_a_restored_sequence_goes_on_with_the_same_bits(open_cuda: Open, settings: dict) -> None:
    engine = open_cuda(n_seq=2, deterministic=True, **settings)
    rng = np.random.default_rng(3)
    first = rng.integers(0, N_VOCAB, (2, 9))
    engine.forward(first)
    snapshot = engine.copies.snapshot(1)
    logits = []
    for _ in range(2):
        logits.append([engine.forward([token], 1).logits for token in range(12)])
        engine.forward([[7]], [0])
        engine.copies.restore(snapshot)
    if settings.get("mode") == "whole":  # else what is resident decides in which order sums are
        np.testing.assert_array_equal(*logits)
    assert nmse(np.array(logits[0]), np.array(logits[1])) < LIMIT
    assert [len(engine.held(slot)) for slot in (0, 1)] == [11, 9]
    snapshot.close()


def test_a_nan_in_one_sequence_touches_no_other(open_cuda: Open) -> None:
    """A freed page with NaN in it would: masked values are multiplied by zero."""
    engine, alone = open_cuda(n_seq=3), Alone(open_cuda, {})
    ids = np.random.default_rng(4).integers(0, N_VOCAB, (3, 30))
    engine.forward(ids)
    tensor = next(iter(engine.state.states[0].layer_states.values()))[1]
    nan = np.array([np.nan], np.float32)
    engine.device.synchronize()
    C.ggml_backend_tensor_set(tensor, ffi.from_buffer(nan), tensor.nb[1], 4)
    with pytest.raises(NotFinite) as caught:
        engine.forward([[1], [2], [3]], [2, 1, 0])
    assert caught.value.sequences == (1,)
    for row, slot, token in ((0, 2, 1), (2, 0, 3)):
        wanted = alone.logits([*ids[slot].tolist(), token])[-1]
        assert nmse(caught.value.output.logits[row], wanted) < LIMIT
    got = engine.forward(ids[1], 1, all_rows=True).logits  # on the pages that held NaN
    assert nmse(got, alone.logits(ids[1].tolist())) < LIMIT


def test_partial_sums_of_attention_take_what_the_planner_counts(open_cuda: Open) -> None:
    engine = open_cuda()
    hp, state, device = engine.hparams, engine.state.states[0], engine.device
    il = next(iter(state.k))
    for n_ctx in (256, 4096, 32768, 262144):
        for n_rows in (1, 5, 32):
            with Context(16, 16) as context:
                b = Builder(context, 16)
                q = b.leaf(F32, (hp.n_embd_head_k, hp.n_head, n_rows), "q")
                pages, rows = b.leaf(I32, (n_ctx // 256, 1), "p"), b.leaf(I32, (36, n_rows), "r")
                out = b.paged_attn(q, state.k[il], state.v[il], pages, rows, 256, 1.0)
                taken = C.ggml_backend_buft_get_alloc_size(device.buft, out) - C.ggml_nbytes(out)
            assert taken <= paged_scratch_bytes(hp, n_rows) + 128, f"{n_ctx} {n_rows}"


@pytest.mark.parametrize("settings", PLACEMENTS[::2], ids=NAMES[::2])
def test_no_pass_needs_more_than_was_reserved(open_cuda: Open, settings: dict) -> None:
    n_seq, n_draft, rng = 6, 4, np.random.default_rng(8)
    engine = open_cuda(n_seq=n_seq, n_draft=n_draft, n_ubatch=8, n_ctx=8192, **settings)
    graphs, passes = engine.runner.graphs, engine.passes
    reserved = graphs.n_bytes, graphs.generation, engine.stage.state.drafts.n_rows
    assert engine.memory()["compute_bytes"] <= engine.plan.bytes["compute"]
    assert engine.memory()["state_bytes"] <= engine.plan.bytes["state"]
    for turn in range(30):
        slots = rng.permutation(n_seq)[: rng.integers(1, n_seq + 1)].tolist()
        n = int(rng.integers(1, n_draft + 2))
        tokens, lengths = rng.integers(0, N_VOCAB, (len(slots), n)), rng.integers(1, n + 1, n_seq)
        engine.forward(tokens[:, :1] if turn % 3 else tokens, slots, greedy=bool(turn % 2))
        passes.verify(tokens, slots, None, lengths[: len(slots)].tolist(), greedy=bool(turn % 2))
        engine.collect()
        passes.commit({slot: list(range(lengths[i])) for i, slot in enumerate(slots)})
        now = graphs.n_bytes, graphs.generation, engine.stage.state.drafts.n_rows
        assert now == reserved, f"turn {turn}"
