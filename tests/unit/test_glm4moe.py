"""glm4moe: what its keys give, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.presets import PRESETS

from moegraph.arch.blocks.router import Rules
from moegraph.arch.glm4moe import Glm4Moe
from moegraph.errors import ModelFileError, UnsupportedModel
from moegraph.gguf.metadata import Metadata


def read(preset: str = "glm4moe", **changes: Any) -> Glm4Moe:
    """Read the keys of a preset with some replaced; None: dropped."""
    keys = PRESETS[preset].shape.metadata() | {"general.architecture": "glm4moe"}
    keys |= {f"glm4moe.{name.replace('__', '.')}": value for name, value in changes.items()}
    values = {k: np.array(v) if isinstance(v, list) else v for k, v in keys.items()}
    kept = {k: v for k, v in values.items() if v is not None}
    return Glm4Moe.read(Metadata("a.gguf", kept, {}), 1024)


def test_the_first_layers_are_dense_and_the_prediction_block_is_not() -> None:
    hp = read("glm-4.5-air")
    assert (hp.n_layer, hp.n_layer_nextn, hp.n_ff_exp, hp.n_ff_shexp) == (46, 1, 1408, 1408)
    assert [hp.layer(il).n_ff for il in (0, 1, 45, 46)] == [10944, 0, 0, 0]
    assert hp.routed_layers == list(range(1, 46))
    dense, routed = hp.layer_tensors(0, False), hp.layer_tensors(1, False)
    assert "ffn_down.weight" in dense and "exp_probs_b.bias" not in dense
    assert routed["exp_probs_b.bias"].required and not routed["attn_q.bias"].required
    assert read(leading_dense_block_count=0).routed_layers == [0, 1, 2, 3]
    assert read(expert_shared_count=3).n_ff_shexp == 3 * 64


def test_rules_of_the_router() -> None:
    assert read().rules == Rules(True, True, 1.5)
    assert read("glm4moe-groups").rules == Rules(True, False, 0.0, 4, 2)
    missing = dict.fromkeys(("expert_gating_func", "expert_weights_norm", "expert_weights_scale"))
    assert read(**missing).rules == Rules(True, False, 0.0)
    assert not read(expert_gating_func=1).rules.is_sigmoid


@pytest.mark.parametrize("sections", [[8, 4, 4, 0], [6, 6, 4, 4], [0, 3, 3, 9], [0, 0, 0, 0]])
def test_sections_that_leave_text_its_position_are_plain_rope(sections: list[int]) -> None:
    assert read(rope__dimension_sections=sections).n_rot == 32


@pytest.mark.parametrize("changes, kind, words", [
    ({"rope__dimension_sections": [4, 4, 4, 4]}, UnsupportedModel, "no fourth component"),
    ({"rope__dimension_sections": [40, 30, 0, 0]}, UnsupportedModel, "no fourth component"),
    ({"expert_gating_func": 3}, UnsupportedModel, "is 3; moegraph runs 1 .softmax. and 2"),
    ({"expert_group_count": 5, "expert_group_used_count": 2}, ModelFileError, "is 5, which does"),
    ({"expert_group_count": 32, "expert_group_used_count": 2}, ModelFileError, "is 32, which"),
    ({"expert_group_count": 4, "expert_group_used_count": 4}, ModelFileError, "allowed are 1 to 3"),
    ({"expert_group_count": 4}, ModelFileError, "expert_group_used_count is missing"),
    ({"leading_dense_block_count": 4}, ModelFileError, "allowed are 0 to 3"),
    ({"feed_forward_length": None}, ModelFileError, "feed_forward_length is missing"),
    ({"nextn_predict_layers": 5}, ModelFileError, "allowed are 0 to 4"),
    ({"expert_shared_count": 0}, ModelFileError, "allowed are 1 to"),
])  # fmt: skip
def test_what_cannot_run_is_refused(changes: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        read(**changes)
