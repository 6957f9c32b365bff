"""DFlash drafts equal upstream's graph on the same file, up to the order of sums."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import write_small
from helpers.stages import new_stage
from regression.harness import Models, Upstream

from moegraph.config import EngineConfig
from moegraph.draft.dflash import DFlashDrafter
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import Builder
from moegraph.modelfile import open_model
from moegraph.modelfile.draftfile import open_drafter
from moegraph.resident.draftlayout import MAX_ROWS
from moegraph.resident.stage import Stage

N_EMBD, N_TOP = 256, 100
# Of log probabilities: mean square of the difference over that of the values. Features are summed
# tap by tap here; with quantized weights, that changes how activations round.
NMSE, COARSE = 2e-6, 1e-5
CASES: dict[str, dict[str, Any]] = {
    "window": {},
    "causal": {"is_causal": True, "windows": "sff"},
    "yarn": {"windows": "fff", "n_swa": 0, "yarn_factor": 64.0, "yarn_orig": 4096},
    "long window": {"n_swa": 200, "windows": "ss"},
    "dspark": {"markov_rank": 32},
    "bonus anchor": {"markov_rank": 32, "samples_anchor": False, "has_confidence": False},
    "reduced": {"markov_rank": 32, "n_vocab_draft": 512},
    "q8_0": {},
}


@pytest.mark.parametrize("n_past", [0, 30, 300])
@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_upstream(
    models: Models, upstream: Upstream, tmp_path: Path, name: str, n_past: int
) -> None:
    changes = {"taps": (0, 3, 2), **CASES[name]}
    path = write_small(tmp_path, "dflash", "Q8_0" if name == "q8_0" else "F32", **changes)
    target = models.path("float32")
    rng = np.random.default_rng(n_past)
    features = rng.standard_normal((n_past, 3 * N_EMBD), dtype=np.float32)
    with ExitStack() as stack:
        file = stack.enter_context(closing(open_drafter(path)))
        hp = file.hparams
        n_rows = hp.block_size
        wanted = upstream.oracle.block(
            target, path, features, 17, hp.mask_id, n_rows, hp.is_causal, n_ctx=512, threads=1
        )[0 if hp.samples_anchor else 1 :].astype(np.float64)
        tokens, log_p = ours(stack, target, file, features, 17)
    total = np.log(np.exp(wanted - wanted.max(1, keepdims=True)).sum(1, keepdims=True))
    wanted -= wanted.max(1, keepdims=True) + total
    np.testing.assert_array_equal(tokens[:, 0], wanted.argmax(1))
    there = np.take_along_axis(wanted, tokens.astype(np.int64), 1)
    error = ((log_p - there) ** 2).sum() / (there**2).sum()
    assert error < (COARSE if name == "q8_0" else NMSE), f"NMSE {error:.2g}"
    # the tokens are the likeliest ones
    np.testing.assert_allclose(there[:, -1], np.sort(wanted, axis=1)[:, -N_TOP], atol=0.5)


def put(stage: Stage, il: int, rows: np.ndarray) -> None:
    """Write what a pass would leave as a tap."""
    data = np.ascontiguousarray(rows, np.float32)
    with Context(4) as context:
        leaf = stage.taps.leaf(Builder(context, 4), il)
        C.ggml_backend_tensor_set(leaf, ffi.from_buffer(data), 0, data.nbytes)


def ours(stack: ExitStack, target: Path, file: Any, features: np.ndarray, anchor: int) -> Any:
    """Return tokens and log probabilities of a draft after positions with features."""
    model = stack.enter_context(closing(open_model(target)))
    file.require_target(model)
    config = EngineConfig(device="cpu", n_threads=1, n_ubatch=64, n_ctx=512).validate()
    layers = range(model.hparams.n_layer)
    stage = stack.enter_context(closing(new_stage(model, layers, config)))
    stage.taps.reserve(file.hparams.taps, MAX_ROWS)
    drafter = stack.enter_context(closing(DFlashDrafter(stage, file, 512)))
    for at in range(0, len(features), MAX_ROWS):
        part = features[at : at + MAX_ROWS]
        for k, il in enumerate(file.hparams.taps):
            put(stage, il, part[:, k * N_EMBD :][:, :N_EMBD])
        drafter.committed(0, [0] * len(part), list(range(len(part))))
    draft = drafter.draft(0, anchor, drafter.max_draft, N_TOP)
    return draft.tokens, draft.log_p
