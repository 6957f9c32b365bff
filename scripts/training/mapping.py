"""Names and layouts: transformers' qwen3_5_moe parameters against GGUF's qwen35moe tensors.

Shapes here are numpy order (slowest axis first), the reverse of ggml's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from shape import SHAPE

NORM, DECAY, PLAIN = "norm", "decay", "plain"


@dataclass(frozen=True)
class Entry:
    """The relation of one GGUF tensor to one transformers parameter.

    part: which half of the parameter's second axis (fused gate and up projections), or None.
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


def tiled_order() -> np.ndarray:
    """Return, for each tiled value head, the index of the same head in grouped order."""
    repeat = SHAPE.n_v_heads // SHAPE.n_k_heads
    head = np.arange(SHAPE.n_v_heads)
    return (head % SHAPE.n_k_heads) * repeat + head // SHAPE.n_k_heads


def reorder_heads(x: np.ndarray, entry: Entry) -> np.ndarray:
    """Return x with its value heads in tiled order."""
    rows = (tiled_order()[:, None] * entry.v_dim + np.arange(entry.v_dim)).ravel() + entry.v_offset
    index = np.concatenate([np.arange(entry.v_offset), rows])
    return np.take(x, index, axis=entry.v_axis)


def to_gguf(entry: Entry, param: np.ndarray) -> np.ndarray:
    """Return the float32 content of a GGUF tensor from its transformers parameter."""
    x = param.astype(np.float32)
    if entry.part is not None:
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


def attention_entries(il: int) -> list[Entry]:
    """Return the entries of a full-attention mixer."""
    blk, par = f"blk.{il}.", f"model.layers.{il}.self_attn."
    names = (
        ("attn_q", "q_proj"),
        ("attn_k", "k_proj"),
        ("attn_v", "v_proj"),
        ("attn_output", "o_proj"),
    )
    entries = [Entry(f"{blk}{g}.weight", f"{par}{p}.weight") for g, p in names]
    return entries + [
        Entry(f"{blk}attn_{x}_norm.weight", f"{par}{x}_norm.weight", NORM) for x in "qk"
    ]


def deltanet_entries(il: int) -> list[Entry]:
    """Return the entries of a gated-DeltaNet mixer."""
    blk, par, dim = f"blk.{il}.", f"model.layers.{il}.linear_attn.", SHAPE.ssm_d_state
    v_rows: dict[str, Any] = {"v_axis": 0, "v_offset": 2 * SHAPE.key_dim, "v_dim": dim}
    return [
        Entry(f"{blk}attn_qkv.weight", f"{par}in_proj_qkv.weight", **v_rows),
        Entry(f"{blk}attn_gate.weight", f"{par}in_proj_z.weight", v_axis=0, v_dim=dim),
        Entry(f"{blk}ssm_conv1d.weight", f"{par}conv1d.weight", squeeze=True, **v_rows),
        Entry(f"{blk}ssm_dt.bias", f"{par}dt_bias", v_axis=0),
        Entry(f"{blk}ssm_a", f"{par}A_log", DECAY, v_axis=0),
        Entry(f"{blk}ssm_beta.weight", f"{par}in_proj_b.weight", v_axis=0),
        Entry(f"{blk}ssm_alpha.weight", f"{par}in_proj_a.weight", v_axis=0),
        Entry(f"{blk}ssm_norm.weight", f"{par}norm.weight"),
        Entry(f"{blk}ssm_out.weight", f"{par}out_proj.weight", v_axis=1, v_dim=dim),
    ]


def moe_entries(il: int) -> list[Entry]:
    """Return the entries of the routed and the shared experts."""
    blk, par = f"blk.{il}.", f"model.layers.{il}.mlp."
    shared = f"{par}shared_expert."
    return [
        Entry(f"{blk}ffn_gate_inp.weight", f"{par}gate.weight"),
        Entry(f"{blk}ffn_gate_exps.weight", f"{par}experts.gate_up_proj", part=0),
        Entry(f"{blk}ffn_up_exps.weight", f"{par}experts.gate_up_proj", part=1),
        Entry(f"{blk}ffn_down_exps.weight", f"{par}experts.down_proj"),
        Entry(f"{blk}ffn_gate_inp_shexp.weight", f"{par}shared_expert_gate.weight", squeeze=True),
        Entry(f"{blk}ffn_gate_shexp.weight", f"{shared}gate_proj.weight"),
        Entry(f"{blk}ffn_up_shexp.weight", f"{shared}up_proj.weight"),
        Entry(f"{blk}ffn_down_shexp.weight", f"{shared}down_proj.weight"),
    ]


def entries() -> list[Entry]:
    """Return every tensor of the model, in file order."""
    result = [
        Entry("token_embd.weight", "model.embed_tokens.weight"),
        Entry("output_norm.weight", "model.norm.weight", NORM),
        Entry("output.weight", "lm_head.weight"),
    ]
    for il in range(SHAPE.n_layer):
        blk, par = f"blk.{il}.", f"model.layers.{il}."
        result += [
            Entry(f"{blk}attn_norm.weight", f"{par}input_layernorm.weight", NORM),
            Entry(
                f"{blk}post_attention_norm.weight", f"{par}post_attention_layernorm.weight", NORM
            ),
        ]
        result += deltanet_entries(il) if SHAPE.is_recurrent(il) else attention_entries(il)
        result += moe_entries(il)
    return result
