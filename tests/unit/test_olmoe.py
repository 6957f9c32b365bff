"""olmoe: what its keys give, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.presets import PRESETS

from moegraph.arch.olmoe import Olmoe
from moegraph.arch.qwen3moe import Qwen3Moe
from moegraph.errors import ModelFileError
from moegraph.gguf.metadata import Metadata


def read(preset: str = "olmoe", **changes: Any) -> Qwen3Moe:
    """Read the keys of a preset with some replaced; None: dropped."""
    keys = PRESETS[preset].shape.metadata() | {"general.architecture": "olmoe"}
    keys |= {f"olmoe.{name.replace('__', '.')}": value for name, value in changes.items()}
    kept = {k: v for k, v in keys.items() if v is not None}
    return Olmoe.read(Metadata("a.gguf", kept, {}), 1024)


def test_norms_of_q_and_k_are_over_all_heads() -> None:
    # converters write neither of these keys
    missing = {"attention__key_length": None, "rope__dimension_count": None}
    hp = read("olmoe-1b-7b", **missing)
    assert (hp.n_embd_head_k, hp.n_rot, hp.n_ff_exp, hp.n_expert_used) == (128, 128, 1024, 8)
    tensors = hp.layer_tensors(0, merged=True)
    assert tensors["attn_q_norm.weight"].ne == tensors["attn_k_norm.weight"].ne == (2048,)
    assert "ffn_gate_up_exps.weight" not in tensors


def test_only_feed_forward_length_is_the_width_of_experts() -> None:
    assert read(expert_feed_forward_length=32).n_ff_exp == 64


@pytest.mark.parametrize("changes, words", [
    ({"attention__head_count_kv": 2}, "is 2; this architecture has one for each of 4 heads"),
    ({"attention__key_length": 32, "attention__value_length": 32, "rope__dimension_count": 32},
     "is 32; 4 heads must have 256 elements"),
    ({"rope__dimension_count": 32}, "rotates all 64 dimensions"),
    ({"feed_forward_length": None}, "is missing"),
    ({"feed_forward_length": None, "expert_feed_forward_length": 64}, "is missing"),
])  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        read(**changes)
