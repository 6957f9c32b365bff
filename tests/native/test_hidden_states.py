"""Hidden states that passes keep for a drafter are what layers computed, in every kind of pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from helpers.stages import MODES, N_SEQ, Stages, batches, new_config

from moegraph.arch import ModelFile, open_model
from moegraph.ggml.handles import Context
from moegraph.ggml.ops import Builder
from moegraph.kinds import MOST_BEHIND
from moegraph.runner import Batch, Runner
from moegraph.runner.inspect import node_values, read_tensor

Nodes = dict[tuple[str, int], np.ndarray]
N_ROWS = 15  # of the largest pass of `batches` that is not a prompt


@pytest.fixture
def opened(model_path: Callable[[str], Path], stack: ExitStack) -> Callable[[str], ModelFile]:
    """Return a function that opens a model file."""
    return lambda preset: stack.enter_context(closing(open_model(model_path(preset))))


def keep(runner: Runner, layers: list[int], n_rows: int = N_ROWS, n_seq: int = 0) -> None:
    """Have the passes of a runner keep hidden states; n_seq: and in a ring of so many sequences."""
    runner.graphs.clear()
    runner.stage.hidden_states.reserve(layers, n_rows, n_seq)


def kept(runner: Runner, il: int, n_rows: int) -> np.ndarray:
    """Copy the first rows of a layer, F32, numpy shape [n_rows, n_embd]."""
    with Context(4) as context:
        return read_tensor(runner.stage.hidden_states.leaf(Builder(context, 4), il, n_rows))


def nodes_of(runner: Runner, batch: Batch, paths: dict[int, list[int]]) -> Nodes:
    """Run a pass whose nodes keep their values; commit the paths if it verifies."""
    if batch.tree is None:
        return node_values(runner, batch)
    runner.submit(batch)
    runner.collect()
    nodes = node_values(runner, batch)
    runner.commit(paths)
    return nodes


@pytest.mark.parametrize(
    ("preset", "mode", "cuts"),
    [*(("legacy32", mode, []) for mode in MODES), ("mini35b", "fetch", [2])],
)  # fmt: skip
def test_hidden_states_are_what_the_layers_computed(
    opened: Callable[[str], ModelFile], stack: ExitStack, preset: str, mode: str, cuts: list[int]
) -> None:
    file, config = opened(preset), new_config(**MODES[mode])
    n_layer = file.hparams.n_layer
    layers = [0, 2, n_layer - 1, n_layer]
    kv = {"type_k": config.type_k, "type_v": config.type_v}
    [plain] = Stages(file, [], new_config(**kv), stack).runners
    stages = Stages(file, cuts, config, stack)
    for runner in stages.runners:
        keep(runner, layers)
    n_kept = 0
    for batch, paths in batches(file.hparams.n_vocab):
        wanted = nodes_of(plain, batch, paths)
        stages.run(batch)
        n_rows = batch.tokens.size
        for il in layers if n_rows <= N_ROWS else []:
            # the stage that reads the output of a layer keeps it
            reader = next(r for r in stages.runners if min(il + 1, n_layer - 1) in r.stage.layers)
            rows = wanted["l_out", il] if il < n_layer else wanted["h_nextn", -1]
            got = kept(reader, il, n_rows)
            real = batch.tree.real.reshape(-1) if batch.tree else slice(None)
            np.testing.assert_array_equal(got[real], rows[real], err_msg=f"layer {il}")
            assert np.isfinite(got).all()
            n_kept += 1
        for runner in stages.runners:
            for slot, path in paths.items():
                runner.commit({slot: path})
    assert n_kept == 17 * len(layers)


def ring_of(runner: Runner, layers: list[int]) -> dict[int, np.ndarray]:
    """Copy the ring of each layer, F32, numpy shape [rows, n_embd]."""
    with Context(8) as context:
        b, states = Builder(context, 8), runner.stage.hidden_states
        return dict(zip(layers, read_tensor(states._ring(b)).copy()))


@pytest.mark.parametrize(
    ("mode", "cuts", "widths"),
    [
        ("whole", [], (N_SEQ,)), ("layered", [], ()), ("fetch", [], (N_SEQ,)), ("whole", [4], ()),
        ("stream", [3], (N_SEQ,)),
    ],
    ids=str,
)  # fmt: skip
def test_the_ring_has_what_sequences_took(
    opened: Callable[[str], ModelFile],
    stack: ExitStack,
    mode: str,
    cuts: list[int],
    widths: tuple[int, ...],
) -> None:
    """Rows of decode and verify passes and of short pieces of prompts; longer ones are left out."""
    file, config = opened("legacy32"), new_config(**MODES[mode])
    n_layer = file.hparams.n_layer
    kv = {"type_k": config.type_k, "type_v": config.type_v}
    [plain] = Stages(file, [], new_config(**kv), stack).runners
    stages = Stages(file, cuts, config, stack)
    for runner in stages.runners:
        runner.shapes.widths = widths
    last = stages.runners[-1]
    layers = [il for il in (2, 5, n_layer - 1, n_layer) if il + 1 > last.stage.layers.start]
    keep(last, layers, n_seq=N_SEQ)
    states, wanted = last.stage.hidden_states, {il: {} for il in layers}
    assert states.n_kept == MOST_BEHIND + N_ROWS
    for _ in range(5):
        for batch, paths in batches(file.hparams.n_vocab):
            before = dict(zip(batch.slots, [plain.sequences.n_past[slot] for slot in batch.slots]))
            nodes = nodes_of(plain, batch, paths)
            stages.run(batch)
            for runner in stages.runners:
                runner.commit(paths) if paths else None
            n, is_kept = batch.tokens.shape[1], batch.tokens.size <= N_ROWS
            for seq, slot in enumerate(batch.slots if is_kept else ()):
                rows = states.ring_rows(slot, before[slot], len(paths.get(slot, range(n)))).tolist()
                for il in layers:
                    values = nodes["l_out", il] if il < n_layer else nodes["h_nextn", -1]
                    for row, at in zip(rows, paths.get(slot, range(n))):
                        wanted[il][row] = values[seq * n + at]
        ring = ring_of(last, layers)
        for il, rows in wanted.items():
            got = ring[il][list(rows)]
            np.testing.assert_array_equal(got, np.array(list(rows.values())), err_msg=f"layer {il}")
    assert plain.sequences.n_past[0] > states.n_kept


@pytest.mark.parametrize("mode", ["whole", "fetch"])
def test_a_tree_leaves_the_ring_alone_after_a_pass_of_as_many_rows(
    opened: Callable[[str], ModelFile], stack: ExitStack, mode: str
) -> None:
    [runner] = Stages(opened("legacy32"), [], new_config(**MODES[mode]), stack).runners
    layers = [2, runner.hp.n_layer - 1]
    keep(runner, layers, n_seq=N_SEQ)
    rows, tree = np.array([[7], [8]], np.int32), np.array([[7, 8]], np.int32)
    passes = Batch(rows, (0, 1)), Batch.verify(tree, (2,), [[-1, 0]], [2])
    for batch in 2 * passes:  # a graph that needs more memory has others built anew
        before = ring_of(runner, layers)
        runner.submit(batch)
        runner.collect()
        after, changes = ring_of(runner, layers), batch.tree is None
        for il in layers:
            assert np.array_equal(before[il], after[il]) != changes
