"""Names and layouts: transformers' parameters against GGUF's tensors, for both small models.

Shapes here are numpy order (slowest axis first), the reverse of ggml's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from shape import SHAPE, Shape

NORM, DECAY, PLAIN = "norm", "decay", "plain"


@dataclass(frozen=True)
class Entry:
    """The relation of one GGUF tensor to one transformers parameter.

    part: which half of the parameter's second axis (fused gate and up projections), or None.
    turned: matrices lie [expert, in, out], with gate and up in turn on the last axis.
    v_axis: the axis along which value heads lie, or None; v_offset: where they begin on it;
    v_dim: entries a head. Transformers groups value heads by key head (head j reads key head
    j // r); ggml wants them tiled (head h reads key head h % n_k_heads).
    """

    gguf: str
    param: str
    kind: str = PLAIN
    part: int | None = None
    v_axis: int | None = None
    v_offset: int = 0
    v_dim: int = 1
    squeeze: bool = False
    turned: bool = False


def reorder_heads(x: np.ndarray, entry: Entry) -> np.ndarray:
    """Return x with its value heads, which are in grouped order, in tiled order."""
    head, repeat = np.arange(SHAPE.n_v_heads), SHAPE.n_v_heads // SHAPE.n_k_heads
    order = (head % SHAPE.n_k_heads) * repeat + head // SHAPE.n_k_heads
    rows = (order[:, None] * entry.v_dim + np.arange(entry.v_dim)).ravel() + entry.v_offset
    index = np.concatenate([np.arange(entry.v_offset), rows])
    return np.take(x, index, axis=entry.v_axis)


def to_gguf(entry: Entry, param: np.ndarray) -> np.ndarray:
    """Return the float32 content of a GGUF tensor from its transformers parameter."""
    x = param.astype(np.float32)
    if entry.turned:
        x = x if entry.part is None else x[..., entry.part :: 2]
        x = x.swapaxes(1, -1)  # leaves a bias as it is
    elif entry.part is not None:
        x = np.split(x, 2, axis=1)[entry.part]
    if entry.squeeze:
        x = x.squeeze(1) if x.ndim == 3 else x.squeeze(0)
    if entry.v_axis is not None:
        x = reorder_heads(x, entry)
    if entry.kind == NORM:
        x = x + 1.0
    elif entry.kind == DECAY:
        x = -np.exp(x)
    return np.ascontiguousarray(x, np.float32)


_HEAD = SHAPE.ssm_d_state
_V_ROWS: dict[str, Any] = {"v_axis": 0, "v_offset": 2 * SHAPE.key_dim, "v_dim": _HEAD}
# Of a layer: what all have, what its mixer has, and its experts.
_NORMS = [
    Entry("attn_norm.weight", "input_layernorm.weight", NORM),
    Entry("post_attention_norm.weight", "post_attention_layernorm.weight", NORM),
]
_ATTENTION = [
    Entry("attn_q.weight", "self_attn.q_proj.weight"),
    Entry("attn_k.weight", "self_attn.k_proj.weight"),
    Entry("attn_v.weight", "self_attn.v_proj.weight"),
    Entry("attn_output.weight", "self_attn.o_proj.weight"),
    Entry("attn_q_norm.weight", "self_attn.q_norm.weight", NORM),
    Entry("attn_k_norm.weight", "self_attn.k_norm.weight", NORM),
]
_DELTANET = [
    Entry("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", **_V_ROWS),
    Entry("attn_gate.weight", "linear_attn.in_proj_z.weight", v_axis=0, v_dim=_HEAD),
    Entry("ssm_conv1d.weight", "linear_attn.conv1d.weight", squeeze=True, **_V_ROWS),
    Entry("ssm_dt.bias", "linear_attn.dt_bias", v_axis=0),
    Entry("ssm_a", "linear_attn.A_log", DECAY, v_axis=0),
    Entry("ssm_beta.weight", "linear_attn.in_proj_b.weight", v_axis=0),
    Entry("ssm_alpha.weight", "linear_attn.in_proj_a.weight", v_axis=0),
    Entry("ssm_norm.weight", "linear_attn.norm.weight"),
    Entry("ssm_out.weight", "linear_attn.out_proj.weight", v_axis=1, v_dim=_HEAD),
]
_EXPERTS = [
    Entry("ffn_gate_inp.weight", "mlp.gate.weight"),
    Entry("ffn_gate_exps.weight", "mlp.experts.gate_up_proj", part=0),
    Entry("ffn_up_exps.weight", "mlp.experts.gate_up_proj", part=1),
    Entry("ffn_down_exps.weight", "mlp.experts.down_proj"),
    Entry("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", squeeze=True),
    Entry("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    Entry("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    Entry("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
]
_GPT_OSS = [
    Entry("attn_norm.weight", "input_layernorm.weight"),
    Entry("post_attention_norm.weight", "post_attention_layernorm.weight"),
    Entry("attn_sinks.weight", "self_attn.sinks"),
    *[
        Entry(f"{ours}.{kind}", f"{theirs}.{kind}")
        for ours, theirs in (
            *((f"attn_{part}", f"self_attn.{part}_proj") for part in "qkv"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate_inp", "mlp.router"),
        )
        for kind in ("weight", "bias")
    ],
    *[
        Entry(f"ffn_{ours}_exps.{kind}", f"mlp.experts.{theirs}{end}", part=part, turned=True)
        for ours, theirs, part in (
            ("gate", "gate_up_proj", 0),
            ("up", "gate_up_proj", 1),
            ("down", "down_proj", None),
        )
        for kind, end in (("weight", ""), ("bias", "_bias"))
    ],
]


def entries(shape: Shape) -> Iterator[Entry]:
    """Yield every tensor of a model, in file order."""
    is_oss = shape.arch == "gpt-oss"
    yield Entry("token_embd.weight", "model.embed_tokens.weight")
    yield Entry("output_norm.weight", "model.norm.weight", PLAIN if is_oss else NORM)
    yield Entry("output.weight", "lm_head.weight")
    for il in range(shape.n_layer):
        mixer = _DELTANET if shape.is_recurrent(il) else _ATTENTION
        for one in _GPT_OSS if is_oss else (*_NORMS, *mixer, *_EXPERTS):
            yield replace(one, gguf=f"blk.{il}.{one.gguf}", param=f"model.layers.{il}.{one.param}")
