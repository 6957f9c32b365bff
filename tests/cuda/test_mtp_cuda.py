"""The MTP block on a GPU: chains are captured graphs, embeddings come from pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import shared  # noqa: F401 - it finds the scripts
from helpers.mtp import MtpModel
from modelgen.build import write_model
from modelgen.presets import PRESETS

from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import Builder
from moegraph.runner import Batch
from moegraph.runner.inspect import read_tensor

N = 6


def random_ids(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    """Return the squared error relative to b."""
    return float(((a - b).astype(np.float64) ** 2).sum() / (b.astype(np.float64) ** 2).sum())


@pytest.fixture(scope="module")
def with_block(
    model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function from preset name to a model file with an MTP block."""

    def path_of(name: str) -> Path:
        preset = PRESETS[name]
        if preset.shape.n_layer_nextn:
            return model_file(name)
        path = tmp_path_factory.mktemp("mtp") / f"{name}.gguf"
        return write_model(path, replace(preset.shape, n_layer_nextn=1), preset.mix, seed=7)[0]

    return path_of


@pytest.mark.parametrize("preset", ["mini35b", "float32", "kquant40", "iq64", "mxfp256"])
def test_a_chain_is_that_of_the_cpu(with_block: Callable[[str], Path], preset: str) -> None:
    ids = random_ids(300)
    found = []
    for device in ("cpu", "cuda"):
        with MtpModel(with_block(preset), 256, device=device) as model:
            model.read(ids)
            draft = model.drafter.draft(0, 5, N, 3)
            found.append((draft.tokens[:, 0], model.logits(N)))
            assert draft.problem(model.hp.n_vocab) == ""
            np.testing.assert_array_equal(draft.tokens[:, 0], model.logits(N).argmax(axis=1))
    (cpu_tokens, cpu), (tokens, logits) = found
    n = 1 + int((cpu_tokens == tokens).cumprod()[:-1].sum())  # rows after the same tokens
    errors = [nmse(a, b) for a, b in zip(logits[:n], cpu[:n])]
    # a row depends on those before it, and its router may choose another expert
    assert min(errors) < 5e-3 and max(errors) < 5e-2, " ".join(f"{one:.1e}" for one in errors)


def test_captured_chains_repeat_and_begin_with_shorter_ones(
    with_block: Callable[[str], Path],
) -> None:
    ids, other = random_ids(280), random_ids(90, seed=2)
    with MtpModel(with_block("mini35b"), 256, device="cuda", n_seq=2) as model:
        model.read(ids, 1)
        model.read(other, 0)
        wanted, rows = model.drafter.draft(1, 5, N, 4), model.logits(N)
        for turn in range(6):
            model.drafter.draft(0, turn, 1 + turn, 1)
            for n in (N, 2, 4):
                draft = model.drafter.draft(1, 5, n, 4)
                np.testing.assert_array_equal(draft.tokens, wanted.tokens[:n])
                np.testing.assert_array_equal(model.logits(n), rows[:n])


@pytest.mark.parametrize("n_vocab", [0, 300])
def test_nan_ends_no_process(with_block: Callable[[str], Path], n_vocab: int) -> None:
    with MtpModel(with_block("float32"), 256, device="cuda", n_vocab=n_vocab) as model:
        model.read(random_ids(30))
        wanted = model.drafter.draft(0, 3, 4, 2)
        snapshot = model.state.snapshot(0)
        bad = np.full(model.hp.n_embd, np.nan, dtype=np.float32)
        model.stage.device.synchronize()  # the snapshot is a copy that was enqueued
        C.ggml_backend_tensor_set(model.stage.state.last_out, ffi.from_buffer(bad), 0, bad.nbytes)
        for _ in range(4):
            assert model.drafter.draft(0, 3, 4, 2).problem(model.hp.n_vocab)
        model.state.restore(snapshot)
        np.testing.assert_array_equal(model.drafter.draft(0, 3, 4, 2).tokens, wanted.tokens)
        snapshot.close()


@pytest.mark.parametrize("n_kept", [0, 8])
@pytest.mark.parametrize("preset", ["mini35b", "kquant40"])
def test_experts_that_are_fetched_change_no_draft(
    with_block: Callable[[str], Path], preset: str, n_kept: int
) -> None:
    ids, found = random_ids(60), []
    for kept in (None, n_kept):
        with MtpModel(with_block(preset), 256, device="cuda", n_kept=kept) as model:
            model.read(ids)
            rows = []
            for turn in range(40):  # experts are exchanged meanwhile
                model.drafter.draft(0, 3 + turn % 2, 1 + turn % 5, 1)
                rows.append(model.logits(1 + turn % 5))
            found.append(np.concatenate(rows))
    np.testing.assert_array_equal(*found)


def test_the_ring_has_hidden_states_of_what_was_taken(with_block: Callable[[str], Path]) -> None:
    """After decode passes, also those that are replayed, and after commits of paths of trees."""
    ids = random_ids(40)
    with MtpModel(with_block("mini35b"), 256, device="cuda") as model:
        states, device, runner = model.stage.hidden_states, model.stage.device, model.runner
        runner.graphs.clear()
        layers = (0, 1, model.hp.n_layer - 1)
        states.reserve(layers, 32, 1)

        def check(rows: list[int], first: int) -> None:
            device.synchronize()
            with Context(16) as context:
                b = Builder(context, 16)
                ring = read_tensor(states._ring(b))
                for at, il in enumerate(layers):
                    wanted = read_tensor(states.leaf(b, il))[rows]
                    got = ring[at][states.ring_rows(0, first, len(rows))]
                    assert wanted.any()
                    np.testing.assert_array_equal(got, wanted, err_msg=f"layer {il} at {first}")

        for turn in range(30):
            first = model.state.n_past[0]
            runner.submit(Batch(ids[turn : turn + 1][None], (0,)))
            runner.collect()
            check([0], first)
            if turn % 3 == 2:
                runner.submit(Batch.verify(ids[:6][None], (0,), [[-1, 0, 0, 1, 2, 4]]))
                runner.collect()
                path = [[0], [0, 2, 4, 5], [0, 1, 3]][turn // 3 % 3]
                runner.commit({0: path})
                check(path, first + 1)
        assert model.state.n_past[0] > 50
