"""gpt-oss: what its keys give for each layer, what is refused, and where biases of experts are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from helpers.shared import model_writer
from modelgen.presets import PRESETS

from moegraph.arch import open_model
from moegraph.arch.gptoss import GptOss
from moegraph.arch.summary import summarize
from moegraph.errors import ModelFileError, UnsupportedModel
from moegraph.gguf.metadata import Metadata
from moegraph.resident.layout import Packing, expert_tensors, is_dense


def read(preset: str = "gptoss", **changes: Any) -> GptOss:
    """Read the keys of a preset with some replaced; None: dropped."""
    keys = PRESETS[preset].shape.metadata() | {"general.architecture": "gpt-oss"}
    keys |= {f"gpt-oss.{name.replace('__', '.')}": value for name, value in changes.items()}
    values = {k: np.array(v) if isinstance(v, list) else v for k, v in keys.items()}
    kept = {k: v for k, v in values.items() if v is not None}
    return GptOss.read(Metadata("a.gguf", kept, {}), 1024)


def test_the_shape_of_gpt_oss_20b_is_read() -> None:
    hp = read("gpt-oss-20b")
    assert (hp.n_layer, hp.n_expert, hp.n_expert_used, hp.n_ff_exp) == (24, 32, 4, 2880)
    assert [hp.layer(il).window for il in range(24)] == [128, None] * 12
    assert [hp.layer(il).mixer for il in (0, 1)] == ["attention in a window", "attention"]
    assert {hp.layer(il).kv for il in range(24)} == {(512, 512)}
    assert all(hp.layer(il).has_sinks for il in range(24))
    assert (hp.rope_freq_scale, hp.n_ctx_orig, hp.attention_scale) == (1 / 32, 4096, 1 / 8)


@pytest.mark.parametrize("pattern, windows", [
    (None, [1, 0, 1, 0]), (3, [1, 1, 0, 1]), (0, [1] * 4), (1, [0] * 4),
    ([0, 1, 1, 0], [0, 1, 1, 0]),
])  # fmt: skip
def test_the_pattern_says_which_layers_have_a_window(pattern: Any, windows: list[int]) -> None:
    hp = read(attention__sliding_window_pattern=pattern)
    assert [bool(hp.layer(il).window) for il in range(4)] == windows
    assert hp.window == (32 if any(windows) else None)


@pytest.mark.parametrize("changes, kind, words", [
    ({"attention__sliding_window": 0}, ModelFileError, "allowed are 1 to"),
    ({"attention__sliding_window": None}, ModelFileError, "is missing"),
    ({"attention__sliding_window_pattern": [1, 0]}, ModelFileError, "has 2 elements; expected 4"),
    ({"rope__dimension_count": 32}, ModelFileError, "rotates all 64 dimensions"),
    ({"rope__freq_base_swa": 1e4}, UnsupportedModel, "moegraph needs them equal"),
    ({"attention__key_length_swa": 32}, UnsupportedModel, "key_length_swa is not gpt-oss"),
    ({"attention__value_length_swa": 32}, UnsupportedModel, "moegraph needs heads of one size"),
    ({"rope__dimension_count_swa": 32}, UnsupportedModel, "moegraph needs heads of one size"),
    ({"rope__scaling__type": "none"}, UnsupportedModel, "by which llama.cpp scales layers with a"),
])  # fmt: skip
def test_what_cannot_run_is_refused(changes: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        read(**changes)


def test_biases_of_experts_are_in_their_slots(tmp_path: Path) -> None:
    with open_model(model_writer(tmp_path, 1)("gptoss")) as model:
        parts = expert_tensors(model, 1)
        assert list(parts) == ["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
        sizes = Packing.of(parts).sizes
        assert (sizes["gate_bias"], sizes["up_bias"], sizes["down_bias"]) == (256, 256, 1024)
        assert not any(is_dense(info.name, range(4)) for info in parts.values())
        assert is_dense("blk.1.ffn_gate_inp.bias", range(4))
        layer = summarize(model.hparams, model.tensors).layers[1]
        assert layer.bytes_per_expert == sum(sizes.values())
        assert layer.expert_types[0] == ("ffn_gate_exps", "MXFP4") and len(layer.expert_types) == 3
