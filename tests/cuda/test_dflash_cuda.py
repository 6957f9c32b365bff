"""DFlash and DSpark drafters on a GPU: the drafts are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.dflash import FedDrafter, nmse, random_features
from helpers.drafters import write_small

# Of log probabilities of the likeliest tokens; the CPU adds values in F16.
LIMIT = 2e-4
N_EMBD, N_TOP, N_CTX = 256, 32, 1024
WIDE = {"head_dim": 128, "n_head": 8, "n_head_kv": 2, "n_ff": 512}
CASES: dict[str, dict[str, Any]] = {
    "window": {},
    "wide": {**WIDE, "windows": "sssf", "block_size": 16},
    "yarn": {**WIDE, "windows": "ff", "n_swa": 0, "yarn_factor": 64.0, "n_head": 16},
    "causal": {"is_causal": True},
    "dspark": {"markov_rank": 64},
    "reduced": {**WIDE, "markov_rank": 64, "n_vocab_draft": 512, "samples_anchor": False},
}


@pytest.mark.parametrize("matrices", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_cpu(
    model_file: Callable[[str], Path], tmp_path: Path, name: str, matrices: str
) -> None:
    path = write_small(tmp_path, "dflash", matrices, **{"target_layers": (0, 3, 2), **CASES[name]})
    features = random_features(300, 3, N_EMBD)
    with (
        FedDrafter(model_file("float32"), path, n_ctx=N_CTX) as cpu,
        FedDrafter(model_file("float32"), path, "cuda", n_ctx=N_CTX) as gpu,
    ):
        for part in (features[:3], features[3:280], features[280:]):
            for fed in (cpu, gpu):
                fed.read(part) if len(part) > 100 else fed.take(part)
            for _ in range(3):  # the third time, the graph is replayed
                wanted, got = cpu.draft(17, 120), gpu.draft(17, N_TOP)
            assert wanted.log_p is not None and got.log_p is not None
            table = np.full((len(wanted.tokens), 1024), np.nan)
            np.put_along_axis(table, wanted.tokens.astype(np.int64), wanted.log_p, 1)
            n = agreeing(wanted.tokens, got.tokens) if "markov_rank" in CASES[name] else 99
            error = nmse(got.log_p[:n], table[:n], got.tokens[:n])
            assert error < (LIMIT if matrices == "F32" else 50 * LIMIT), f"NMSE {error:.1e}"
            assert (got.confidence is None) == (wanted.confidence is None)


def agreeing(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many rows follow the same tokens: the Markov head goes by the row before."""
    return 1 + int((a[:, 0] == b[:, 0]).cumprod()[:-1].sum())


def test_a_prompt_equals_passes(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_small(tmp_path, target_layers=(0, 3, 2), windows="ss", n_swa=100)
    features = random_features(600, 3, N_EMBD)
    with FedDrafter(model_file("float32"), path, "cuda", n_ctx=N_CTX) as fed:
        fed.take(features)
        a = fed.draft(17, N_TOP)
        fed.drafter.restart(0, np.zeros(0, np.int32))
        fed.read(features[:450])
        fed.read(features[450:])
        b = fed.draft(17, N_TOP)
    assert a.log_p is not None and b.log_p is not None
    np.testing.assert_allclose(a.log_p[:, :8], b.log_p[:, :8], atol=0.05)


@pytest.mark.parametrize("name", ["wide", "causal", "dspark", "reduced"])
def test_drafts_of_several_sequences_are_those_of_each(
    model_file: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Of different lengths, whose rings are full in the end, and of other numbers of them."""
    changes = {**CASES[name], "windows": "ff", "n_swa": 0}
    path = write_small(tmp_path, target_layers=(0, 3, 2), **changes)
    features = random_features(1200, 3, N_EMBD)
    with FedDrafter(model_file("float32"), path, "cuda", n_ctx=N_CTX, n_seq=4) as fed:
        assert fed.drafter.joins
        for lengths in ((3, 90, 40, 300), (200, 0, 128, 700)):
            for slot, n in enumerate(lengths):
                fed.take(features[100 * slot : 100 * slot + n], slot)
            for chosen in ((0, 1, 2, 3), (3, 0), (1, 2, 0)):
                anchors = {slot: 17 + slot for slot in chosen}
                for n in (3, 7):
                    for _ in range(3):  # the third time, the graph is replayed
                        joint = fed.drafter.draft_all(anchors, n, N_TOP)
                    for got, (slot, anchor) in zip(joint, anchors.items()):
                        wanted = fed.drafter.draft(slot, anchor, n, N_TOP)
                        assert got.tokens.shape == wanted.tokens.shape
                        assert got.log_p is not None and wanted.log_p is not None
                        m = agreeing(wanted.tokens, got.tokens) if "dspark" in name else 1
                        np.testing.assert_allclose(got.log_p[:m], wanted.log_p[:m], atol=0.1)
