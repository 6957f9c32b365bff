"""Parts of qwen35moe layers in PyTorch, on weights that keep their GGUF names and layouts.

Weights are a mapping from the part of a GGUF name after "blk.N." to a tensor in numpy order (the
reverse of ggml's), activations are [batch, time, ...]. Under autocast the products run in bfloat16;
norms, router and residual stream stay in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from moegraph.arch.qwen35moe import Qwen35Moe

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rope(x: Tensor, pos: Tensor, n_rot: int, base: float) -> Tensor:
    """Rotate the first n_rot entries of heads x [batch, time, head, dim]; pos [batch or 1, time].

    Entry i is paired with entry i + n_rot / 2, which is what ggml calls NEOX.
    """
    half = n_rot // 2
    inv = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (pos.float()[..., None] * inv)[:, :, None]
    cos, sin = angle.cos(), angle.sin()
    x = x.float()
    a, b, rest = x[..., :half], x[..., half:n_rot], x[..., n_rot:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention [batch, time, n_head * dim] of q over k and v [batch, keys, n_head_kv, dim].

    mask: True where a query may see a key, broadcast to [batch, n_head, time, keys]; None: causal.
    """
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, 2).transpose(1, 2) for x in (k, v))
    q = q.transpose(1, 2)
    dtype = torch.bfloat16 if torch.is_autocast_enabled(q.device.type) else torch.float32
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(2)


def gated_qkv(w: Weights, x: Tensor, pos: Tensor, hp: Qwen35Moe) -> tuple[Tensor, ...]:
    """Return rotated q, k, and v [batch, time, heads, dim], and the output gate, for normed x."""
    batch, time = x.shape[:2]
    q, gate = F.linear(x, w["attn_q.weight"]).view(batch, time, hp.n_head, -1).chunk(2, -1)
    k = F.linear(x, w["attn_k.weight"]).view(batch, time, hp.n_head_kv, hp.n_embd_head_k)
    v = F.linear(x, w["attn_v.weight"]).view_as(k)
    q = rope(
        rms_norm(q, w["attn_q_norm.weight"], hp.f_norm_rms_eps), pos, hp.n_rot, hp.rope_freq_base
    )
    k = rope(
        rms_norm(k, w["attn_k_norm.weight"], hp.f_norm_rms_eps), pos, hp.n_rot, hp.rope_freq_base
    )
    return q, k, v, gate.flatten(2)


def gated_out(w: Weights, attended: Tensor, gate: Tensor) -> Tensor:
    """Return the output projection of gated attention."""
    return F.linear(attended * torch.sigmoid(gate), w["attn_output.weight"]).float()


def routing(w: Weights, x: Tensor, n_used: int) -> Tensor:
    """Return the weight of every expert [..., n_expert], zero for those not selected."""
    with torch.autocast(x.device.type, enabled=False):
        probs = F.linear(x.float(), w["ffn_gate_inp.weight"].float()).softmax(-1)
    top, ids = probs.topk(n_used, -1)
    return torch.zeros_like(probs).scatter(-1, ids, top / top.sum(-1, keepdim=True))


def experts(w: Weights, x: Tensor, n_used: int) -> Tensor:
    """Return the sum of routed and shared experts for normed x [..., n_embd].

    Runs all experts side by side as one wide feed-forward layer and masks those not selected: at
    these widths that is faster than gathering rows, and it needs no special kernel.
    """
    weight = routing(w, x, n_used)
    gate, up, down = (w[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    act = F.silu(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
    act = act.unflatten(-1, gate.shape[:2]) * weight.to(act.dtype)[..., None]
    out = F.linear(act.flatten(-2), down.permute(1, 0, 2).flatten(1)).float()
    hidden = F.silu(F.linear(x, w["ffn_gate_shexp.weight"]))
    shared = F.linear(hidden * F.linear(x, w["ffn_up_shexp.weight"]), w["ffn_down_shexp.weight"])
    gate_inp = F.linear(x, w["ffn_gate_inp_shexp.weight"].reshape(1, -1))
    return out + (shared * torch.sigmoid(gate_inp)).float()
