"""Sizes of a model against sums done by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers.ggufbytes import Q, Shape, Tensor, edit, model_file, model_tensors

from moegraph.arch import open_model
from moegraph.arch.base import Architecture
from moegraph.arch.summary import kv_bytes, summarize
from moegraph.errors import ConfigError
from moegraph.gguf.scan import TensorInfo

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


def test_cache_types_that_cannot_hold_a_row_are_refused(tmp_path: Path) -> None:
    hp, _ = load(tmp_path, Shape(head_dim=8, n_rot=8))
    with pytest.raises(ConfigError, match="type_k is 'q8_0', whose blocks of 32"):
        kv_bytes(hp.layer(3), "q8_0")
    with pytest.raises(ConfigError, match="type_v is 'bf17'; allowed: f16"):
        kv_bytes(hp.layer(3), "f16", "bf17")
