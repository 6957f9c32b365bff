"""The target: a qwen35moe GGUF, dequantized, as a plain PyTorch forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from qwen_layers import Weights, attend, experts, gated_out, gated_qkv, rms_norm
from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

from moegraph.arch import open_model
from moegraph.arch.qwen35moe import Qwen35Moe


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
