"""Verify passes: each row of a tree has the bits of its path alone, a commit those of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.faults import FAULTS, faulty
from helpers.shared import prompt
from helpers.tree_shapes import TREES, path

from moegraph.engine import Engine
from moegraph.errors import (
    Cancelled,
    ContextOverflow,
    InternalError,
    MoegraphError,
    RequestError,
)
from moegraph.events import CancelToken
from moegraph.ggml.lib import C, ffi
from moegraph.runner import NotFinite
from moegraph.runner.inspect import read_tensor

Open = Callable[..., Engine]
N_SEQ, N_VOCAB = 4, 1000
MODES: list[dict[str, Any]] = [
    {"mode": "whole"},
    {"mode": "whole", "type_k": "q8_0", "type_v": "q4_0"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "stream", "policy": "lru"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "cpu", "policy": "lru"},
]
NAMES = ["whole", "quantized", "stream", "cpu"]


class Alone:
    """An engine with one sequence, which tells what any tokens give by themselves."""

    def __init__(self, open_engine: Open, settings: dict[str, Any]) -> None:
        kv = {name: settings[name] for name in ("type_k", "type_v") if name in settings}
        self._engine = open_engine(cpu_reference=True, **kv)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after each token, F32 [n_tokens, n_vocab]."""
        self._engine.reset()
        parts = [
            self._engine.forward(tokens[at : at + 64], all_rows=True).logits
            for at in range(0, len(tokens), 64)
        ]
        return np.concatenate(parts)


def states_of(engine: Engine) -> list[np.ndarray]:
    """Copy all recurrent states."""
    state = engine.state.states[0]
    return [read_tensor(t) for each in state.layer_states.values() for t in each]


def held_by(engine: Engine, slot: int) -> list[int]:
    """Return a copy of the tokens that a sequence holds."""
    return list(engine.held(slot))


def verify(engine: Engine, *args: Any, **kwargs: Any) -> np.ndarray:
    """Run a verify pass; return its logits."""
    engine.passes.verify(*args, greedy=False, **kwargs)
    return engine.collect().require_logits()


@pytest.mark.parametrize(
    ("settings", "n_seq"), list(zip(MODES, (N_SEQ, N_SEQ, 1, N_SEQ))), ids=NAMES
)
def test_rows_of_ragged_trees_equal_their_paths_and_commits_equal_passes(
    open_engine: Open, settings: dict, n_seq: int
) -> None:
    engine = open_engine(cpu_reference=True, n_seq=n_seq, **settings)
    alone, rng = Alone(open_engine, settings), np.random.default_rng(n_seq)
    for slot in range(n_seq):
        engine.forward(rng.integers(0, N_VOCAB, 3 + 5 * slot), slot)
    for turn in range(16):
        slots = rng.permutation(n_seq)[: rng.integers(1, n_seq + 1)].tolist()
        n = int(rng.choice([1, 2, 5, 9]))
        tokens = rng.integers(0, N_VOCAB, (len(slots), n))
        lengths = rng.integers(1, n + 1, len(slots)).tolist()
        parents = [TREES[rng.integers(0, len(TREES))](n, rng) for _ in slots]
        before, held = states_of(engine), [held_by(engine, slot) for slot in range(n_seq)]
        got = verify(engine, tokens, slots, parents, lengths).reshape(len(slots), n, -1)
        for a, b in zip(before, states_of(engine)):
            np.testing.assert_array_equal(a, b)
        assert [held_by(engine, slot) for slot in range(n_seq)] == held
        assert engine.state.n_past == [len(h) for h in held]
        for seq, slot in enumerate(slots):
            for row in range(lengths[seq]):
                rows = path(parents[seq], row)
                wanted = alone.logits(held[slot] + tokens[seq, rows].tolist())[-1]
                np.testing.assert_array_equal(got[seq, row], wanted, err_msg=f"{turn} {slot} {row}")
        paths = {
            slot: path(parents[seq], int(rng.integers(-1, lengths[seq])))
            for seq, slot in enumerate(slots)
        }
        for some in [paths] if turn % 3 else [{slot: rows} for slot, rows in paths.items()]:
            engine.passes.commit(some)
        for seq, slot in enumerate(slots):
            assert held_by(engine, slot) == held[slot] + tokens[seq, paths[slot]].tolist()
        slot = int(rng.integers(0, n_seq))
        token = int(rng.integers(0, N_VOCAB))
        wanted = alone.logits([*held_by(engine, slot), token])[-1]
        np.testing.assert_array_equal(engine.forward([token], slot).logits[0], wanted)
        check_pool(engine.state.pool)


