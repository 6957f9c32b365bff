"""Taps: what passes keep for a drafter equals what the layers computed, in every kind of pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from helpers.faults import FAULTS, faulty
from helpers.stages import MODES, N_SEQ, Stages, batches, new_config, new_stage

from moegraph.arch import ModelFile, open_model
from moegraph.arch.inputs import PassShape
from moegraph.engine.loader import open_runner
from moegraph.errors import InternalError, OutOfDeviceMemory
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import Builder
from moegraph.graphs.head import Results
from moegraph.kinds import MOST_BEHIND
from moegraph.runner import Batch, Runner, WholeRunner
from moegraph.runner.inspect import node_values, read_tensor
from moegraph.runner.whole import build_whole, n_nodes_whole

Nodes = dict[tuple[str, int], np.ndarray]
NAME = "ggml_backend_buft_alloc_buffer"
N_ROWS = 15  # of the largest pass of `batches` that is not a prompt


@pytest.fixture
def opened(model_path: Callable[[str], Path], stack: ExitStack) -> Callable[[str], ModelFile]:
    """Return a function that opens a model file."""
    return lambda preset: stack.enter_context(closing(open_model(model_path(preset))))


def keep(runner: Runner, layers: list[int], n_rows: int = N_ROWS, n_seq: int = 0) -> None:
    """Have the passes of a runner keep taps; n_seq: and in a ring of so many sequences."""
    runner.graphs.clear()
    runner.stage.taps.reserve(layers, n_rows, n_seq)


def kept(runner: Runner, il: int, n_rows: int) -> np.ndarray:
    """Copy the first rows of a tap, F32, numpy shape [n_rows, n_embd]."""
    with Context(4) as context:
        return read_tensor(runner.stage.taps.leaf(Builder(context, 4), il, n_rows))


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
    [*(("legacy32", mode, []) for mode in MODES), ("legacy32", "whole", [4]),
     ("legacy32", "stream", [3]), ("mini35b", "fetch", [2])],
)  # fmt: skip
def test_taps_are_what_the_layers_computed(
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
            np.testing.assert_array_equal(got[real], rows[real], err_msg=f"tap {il}")
            assert np.isfinite(got).all()
            n_kept += 1
        for runner in stages.runners:
            for slot, path in paths.items():
                runner.commit({slot: path})
    assert n_kept == 17 * len(layers)


def ring_of(runner: Runner, layers: list[int]) -> dict[int, np.ndarray]:
    """Copy the ring of each tap, F32, numpy shape [rows, n_embd]."""
    with Context(8) as context:
        b, taps = Builder(context, 8), runner.stage.taps
        return dict(zip(layers, read_tensor(taps._ring(b)).copy()))


@pytest.mark.parametrize("widths", [(), (N_SEQ,)], ids=["", "padded"])
@pytest.mark.parametrize(
    ("mode", "cuts"), [*((mode, []) for mode in MODES), ("whole", [4]), ("stream", [3])]
)
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
        runner.widths = widths
    last = stages.runners[-1]
    layers = [il for il in (2, 5, n_layer - 1, n_layer) if il + 1 > last.stage.layers.start]
    keep(last, layers, n_seq=N_SEQ)
    taps, wanted = last.stage.taps, {il: {} for il in layers}
    assert taps.n_kept == MOST_BEHIND + N_ROWS
    for _ in range(9):
        for batch, paths in batches(file.hparams.n_vocab):
            before = dict(zip(batch.slots, [plain.sequences.n_past[slot] for slot in batch.slots]))
            nodes = nodes_of(plain, batch, paths)
            stages.run(batch)
            for runner in stages.runners:
                runner.commit(paths) if paths else None
            n, is_kept = batch.tokens.shape[1], batch.tokens.size <= N_ROWS
            for seq, slot in enumerate(batch.slots if is_kept else ()):
                rows = taps.ring_rows(slot, before[slot], len(paths.get(slot, range(n)))).tolist()
                for il in layers:
                    values = nodes["l_out", il] if il < n_layer else nodes["h_nextn", -1]
                    for row, at in zip(rows, paths.get(slot, range(n))):
                        wanted[il][row] = values[seq * n + at]
        ring = ring_of(last, layers)
        for il, rows in wanted.items():
            got = ring[il][list(rows)]
            np.testing.assert_array_equal(got, np.array(list(rows.values())), err_msg=f"tap {il}")
    assert plain.sequences.n_past[0] > taps.n_kept


@pytest.mark.parametrize("mode", ["whole", "layered", "stream", "fetch"])
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


def test_a_ring_adds_one_node_to_a_pass_in_one_graph(
    opened: Callable[[str], ModelFile], stack: ExitStack
) -> None:
    [runner] = Stages(opened("legacy32"), [], new_config(), stack).runners
    plain = nodes_in(runner, 1)
    keep(runner, [1, 2, 5, 7, 8], n_seq=N_SEQ)
    got = nodes_in(runner, 1)
    assert [op for op in got if op != b"VIEW"].count(b"SET_ROWS") == plain.count(b"SET_ROWS") + 1
    assert len(got) == len(plain) + 2 and got.count(b"VIEW") == plain.count(b"VIEW") + 1


def nodes_in(runner: Runner, n_tokens: int) -> list[bytes]:
    """Return the ops of the graph of a pass, in order."""
    shape, n = PassShape(n_tokens, 1, 256, n_tokens), n_nodes_whole(runner.stage)
    with Context(4 * n, 2 * n) as context:
        b = Builder(context, n)
        build_whole(b, runner.stage, runner._inputs, runner.hidden, shape, Results.ARGMAX)
        nodes = [C.ggml_graph_node(b.graph, i) for i in range(C.ggml_graph_n_nodes(b.graph))]
        return [ffi.string(C.ggml_op_desc(node)) for node in nodes]


def test_taps_add_no_node_to_a_pass_in_one_graph(
    opened: Callable[[str], ModelFile], stack: ExitStack
) -> None:
    [runner] = Stages(opened("legacy32"), [], new_config(), stack).runners
    assert isinstance(runner, WholeRunner)
    plain = nodes_in(runner, 4)
    keep(runner, [1, 2, 8])
    assert nodes_in(runner, 4) == plain
    assert runner.stage.taps.n_bytes > 0
    runner.stage.taps.close()
    assert runner.stage.taps.n_bytes == 0
    assert nodes_in(runner, 4) == plain


def test_a_longer_pass_leaves_the_taps_alone(
    opened: Callable[[str], ModelFile], stack: ExitStack
) -> None:
    [runner] = Stages(opened("legacy32"), [], new_config(), stack).runners
    keep(runner, [3], 4)
    seen = []
    for n in (4, 5, 3):
        runner.submit(Batch(np.full((1, n), 7 + n, np.int32), (0,)))
        runner.collect()
        seen.append(kept(runner, 3, 4))
    assert seen[0].any()
    np.testing.assert_array_equal(seen[1], seen[0])
    assert (seen[2][:3] != seen[0][:3]).any()


def test_taps_that_cannot_be(opened: Callable[[str], ModelFile], stack: ExitStack) -> None:
    config = new_config()
    stage = stack.enter_context(closing(new_stage(opened("legacy32"), range(8), config)))
    taps = stage.taps
    for layers in ([-1], [9]):
        with pytest.raises(InternalError, match="of a model of 8 layers"):
            taps.reserve(layers, 4)
    with Context(4) as context, pytest.raises(InternalError, match="reserved"):
        taps.layers, taps.n_rows = (1,), 4
        taps.leaf(Builder(context, 4), 1)
    taps.close()
    taps.reserve([1], 4)
    result, _ = FAULTS[NAME]
    with faulty(NAME, 1, result), pytest.raises(OutOfDeviceMemory):
        taps.reserve([1, 2], 8)
    assert taps.layers == (1,)
    open_runner(stage, config).close()
