"""The target: a qwen35moe GGUF, dequantized, as a plain PyTorch forward pass and a fast generator.

target = Target("tiny.gguf", "cuda", torch.bfloat16)
features = target.features(ids)
text = target.generate(prompts, n_prompt, temperature)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from qwen_layers import (
    Weights,
    attend,
    experts,
    gated_out,
    gated_qkv,
    load_shape,
    rms_norm,
)
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "train_tiny"))
from delta import chunk_gated_delta_rule


@dataclass(frozen=True)
class Features:
    """What a drafter sees of the target for ids [batch, time].

    layers: the output of every layer [batch, time, n_embd], before the final norm, float32.
    hidden: the normed hidden state (llama.cpp's h_nextn), from which the head makes logits.
    """

    layers: list[Tensor]
    hidden: Tensor


@dataclass
class LayerState:
    """One layer's memory during generation: convolution and state, or keys and values."""

    first: Tensor
    second: Tensor


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

        def field(suffix: str) -> object:
            found = reader.get_field(f"qwen35moe.{suffix}")
            return None if found is None else found.contents()

        self.embd, self.head = weights["token_embd.weight"], weights["output.weight"]
        self.norm = weights["output_norm.weight"]
        self.hp = load_shape(field, self.embd.shape[0])
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
                y = rms_norm(x, w["attn_norm.weight"], hp.eps)
                if hp.is_recurrent(il):
                    x = x + self._deltanet(w, y)
                else:
                    q, k, v, gate = gated_qkv(w, y, pos, hp)
                    x = x + gated_out(w, attend(q, k, v, None), gate)
                y = rms_norm(x, w["post_attention_norm.weight"], hp.eps)
                x = x + experts(w, y, hp.n_expert_used)
                layers.append(x)
            return Features(layers, rms_norm(x, self.norm, hp.eps))

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
        q, k, v, g, beta = self._delta_inputs(w, x, mixed)
        with torch.autocast(self.device, enabled=False):
            out, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return self._delta_out(w, x, out)

    def _delta_inputs(self, w: Weights, x: Tensor, mixed: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v [..., head, d_state], log decay and beta [..., head]."""
        hp = self.hp
        key_dim = hp.n_k_heads * hp.d_state
        q, k, v = mixed.split([key_dim, key_dim, hp.n_v_heads * hp.d_state], -1)
        q, k, v = (t.unflatten(-1, (-1, hp.d_state)) for t in (q, k, v))
        # Value head h reads key head h % n_k_heads.
        repeat = (1,) * (q.ndim - 2) + (hp.n_v_heads // hp.n_k_heads, 1)
        beta = torch.sigmoid(F.linear(x, w["ssm_beta.weight"]).float())
        alpha = F.linear(x, w["ssm_alpha.weight"]).float()
        g = F.softplus(alpha + w["ssm_dt.bias"]) * w["ssm_a"]
        return q.repeat(repeat), k.repeat(repeat), v, g, beta

    def _delta_out(self, w: Weights, x: Tensor, out: Tensor) -> Tensor:
        """Return the output projection of the gated norm of out [..., head, d_state]."""
        z = F.linear(x, w["attn_gate.weight"]).float()
        out = rms_norm(out, w["ssm_norm.weight"], self.hp.eps).flatten(-2)
        return F.linear(out * F.silu(z), w["ssm_out.weight"]).float()

    @torch.no_grad()
    def generate(self, ids: Tensor, n_prompt: Tensor, temperature: Tensor) -> Tensor:
        """Return ids [batch, time] with everything after the first n_prompt [batch] replaced.

        temperature [batch]: 0 takes the likeliest token, else one is sampled.
        """
        batch, time = ids.shape
        ids = ids.clone()
        states = [self._state(il, batch, time) for il in range(self.hp.n_layer)]
        with self.autocast():
            for t in range(time - 1):
                logits = self._step(ids[:, t], t, states).float()
                noise = -torch.empty_like(logits).exponential_().clamp_(min=1e-20).log()
                drawn = (logits + temperature[:, None] * noise).argmax(-1)
                ids[:, t + 1] = torch.where(t + 1 < n_prompt, ids[:, t + 1], drawn)
        return ids

    def _state(self, il: int, batch: int, time: int) -> LayerState:
        hp = self.hp
        if hp.is_recurrent(il):
            conv = self.blocks[il]["ssm_conv1d.weight"]
            window = torch.zeros(batch, conv.shape[1], conv.shape[0], device=self.device)
            shape = (batch, hp.n_v_heads, hp.d_state, hp.d_state)
            return LayerState(window, torch.zeros(shape, device=self.device))
        cache = torch.zeros(
            2, batch, hp.n_head_kv, time, hp.head_dim, device=self.device, dtype=self.dtype
        )
        return LayerState(cache[0], cache[1])

    def _step(self, token: Tensor, t: int, states: list[LayerState]) -> Tensor:
        """Return the logits [batch, n_vocab] after token [batch] at position t."""
        hp = self.hp
        x = F.embedding(token, self.embd).float()
        for il, (w, state) in enumerate(zip(self.blocks, states)):
            y = rms_norm(x, w["attn_norm.weight"], hp.eps)
            mixer = self._delta_step if hp.is_recurrent(il) else self._attention_step
            x = x + mixer(w, y, t, state)
            y = rms_norm(x, w["post_attention_norm.weight"], hp.eps)
            x = x + experts(w, y, hp.n_expert_used)
        return F.linear(rms_norm(x, self.norm, hp.eps), self.head)

    def _delta_step(self, w: Weights, x: Tensor, t: int, state: LayerState) -> Tensor:
        window = torch.roll(state.first, -1, 1)
        window[:, -1] = F.linear(x, w["attn_qkv.weight"]).float()
        state.first = window
        mixed = F.silu((window * w["ssm_conv1d.weight"].T).sum(1))
        q, k, v, g, beta = self._delta_inputs(w, x, mixed)
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        with torch.autocast(self.device, enabled=False):
            memory = state.second.mul_(g.exp()[..., None, None])  # [batch, head, key, value]
            seen = (k[..., None, :] @ memory).squeeze(-2)
            delta = (v - seen) * beta[..., None]
            memory.flatten(0, 1).baddbmm_(
                k.flatten(0, 1)[..., None], delta.flatten(0, 1)[:, None, :]
            )
            out = (q[..., None, :] @ memory).squeeze(-2) * self.hp.d_state**-0.5
        return self._delta_out(w, x, out)

    def _attention_step(self, w: Weights, x: Tensor, t: int, state: LayerState) -> Tensor:
        pos = torch.full((1, 1), t, device=x.device)
        q, k, v, gate = gated_qkv(w, x[:, None], pos, self.hp)
        state.first[:, :, t], state.second[:, :, t] = k[:, 0], v[:, 0]
        keys, values = (y[:, :, : t + 1] for y in (state.first, state.second))
        q = q.view(x.shape[0], self.hp.n_head_kv, -1, self.hp.head_dim).to(keys.dtype)
        weight = (q @ keys.transpose(-1, -2) * self.hp.head_dim**-0.5).float().softmax(-1)
        out = (weight.to(values.dtype) @ values).flatten(1)
        return gated_out(w, out[:, None], gate)[:, 0]
