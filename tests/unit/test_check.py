"""The search for NaN and infinity in weights: every type, and where the first one is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from helpers.ggufbytes import Q, Shape, edit, model_file, row_bytes

from moegraph.arch import open_model
from moegraph.arch.tensors import MATRIX_TYPES
from moegraph.gguf import resolve_target
from moegraph.gguf.check import BadTensor, find_nonfinite

NAME = "blk.1.ffn_down_exps.weight"
SHAPE = Shape(n_embd=256, n_ff_exp=256, n_expert=2, expert_type=Q.F16)
N_ELEMENTS = 256 * 256 * 2


def write(path: Path, kind: Q, data: bytes) -> None:
    path.write_bytes(model_file(SHAPE, tensors=edit(NAME, kind=kind, data=data)).build())


def find(path: Path) -> list[BadTensor]:
    with open_model(path) as model:
        return find_nonfinite(model)


@pytest.mark.parametrize("kind", sorted(MATRIX_TYPES))
def test_random_blocks_are_judged_as_their_dequantized_values(tmp_path: Path, kind: Q) -> None:
    """Random bytes hit NaN and infinite scales by themselves, in 1 block of 32 or more."""
    path = tmp_path / "m.gguf"
    raw = np.random.default_rng(kind).integers(0, 256, row_bytes(kind, N_ELEMENTS), np.uint8)
    write(path, kind, raw.tobytes())
    n_blocks = N_ELEMENTS // GGML_QUANT_SIZES[kind][0]
    with np.errstate(all="ignore"):
        values = dequantize(raw.reshape(-1, row_bytes(kind, 256)), kind).reshape(n_blocks, -1)
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    found = find(path)
    assert 0 < len(bad) < n_blocks
    assert found == [BadTensor(NAME, kind.name, len(bad), n_blocks, int(bad[0]))]


def test_a_sound_model_has_nothing_to_report_and_progress_reaches_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file(SHAPE).build())
    calls: list[tuple[int, int]] = []
    with open_model(path) as model:
        assert find_nonfinite(model, lambda done, total: calls.append((done, total))) == []
        total = sum(info.nbytes for info in model.tensors.values())
    assert calls[-1] == (total, total) and len(calls) >= len(model.tensors)


def test_the_shipped_model_opens_without_a_warning_and_is_sound() -> None:
    with open_model(resolve_target("tiny")) as model:
        assert model.warnings == ()
        assert model.n_bytes <= 24e6
        assert find_nonfinite(model) == []
