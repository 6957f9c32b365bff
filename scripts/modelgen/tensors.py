"""The tensor list of a model: names, shapes, types and how each is filled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .blocks import TYPES
from .calibrate import Calibration
from .gguf_write import TensorEntry
from .presets import Mix
from .shape import Shape


@dataclass(frozen=True)
class Tensor:
    """One tensor. `fill` names the recipe in fill.py; `std` is the deviation of its weights."""

    name: str
    ne: tuple[int, ...]
    type: str
    fill: str
    std: float = 1.0
    il: int = 0

    @property
    def row_bytes(self) -> int:
        return TYPES[self.type].row_bytes(self.ne[0])

    @property
    def n_rows(self) -> int:
        return math.prod(self.ne[1:])

    def entry(self) -> TensorEntry:
        """Return the row of the GGUF tensor table."""
        return TensorEntry(
            self.name, self.ne, TYPES[self.type].ggml_id, self.n_rows * self.row_bytes
        )


class Plan:
    """Builds the list of tensors of one model."""

    def __init__(self, shape: Shape, mix: Mix, cal: Calibration) -> None:
        self.shape, self.mix, self.cal = shape, mix, cal

    def tensors(self) -> list[Tensor]:
        """Return every tensor in file order."""
        s, cal = self.shape, self.cal
        out = [
            Tensor(
                "token_embd.weight", (s.n_embd, s.n_vocab), self.mix.type_of("embd", None), "embd"
            )
        ]
        out.append(Tensor("output_norm.weight", (s.n_embd,), "F32", "output_norm"))
        if not s.tied:
            head = self.mix.type_of("head", None)
            std = cal.logit_std / math.sqrt(s.n_embd)
            out.append(Tensor("output.weight", (s.n_embd, s.n_vocab), head, "pool", std))
        if s.arch == "gemma4":
            out.append(Tensor("rope_freqs.weight", (s.head_dim // 2,), "F32", "rope_freqs"))
        for il in range(s.n_layer_all):
            out += self._layer(il)
        return out

    def _matrix(self, il: int, name: str, ne: tuple[int, ...], cls: str, gain: float) -> Tensor:
        """Return a pooled matrix whose output has `gain` times the rms of its input."""
        std = gain / math.sqrt(ne[0])
        return Tensor(f"blk.{il}.{name}.weight", ne, self.mix.type_of(cls, il), "pool", std, il)

    def _vector(self, il: int, name: str, n: int, fill: str, std: float = 1.0) -> Tensor:
        return Tensor(f"blk.{il}.{name}", (n,), "F32", fill, std, il)

    def _layer(self, il: int) -> Iterator[Tensor]:
        if self.shape.arch == "gemma4":
            yield from self._gemma4(il)
            return
        n_embd = self.shape.n_embd
        norm = "mixer_norm" if self.shape.is_recurrent(il) else "norm"
        yield self._vector(il, "attn_norm.weight", n_embd, norm)
        is_post = self.shape.is_qwen35 or self.shape.arch in ("glm4moe", "gpt-oss")
        ffn_norm = "post_attention_norm" if is_post else "ffn_norm"
        yield self._vector(il, f"{ffn_norm}.weight", n_embd, "block_norm")
        yield from self._deltanet(il) if self.shape.is_recurrent(il) else self._attention(il)
        yield from self._ffn(il)
        if il >= self.shape.n_layer:
            yield self._matrix(il, "nextn.eh_proj", (2 * n_embd, n_embd), "nextn", 1.0)
            yield self._vector(il, "nextn.enorm.weight", n_embd, "norm")
            yield self._vector(il, "nextn.hnorm.weight", n_embd, "norm")
            yield self._vector(il, "nextn.shared_head_norm.weight", n_embd, "norm")
            if self.shape.has_nextn_embd:
                ne = n_embd, self.shape.n_vocab
                yield self._matrix(il, "nextn.embed_tokens", ne, "embd", math.sqrt(n_embd))
                yield self._matrix(il, "nextn.shared_head_head", ne, "head", self.cal.logit_std)

    def _latent(self, il: int) -> Iterator[Tensor]:
        s, row = self.shape, self.shape.n_lora_kv + self.shape.n_rot
        n_q, n_v = s.n_head * s.head_dim, s.n_head * s.head_v
        if s.n_lora_q:
            yield self._matrix(il, "attn_q_a", (s.n_embd, s.n_lora_q), "attn", 1.0)
            yield self._vector(il, "attn_q_a_norm.weight", s.n_lora_q, "norm")
            yield self._matrix(il, "attn_q_b", (s.n_lora_q, n_q), "attn", self.cal.qk_norm)
        else:
            yield self._matrix(il, "attn_q", (s.n_embd, n_q), "attn", self.cal.qk_norm)
        yield self._matrix(il, "attn_kv_a_mqa", (s.n_embd, row), "attn", self.cal.qk_norm)
        yield self._vector(il, "attn_kv_a_norm.weight", s.n_lora_kv, "norm")
        k_b = (s.head_dim - s.n_rot, s.n_lora_kv, s.n_head)
        k_b_gain = self.cal.qk_norm * math.sqrt(k_b[0] / s.n_lora_kv)
        yield self._matrix(il, "attn_k_b", k_b, "latent", k_b_gain)
        yield self._matrix(il, "attn_v_b", (s.n_lora_kv, s.head_v, s.n_head), "latent", 1.0)
        yield self._matrix(il, "attn_output", (n_v, s.n_embd), "attn", self.cal.attn_out_gain(s))

    def _attention(self, il: int) -> Iterator[Tensor]:
        s = self.shape
        if s.n_lora_kv:
            yield from self._latent(il)
            return
        n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
        if s.arch == "gpt-oss":
            gains = self.cal.qk_norm, self.cal.qk_norm, 1.0
            for name, n, gain in zip("qkv", (n_q, n_kv, n_kv), gains):
                yield self._matrix(il, f"attn_{name}", (s.n_embd, n), "attn", gain)
                yield self._vector(il, f"attn_{name}.bias", n, "normal", 0.3)
            gain = self.cal.attn_out_gain(s)
            yield self._matrix(il, "attn_output", (n_q, s.n_embd), "attn", gain)
            yield self._vector(il, "attn_output.bias", s.n_embd, "normal", 0.3)
            yield self._vector(il, "attn_sinks.weight", s.n_head, "normal")
            return
        yield self._matrix(il, "attn_q", (s.n_embd, (1 + s.is_qwen35) * n_q), "attn", 1.0)
        yield self._matrix(il, "attn_k", (s.n_embd, n_kv), "attn", 1.0)
        yield self._matrix(il, "attn_v", (s.n_embd, n_kv), "attn", 1.0)
        yield self._matrix(il, "attn_output", (n_q, s.n_embd), "attn", self.cal.attn_out_gain(s))
        if s.has_qk_norm:
            is_wide = s.arch == "olmoe"
            yield self._vector(il, "attn_q_norm.weight", n_q if is_wide else s.head_dim, "qk_norm")
            yield self._vector(il, "attn_k_norm.weight", n_kv if is_wide else s.head_dim, "qk_norm")
        for part, n in (("q", n_q), ("k", n_kv), ("v", n_kv)) if s.has_qkv_bias else ():
            yield self._vector(il, f"attn_{part}.bias", n, "normal", 0.5)

    def _deltanet(self, il: int) -> Iterator[Tensor]:
        s = self.shape
        if s.has_qkvz:
            yield self._matrix(il, "ssm_in", (s.n_embd, s.conv_dim + s.value_dim), "ssm", 1.0)
        else:
            yield self._matrix(il, "attn_qkv", (s.n_embd, s.conv_dim), "ssm", 1.0)
            yield self._matrix(il, "attn_gate", (s.n_embd, s.value_dim), "ssm", 1.0)
        conv = (s.ssm_d_conv, s.conv_dim)
        yield Tensor(f"blk.{il}.ssm_conv1d.weight", conv, "F32", "normal", self.cal.conv_std, il)
        yield self._vector(il, "ssm_dt.bias", s.n_v_heads, "ssm_dt")
        yield self._vector(il, "ssm_a", s.n_v_heads, "ssm_a")
        alpha_gain = self.cal.alpha_gain
        if s.arch == "qwen3next":  # beta too
            yield self._matrix(il, "ssm_ba", (s.n_embd, 2 * s.n_v_heads), "ssm_ab", alpha_gain)
        else:
            yield self._matrix(il, "ssm_beta", (s.n_embd, s.n_v_heads), "ssm_ab", 1.0)
            yield self._matrix(il, "ssm_alpha", (s.n_embd, s.n_v_heads), "ssm_ab", alpha_gain)
        yield self._vector(il, "ssm_norm.weight", s.ssm_d_state, "norm")
        out_gain = self.cal.deltanet_out_gain(s)
        yield self._matrix(il, "ssm_out", (s.value_dim, s.n_embd), "ssm", out_gain)

    def _ffn(self, il: int) -> Iterator[Tensor]:
        s, cal = self.shape, self.cal
        if il < s.n_layer_dense_lead:
            yield self._matrix(il, "ffn_gate", (s.n_embd, s.n_ff), "shexp", 1.0)
            yield self._matrix(il, "ffn_up", (s.n_embd, s.n_ff), "shexp", 1.0)
            yield self._matrix(il, "ffn_down", (s.n_ff, s.n_embd), "shexp", cal.dense_down_gain(s))
            return
        router = (s.n_embd, s.n_expert)
        yield Tensor(f"blk.{il}.ffn_gate_inp.weight", router, "F32", "router", 1.0, il)
        if s.is_sigmoid:  # narrower than the scores, so that a token still matters
            yield self._vector(il, "exp_probs_b.bias", s.n_expert, "normal", 0.07)
        wide = (s.n_embd, s.n_ff_exp, s.n_expert)
        if s.merged_gate_up:
            both = (s.n_embd, 2 * s.n_ff_exp, s.n_expert)
            yield self._matrix(il, "ffn_gate_up_exps", both, "gate_up", 1.0)
        else:
            yield self._matrix(il, "ffn_gate_exps", wide, "gate_up", 1.0)
            yield self._matrix(il, "ffn_up_exps", wide, "gate_up", 1.0)
        down = (s.n_ff_exp, s.n_embd, s.n_expert)
        yield self._matrix(il, "ffn_down_exps", down, "down", cal.down_gain(s))
        if s.arch == "gpt-oss":
            yield self._vector(il, "ffn_gate_inp.bias", s.n_expert, "normal", 0.3)
            for name, n in (("gate", s.n_ff_exp), ("up", s.n_ff_exp), ("down", s.n_embd)):
                ne = (n, s.n_expert)
                yield Tensor(f"blk.{il}.ffn_{name}_exps.bias", ne, "F32", "normal", 0.3, il)
        if not s.n_ff_shexp or s.arch == "gemma4":
            return
        if s.is_qwen35:
            gate_std = 1 / math.sqrt(s.n_embd)
            yield self._vector(il, "ffn_gate_inp_shexp.weight", s.n_embd, "normal", gate_std)
        yield self._matrix(il, "ffn_gate_shexp", (s.n_embd, s.n_ff_shexp), "shexp", 1.0)
        yield self._matrix(il, "ffn_up_shexp", (s.n_embd, s.n_ff_shexp), "shexp", 1.0)
        shared = (s.n_ff_shexp, s.n_embd)
        yield self._matrix(il, "ffn_down_shexp", shared, "shexp", cal.shared_down_gain(s))

    def _gemma4(self, il: int) -> Iterator[Tensor]:
        """Return the tensors of a layer of gemma4; one without a window has no projection of V."""
        s, vector, matrix = self.shape, self._vector, self._matrix
        (d, n_kv), n_embd, n_ff = s.heads(il), s.n_embd, s.n_ff_shexp
        for name in (
            "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_ffw_norm_1",
            "pre_ffw_norm_2", "post_ffw_norm_2",
        ):  # fmt: skip
            yield vector(il, f"{name}.weight", n_embd, "norm")
        yield matrix(il, "attn_q", (n_embd, s.n_head * d), "attn", 1.0)
        yield matrix(il, "attn_k", (n_embd, n_kv * d), "attn", 1.0)
        if s.is_window(il):
            yield matrix(il, "attn_v", (n_embd, n_kv * d), "attn", 1.0)
        yield matrix(il, "attn_output", (s.n_head * d, n_embd), "attn", 1.0)
        for name in ("attn_q_norm.weight", "attn_k_norm.weight"):
            yield vector(il, name, d, "qk_norm", d**-0.25)  # products are not divided by sqrt(d)
        yield matrix(il, "ffn_gate", (n_embd, n_ff), "shexp", 1.0)
        yield matrix(il, "ffn_up", (n_embd, n_ff), "shexp", 1.0)
        yield matrix(il, "ffn_down", (n_ff, n_embd), "shexp", 1.0)
        yield from self._ffn(il)
        # the router divides by sqrt(n_embd)
        yield vector(il, "ffn_gate_inp.scale", n_embd, "scaled_norm", n_embd**0.5)
        yield vector(il, "ffn_down_exps.scale", s.n_expert, "norm")
        yield vector(il, "layer_output_scale.weight", 1, "norm")