@pytest.mark.parametrize("settings", MODES[:1] + MODES[2:3], ids=["whole", "stream"])
def test_a_commit_leaves_the_states_that_a_pass_leaves(open_engine: Open, settings: dict) -> None:
    """All of them: recurrent states, and K and V wherever the pages are."""
    engines = [open_engine(cpu_reference=True, n_seq=2, **settings) for _ in range(2)]
    rng = np.random.default_rng(7)
    ids = rng.integers(0, N_VOCAB, (2, 250))
    for engine in engines:
        for at in range(0, 250, 50):
            engine.forward(ids[:, at : at + 50])
    for turn in range(6):
        tokens = rng.integers(0, N_VOCAB, (2, 7))
        parents = [[-1, -1, 0, 1, 3, 3, 5]] * 2
        verify(engines[0], tokens, [1, 0], parents)
        taken = [[1, 3, 5, 6], [0, 2]][:: 1 if turn % 2 else -1]
        with faulty("mg_launch", 0, None) as library:
            engines[0].passes.commit({1: taken[0], 0: taken[1]})
        assert library.n_calls == 1
        for seq, slot in enumerate((1, 0)):
            engines[1].forward(tokens[seq, taken[seq]], slot)
        assert engines[0].state.n_past == engines[1].state.n_past
        for a, b in zip(*map(states_of, engines)):
            np.testing.assert_array_equal(a, b)
        for cache in ("k", "v"):
            for il in engines[0].state.states[0].k:
                rows = []
                for e in engines:
                    raw = read_tensor(getattr(e.state.states[0], cache)[il])
                    at = [
                        e.state.pool.row(s, p) for s in range(2) for p in range(e.state.n_past[s])
                    ]
                    rows.append(raw[at])
                np.testing.assert_array_equal(*rows)
    assert engines[0].state.n_past[0] > 256


def test_rows_at_the_end_of_the_context_leave_room_for_no_padding(open_engine: Open) -> None:
    engine = open_engine(cpu_reference=True, n_seq=2, n_ctx=256)
    alone = Alone(open_engine, {})
    ids = prompt(engine, 254, seed=1)
    for at in range(0, 254, 64):
        engine.forward(ids[at : at + 64], 0)
    engine.forward(ids[:9], 1)
    tokens = np.arange(10).reshape(2, 5)
    got = verify(engine, tokens, [0, 1], lengths=[2, 5]).reshape(2, 5, -1)
    for seq, held, n in ((0, ids, 2), (1, ids[:9], 5)):
        wanted = alone.logits([*held.tolist(), *tokens[seq, :n].tolist()])[len(held) :]
        np.testing.assert_array_equal(got[seq, :n], wanted)
    engine.passes.commit({0: [0, 1]})
    assert len(held_by(engine, 0)) == 256
    with pytest.raises(ContextOverflow, match="257 positions, the context holds 256"):
        engine.passes.verify([[1], [2]], [0, 1])
    engine.passes.commit({1: [0, 1, 2]})  # a refused pass is no pass
    wanted = alone.logits([*ids[:9].tolist(), 5, 6, 7, 3])[-1]
    np.testing.assert_array_equal(engine.forward([3], 1).logits[0], wanted)


def test_what_cannot_be_committed_is_refused_and_changes_nothing(open_engine: Open) -> None:
    engine = open_engine(n_seq=3)
    passes = engine.passes
    engine.forward([[1, 2], [3, 4]])
    none = "has no rows to commit; run a verify pass over it first"
    with pytest.raises(RequestError, match=f"sequence 0 {none}"):
        passes.commit({0: [0]})
    passes.verify([[5, 6, 7], [8, 9, 10]], [1, 0], [[-1, 0, 0], [-1, 0, 1]], [3, 2])
    with pytest.raises(RequestError, match="a pass is in flight; collect its results first"):
        passes.commit({0: [0]})
    assert engine.collect().argmax.shape == (6,)
    for slot, rows, words in (
        (1, [1], "the parent of row 1 is 0, not -1"),
        (1, [0, 1, 2], "the parent of row 2 is 0, not 1"),
        (0, [0, 1, 2], "the tree has rows 0 to 1, not 2"),
        (2, [0], f"sequence 2 {none}"),
        (3, [0], f"sequence 3 {none}"),
    ):
        with pytest.raises(RequestError, match=words):
            passes.commit({slot: rows})
    with pytest.raises(RequestError, match="the parent of row 1 is 0, not -1"):
        passes.commit({0: [0, 1], 1: [1]})
    assert [held_by(engine, s) for s in range(3)] == [[1, 2], [3, 4], []]
    passes.commit({0: [0, 1]})
    assert [held_by(engine, s) for s in range(3)] == [[1, 2, 8, 9], [3, 4], []]
    for change in (
        lambda: passes.commit({1: [0]}),
        lambda: engine.forward([1], 1),
        lambda: engine.reset(1),
        lambda: (engine.forward([1], 1), passes.verify([[1]], [0]), engine.collect()),
        lambda: engine.copies.restore(snapshot),
    ):
        snapshot = engine.copies.snapshot(1)
        passes.verify([[5], [6]], [0, 1])
        engine.collect()
        change()
        with pytest.raises(RequestError, match=none):
            passes.commit({1: [0]})
    with pytest.raises(InternalError, match="the parent of row 0 is 5"):
        passes.verify([[1, 2]], [0], [[5, 0]])
    with pytest.raises(RequestError, match="lengths"):
        passes.verify([[1, 2]], [0], lengths=[3])


