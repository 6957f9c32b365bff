"""The target: a qwen35moe GGUF, dequantized, as a plain PyTorch forward pass.

Weights are a mapping from the part of a GGUF name after "blk.N." to a tensor in numpy order (the
reverse of ggml's), activations are [batch, time, ...]. Under autocast the products run in bfloat16;
norms, router and residual stream stay in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from moegraph.arch import open_model
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


def experts(w: Weights, x: Tensor, n_used: int) -> Tensor:
    """Return the sum of routed and shared experts for normed x [..., n_embd].

    Runs all experts side by side as one wide feed-forward layer and masks those not selected: at
    these widths that is faster than gathering rows, and it needs no special kernel.
    """
    with torch.autocast(x.device.type, enabled=False):
        probs = F.linear(x.float(), w["ffn_gate_inp.weight"].float()).softmax(-1)
    top, ids = probs.topk(n_used, -1)
    weight = torch.zeros_like(probs).scatter(-1, ids, top / top.sum(-1, keepdim=True))
    gate, up, down = (w[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    act = F.silu(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
    act = act.unflatten(-1, gate.shape[:2]) * weight.to(act.dtype)[..., None]
    out = F.linear(act.flatten(-2), down.permute(1, 0, 2).flatten(1)).float()
    hidden = F.silu(F.linear(x, w["ffn_gate_shexp.weight"]))
    shared = F.linear(hidden * F.linear(x, w["ffn_up_shexp.weight"]), w["ffn_down_shexp.weight"])
    gate_inp = F.linear(x, w["ffn_gate_inp_shexp.weight"].reshape(1, -1))
    return out + (shared * torch.sigmoid(gate_inp)).float()


@dataclass(frozen=True)
class Features:
    """What a drafter sees of the target for ids [batch, time].

    layers: the output of every layer [batch, time, n_embd], before the final norm, float32.
    hidden: the normed hidden state (llama.cpp's h_nextn), from which the head makes logits.
    """

    layers: list[Tensor]
    hidden: Tensor


class Target:
    """A model file's weights and its forward pass; computes no gradients."""

    def __init__(self, path: str | Path, device: str, dtype: torch.dtype = torch.float32) -> None:
        reader = gguf.GGUFReader(str(path))
        self.device, self.dtype = device, dtype
        weights: dict[str, Tensor] = {}
        for t in reader.tensors:
            x = torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type), np.float32))
            wide = x.ndim > 1 and "gate_inp" not in t.name and "conv1d" not in t.name
            weights[t.name] = x.to(device, dtype if wide else torch.float32)

        self.embd, self.head = weights["token_embd.weight"], weights["output.weight"]
        self.norm = weights["output_norm.weight"]
        with open_model(path) as file:
            assert isinstance(file.hparams, Qwen35Moe)
            self.hp: Qwen35Moe = file.hparams
        self.blocks: list[Weights] = [
            {k.removeprefix(f"blk.{il}."): w for k, w in weights.items() if f"blk.{il}." in k}
            for il in range(self.hp.n_layer)
        ]

    def autocast(self) -> torch.autocast:
        """Return the context in which products run in the weights' type."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=enabled)

    @torch.no_grad()
    def features(self, ids: Tensor) -> Features:
        """Run ids [batch, time], time a multiple of 64."""
        hp = self.hp
        pos = torch.arange(ids.shape[1], device=ids.device)[None]
        layers = []
        with self.autocast():
            x = F.embedding(ids, self.embd).float()
            for il, w in enumerate(self.blocks):
                y = rms_norm(x, w["attn_norm.weight"], hp.f_norm_rms_eps)
                if hp.is_recurrent(il):
                    x = x + self._deltanet(w, y)
                else:
                    q, k, v, gate = gated_qkv(w, y, pos, hp)
                    x = x + gated_out(w, attend(q, k, v, None), gate)
                y = rms_norm(x, w["post_attention_norm.weight"], hp.f_norm_rms_eps)
                x = x + experts(w, y, hp.n_expert_used)
                layers.append(x)
            return Features(layers, rms_norm(x, self.norm, hp.f_norm_rms_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits [..., n_vocab] in the product's type; gradients pass through."""
        with self.autocast():
            return F.linear(hidden, self.head)

    def _deltanet(self, w: Weights, x: Tensor) -> Tensor:
        """Return a DeltaNet mixer's output for normed x, from a zero state."""
        mixed = F.linear(x, w["attn_qkv.weight"])
        padded = F.pad(mixed.float(), (0, 0, w["ssm_conv1d.weight"].shape[1] - 1, 0))
        time, conv = x.shape[1], w["ssm_conv1d.weight"]
        mixed = F.silu(sum(padded[:, i : i + time] * conv[:, i] for i in range(conv.shape[1])))
        hp = self.hp
        widths = [n * hp.ssm_d_state for n in (hp.ssm_n_group, hp.ssm_n_group, hp.ssm_dt_rank)]
        q, k, v = (part.unflatten(-1, (-1, hp.ssm_d_state)) for part in mixed.split(widths, -1))
        # Value head h reads key head h % ssm_n_group.
        q, k = (part.repeat(1, 1, hp.ssm_dt_rank // hp.ssm_n_group, 1) for part in (q, k))
        beta = torch.sigmoid(F.linear(x, w["ssm_beta.weight"]).float())
        alpha = F.linear(x, w["ssm_alpha.weight"]).float()
        g = F.softplus(alpha + w["ssm_dt.bias"]) * w["ssm_a"]
        with torch.autocast(self.device, enabled=False):
            out, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        out = rms_norm(out, w["ssm_norm.weight"], self.hp.f_norm_rms_eps).flatten(-2)
        out = out * F.silu(F.linear(x, w["attn_gate.weight"]).float())
        return F.linear(out, w["ssm_out.weight"]).float()
