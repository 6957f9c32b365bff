"""deepseek2: what its keys give, and what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.presets import PRESETS

from moegraph.arch.blocks.router import Rules
from moegraph.arch.deepseek2 import DeepSeek2
from moegraph.errors import ModelFileError, UnsupportedModel
from moegraph.gguf.metadata import Metadata


def read(preset: str = "glm47flash", n_vocab: int = 1024, **changes: Any) -> DeepSeek2:
    """Read the keys of a preset with some replaced; None: dropped."""
    keys = PRESETS[preset].shape.metadata() | {"general.architecture": "deepseek2"}
    keys |= {f"deepseek2.{name.replace('__', '.')}": value for name, value in changes.items()}
    kept = {key: value for key, value in keys.items() if value is not None}
    return DeepSeek2.read(Metadata("a.gguf", kept, {}), n_vocab)


def test_a_layer_keeps_one_row_of_keys() -> None:
    layer = read().layer(1)
    assert (layer.kv, layer.cached, layer.v_in_k) == ((576, 512), (576,), True)


def test_yarn_scales_products_and_not_what_is_rotated() -> None:
    """DeepSeek-V2: mscale = 1 + 0.1 * 0.707 * ln 40, squared."""
    hp, log = read("mla-lite"), math.log(40.0)
    assert hp.kq_scale * math.sqrt(96) == pytest.approx((1 + 0.0707 * log) ** 2, rel=1e-6)
    assert hp.rope_attn_factor == pytest.approx(1 / (1 + 0.1 * log))


@pytest.mark.parametrize("n_layer, n_vocab", [(26, 1024), (27, 1024), (48, 128_256)])
def test_models_of_these_sizes_have_one_matrix_for_q(n_layer: int, n_vocab: int) -> None:
    """llama.cpp does not read the key then; others need it."""
    changes = {"block_count": n_layer, "nextn_predict_layers": 0, "attention__q_lora_rank": None}
    assert read(n_vocab=n_vocab, **changes).n_lora_q == 0
    with pytest.raises(ModelFileError, match="q_lora_rank is missing"):
        read(n_vocab=n_vocab, **changes | {"block_count": 25})


@pytest.mark.parametrize("n_vocab, n_all, is_sigmoid", [
    (154_880, 48, True), (154_880, 49, True), (1024, 48, False), (154_880, 40, False),
])  # fmt: skip
def test_old_files_of_glm_do_not_say_sigmoid(n_vocab: int, n_all: int, is_sigmoid: bool) -> None:
    hp = read(n_vocab=n_vocab, block_count=n_all, expert_gating_func=None, expert_group_count=8,
              expert_group_used_count=4)  # fmt: skip
    assert (hp.n_layer, hp.rules) == (n_all - 1, Rules(is_sigmoid, True, 1.8, 8, 4))


@pytest.mark.parametrize("changes, kind, words", [
    ({"attention__key_length_mla": None}, UnsupportedModel, "attn_kv_b in one piece"),
    ({"attention__temperature_scale": 0.1}, UnsupportedModel, "temperature for each position"),
    ({"attention__key_length": 192}, ModelFileError, "is 192; a compressed row of 512 and 64"),
    ({"attention__value_length": 128}, ModelFileError, "makes it 512"),
    ({"attention__head_count_kv": 4}, ModelFileError, "is 4; .* makes it 1"),
    ({"rope__dimension_count": 96}, ModelFileError, "less than the head size 96"),
    ({"leading_dense_block_count": 3}, ModelFileError, "allowed are 0 to 2"),
    ({"nextn_predict_layers": 4}, ModelFileError, "allowed are 0 to 3"),
    ({"expert_shared_count": None}, ModelFileError, "is missing"),
])  # fmt: skip
def test_what_cannot_run_is_refused(changes: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        read(**changes)
