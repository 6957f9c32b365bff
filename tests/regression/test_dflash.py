"""DFlash drafts equal upstream's graph on the same file, up to the order of sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.dflash import FedDrafter, log_softmax, nmse, random_features
from helpers.drafters import write_small
from regression.harness import Models, Upstream

N_EMBD, N_TOP = 256, 100
# Of log probabilities: mean square of the difference over that of the values. Features are summed
# layer by layer here; with quantized weights, that changes how activations round.
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
    changes = {"target_layers": (0, 3, 2), **CASES[name]}
    path = write_small(tmp_path, "dflash", "Q8_0" if name == "q8_0" else "F32", **changes)
    target, features = models.path("float32"), random_features(n_past, 3, N_EMBD, n_past)
    with FedDrafter(target, path) as fed:
        hp = fed.file.hparams
        fed.take(features)
        draft = fed.draft(17, N_TOP)
    logits = upstream.oracle.block(
        target, path, features, 17, hp.mask_id, hp.block_size, hp.is_causal, n_ctx=512, threads=1
    )
    wanted = log_softmax(logits[0 if hp.samples_anchor else 1 :])
    np.testing.assert_array_equal(draft.tokens[:, 0], wanted.argmax(1))
    assert draft.log_p is not None
    error = nmse(draft.log_p, wanted, draft.tokens)
    assert error < (COARSE if name == "q8_0" else NMSE), f"NMSE {error:.2g}"
    # the tokens are the likeliest ones
    least = np.take_along_axis(wanted, draft.tokens[:, -1:].astype(np.int64), 1)
    np.testing.assert_allclose(least[:, 0], np.sort(wanted, axis=1)[:, -N_TOP], atol=0.5)