def poke(engine: Engine, slot: int, value: float) -> None:
    """Change a number in a recurrent state of a sequence."""
    tensor = next(iter(engine.state.states[0].layer_states.values()))[1]
    raw = np.array([value], np.float32)
    C.ggml_backend_tensor_set(tensor, ffi.from_buffer(raw), slot * tensor.nb[1], 4)


@pytest.mark.parametrize("settings", MODES[:1] + MODES[2:3], ids=["whole", "stream"])
def test_a_verify_pass_that_goes_wrong_changes_no_sequence(
    open_engine: Open, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(cpu_reference=True, n_seq=2, **settings)
    alone, passes = Alone(open_engine, settings), engine.passes
    ids = prompt(engine, 40).reshape(2, 20)
    engine.forward(ids)
    held, snapshot = [held_by(engine, 0), held_by(engine, 1)], engine.copies.snapshot(1)

    poke(engine, 1, np.nan)
    with pytest.raises(
        NotFinite, match="of sequence 1 .* after 20 positions, in a drafted row"
    ) as e:
        verify(engine, [[1, 2], [3, 4]], [0, 1])
    wanted = alone.logits([*held[0], 1, 2])[20:]
    np.testing.assert_array_equal(e.value.output.logits[:2], wanted)
    with pytest.raises(RequestError, match="no rows to commit"):
        passes.commit({1: [0]})
    passes.commit({0: [0]})
    engine.copies.restore(snapshot)
    assert [held_by(engine, 0), held_by(engine, 1)] == [[*held[0], 1], held[1]]

    token = CancelToken()
    token.set()
    with pytest.raises(Cancelled):
        passes.verify([[1, 2], [3, 4]], [0, 1], cancel=token)
    assert [held_by(engine, 0), held_by(engine, 1)] == [[*held[0], 1], held[1]]
    for slot in (0, 1):
        wanted = alone.logits([*held_by(engine, slot), 9])[-1]
        np.testing.assert_array_equal(engine.forward([9], slot).logits[0], wanted)


@pytest.mark.parametrize("settings", MODES[:1] + MODES[2:3], ids=["whole", "stream"])
def test_a_commit_that_fails_empties_the_sequences_that_it_changes(
    open_engine: Open, settings: dict
) -> None:
    engine = open_engine(cpu_reference=True, n_seq=4, **settings)
    alone, passes = Alone(open_engine, settings), engine.passes
    engine.forward(prompt(engine, 40).reshape(4, 10))
    held = [held_by(engine, slot) for slot in range(4)]
    verify(engine, [[1, 2], [3, 4], [5, 6]], [2, 0, 3])
    paths = {3: [0], 0: [0, 1], 2: []}
    for name in ("mg_graph_alloc", "ggml_init"):  # before the launch: nothing is lost
        with faulty(name, 1, FAULTS[name][0]), pytest.raises(MoegraphError):
            passes.commit(paths)
        assert [held_by(engine, slot) for slot in range(4)] == held
    result, kind = FAULTS["mg_launch"]
    with faulty("mg_launch", 1, result), pytest.raises(kind):
        passes.commit(paths)
    assert [held_by(engine, slot) for slot in range(4)] == [[], held[1], held[2], []]
    with pytest.raises(RequestError, match="no rows to commit"):
        passes.commit({3: [0]})
    passes.commit({2: [0, 1]})
    tokens = np.array([[7], [8], [9], [6]])
    got = engine.forward(tokens, [0, 1, 2, 3]).require_logits()
    for slot, before in enumerate([[], held[1], [*held[2], 1, 2], []]):
        wanted = alone.logits([*before, *tokens[slot].tolist()])[-1]
        np.testing.assert_array_equal(got[slot], wanted)
