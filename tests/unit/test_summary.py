"""Sizes of a model against sums done by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers.ggufbytes import Q, Shape, Tensor, add, edit, model_file, model_tensors

from moegraph.arch import open_model
from moegraph.arch.base import Architecture
from moegraph.arch.model import expected_tensors
from moegraph.arch.qwen35moe import Qwen35Moe
from moegraph.arch.summary import kv_bytes, state_bytes, summarize
from moegraph.errors import ConfigError
from moegraph.gguf.scan import TensorInfo
from moegraph.units import MiB

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")


def load(
    tmp_path: Path, shape: Shape, **kwargs: object
) -> tuple[Architecture, dict[str, TensorInfo]]:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file(shape, **kwargs).build())  # type: ignore[arg-type]
    with open_model(path) as model:
        return model.hparams, model.tensors


def params(tensor: Tensor) -> int:
    return math.prod(tensor.ne)


@pytest.mark.parametrize("shape", [Shape(), Shape(merged=True, tied=True, n_nextn=1)])
def test_totals_are_the_sums_over_the_tensors(tmp_path: Path, shape: Shape) -> None:
    hp, tensors = load(tmp_path, shape)
    s = summarize(hp, tensors)
    written = model_tensors(shape)
    sizes = {str(t.name): len(t.payload()) for t in written}
    nextn = {n: size for n, size in sizes.items() if n.startswith("blk.4.")}
    experts = {
        n: size
        for n, size in sizes.items()
        if n not in nextn and any(f".{e}." in n for e in EXPERTS)
    }
    assert s.n_bytes == sum(sizes.values())
    assert s.unused_bytes == sum(nextn.values())
    assert s.expert_bytes == sum(experts.values())
    assert s.dense_bytes == s.n_bytes - s.unused_bytes - s.expert_bytes
    assert s.n_params == sum(params(t) for t in written)
    assert sum(t.n_bytes for t in s.by_type) == s.n_bytes
    assert sum(t.n_tensors for t in s.by_type) == len(written)


def test_layers_tell_their_kind_types_and_bytes_per_expert(tmp_path: Path) -> None:
    shape = Shape(expert_type=Q.Q4_0)
    hp, tensors = load(tmp_path, shape, tensors=edit("blk.2.ffn_down_exps.weight", kind=Q.Q8_0))
    s = summarize(hp, tensors)
    one = 32 * 32 // 32 * 18
    assert [layer.recurrent for layer in s.layers] == [True, True, True, False]
    sizes = [layer.bytes_per_expert for layer in s.layers]
    assert sizes == [3 * one, 3 * one, 2 * one + 1088, 3 * one]
    assert dict(s.layers[2].expert_types) == {
        "ffn_gate_exps": "Q4_0",
        "ffn_up_exps": "Q4_0",
        "ffn_down_exps": "Q8_0",
    }
    assert s.bytes_per_expert == 2 * one + 1088
    assert [t.type for t in s.by_type] == ["F32", "Q4_0", "Q8_0"]


def test_active_parameters_count_the_chosen_experts_and_one_embedding_row(tmp_path: Path) -> None:
    hp, tensors = load(tmp_path, Shape())
    want = 0
    for t in model_tensors(Shape()):
        if any(f".{e}." in str(t.name) for e in EXPERTS):
            want += params(t) * 2 // 8
        elif t.name == "token_embd.weight":
            want += 32
        else:
            want += params(t)
    assert summarize(hp, tensors).active_params == want


def test_unknown_tensors_are_unused(tmp_path: Path) -> None:
    extra = add(Tensor("blk.0.mystery.weight", (5,)))
    assert summarize(*load(tmp_path, Shape(), tensors=extra)).unused_bytes == 20


def big() -> tuple[Architecture, dict[str, TensorInfo]]:
    """Return the 35B-A3B shape with Q4_K experts, without writing 20 GB."""
    hp = Qwen35Moe(
        n_vocab=248_320,
        n_embd=2048,
        n_layer=40,
        n_layer_nextn=0,
        n_ctx_train=262_144,
        n_head=16,
        n_head_kv=2,
        n_embd_head_k=256,
        n_embd_head_v=256,
        n_rot=64,
        n_ff_exp=512,
        n_ff_shexp=512,
        n_expert=256,
        n_expert_used=8,
        f_norm_rms_eps=1e-6,
        rope_freq_base=1e7,
        rope_freq_scale=1.0,
        rope_ext_factor=0.0,
        rope_attn_factor=1.0,
        rope_beta_fast=32.0,
        rope_beta_slow=1.0,
        n_ctx_orig=262_144,
        ssm_d_conv=4,
        ssm_d_inner=4096,
        ssm_d_state=128,
        ssm_dt_rank=32,
        ssm_n_group=16,
        recurrent=tuple((il + 1) % 4 != 0 for il in range(40)),
    )
    tensors = {}
    for name, spec in expected_tensors(hp, frozenset()).items():
        n = math.prod(spec.ne)
        kind = Q.Q4_K if "_exps" in name else Q.Q8_0 if len(spec.types) > 1 else Q.F32
        nbytes = {Q.Q4_K: n // 256 * 144, Q.Q8_0: n // 32 * 34, Q.F32: 4 * n}[kind]
        tensors[name] = TensorInfo(name, kind, spec.ne4, len(spec.ne), nbytes, 0, 0)
    return hp, tensors


def test_the_35b_shape_has_the_published_sizes() -> None:
    hp, tensors = big()
    s = summarize(hp, tensors)
    assert round(s.n_params / 1e9) == 35 and round(s.active_params / 1e9) == 3
    assert s.bytes_per_expert == 3 * 2048 * 512 // 256 * 144
    attention, delta = hp.layer(3), hp.layer(0)
    assert kv_bytes(attention) == 2 * (2 * 256) * 2 and kv_bytes(delta) == 0
    assert kv_bytes(attention, "q8_0", "q4_0") == (512 // 32) * (34 + 18)
    # 96 KiB of convolution and 2 MiB of DeltaNet state.
    assert state_bytes(delta) == 96 * 1024 + 2 * MiB and state_bytes(attention) == 0
    assert state_bytes(delta, 4) == 4 * state_bytes(delta)


def test_cache_types_that_cannot_hold_a_row_are_refused(tmp_path: Path) -> None:
    hp, _ = load(tmp_path, Shape(head_dim=8, n_rot=8))
    with pytest.raises(ConfigError, match="type_k is 'q8_0', whose blocks of 32"):
        kv_bytes(hp.layer(3), "q8_0")
    with pytest.raises(ConfigError, match="type_v is 'bf17'; allowed: f16"):
        kv_bytes(hp.layer(3), "f16", "bf17")
