"""gemma4: Gemma 4 Mixture-of-Experts models, such as Gemma-4-26B-A4B.

Most layers attend to a window. The others, which attend to all positions, have heads and a rope of
their own, and often no projection of V, which then is K before its norm. Each layer has a dense FFN
beside the routed experts, and the router reads the residual. Refused is what these models have not:
per-layer embeddings, and layers that share K and V.

Source: mirrors llama.cpp src/models/gemma4.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InternalError, UnsupportedModel
from .base import Architecture, Layer, Routing
from .blocks.attention import attend
from .blocks.experts import build_ffn, expert_tensors, ffn_tensors
from .blocks.router import build_router
from .hparams import MAX_CTX, MAX_DIM, read_experts, read_layers, read_rope, read_sizes, uniform
from .inputs import Memory, PassInputs, PassShape, Weights, project
from .tensors import Expected, matrix, vector

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor
    from ..gguf.metadata import Metadata

_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Gemma4(Architecture):
    """See `Architecture`, whose heads and rope are those of layers without a window.

    windows: n_swa of layers with a window, 0 of the others. heads_kv: n_head_kv of each layer.
    *_swa: of layers with a window.
    """

    name = "gemma4"
    families = "Gemma 4 Mixture-of-Experts"
    tokenizer = "gemma4"  # BPE over characters, with tokens for the bytes of others
    adds_late = False
    layer_launches = 37.0
    glu = "geglu"
    n_factors = 2

    windows: tuple[int, ...]
    heads_kv: tuple[int, ...]
    n_embd_head_swa: int
    n_rot_swa: int
    rope_freq_base_swa: float
    f_final_logit_softcapping: float

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Gemma4:
        """Read and check the hyper-parameters."""
        sizes, layers = read_sizes(meta, n_vocab), read_layers(meta)
        n_layer = layers["n_layer"]
        _refuse(meta)
        key = ".attention.head_count_kv"
        n_head = uniform(meta, ".attention.head_count", n_layer, 1, 65_536)
        heads_kv = (n_head,) * n_layer
        if key in meta:
            heads_kv = meta.integers(key, n_layer, 1, 65_536)
        if wrong := [n for n in heads_kv if n_head % n]:
            raise meta.error(key, f"has {wrong[0]}, which does not divide n_head {n_head}")
        rope = read_rope(meta, sizes["n_ctx_train"])
        n_swa = meta.integer(".attention.sliding_window", 1, MAX_CTX)
        pattern = meta.integers(".attention.sliding_window_pattern", n_layer, 0, 1)
        base = meta.number(".rope.freq_base_swa", 1.0, 1e12, 10_000.0)
        experts = read_experts(meta, n_layer, shared=False)
        experts["n_ff_shexp"] = uniform(meta, ".feed_forward_length", n_layer, 1, MAX_DIM)
        softcap = meta.number(".final_logit_softcapping", 0.0, 1e6, 0.0)
        (d, n_rot), (d_swa, n_rot_swa) = _heads(meta, ""), _heads(meta, "_swa")
        return cls(
            **sizes, **layers, n_head=n_head, n_head_kv=min(heads_kv),
            n_embd_head_k=d, n_embd_head_v=d, n_rot=n_rot, **experts, **rope,
            windows=tuple(n_swa * bool(is_swa) for is_swa in pattern), heads_kv=heads_kv,
            n_embd_head_swa=d_swa, n_rot_swa=n_rot_swa, rope_freq_base_swa=base,
            f_final_logit_softcapping=softcap,
        )  # fmt: skip

    @cached_property
    def _each(self) -> tuple[Gemma4, ...]:
        d, n_rot, base = self.n_embd_head_swa, self.n_rot_swa, self.rope_freq_base_swa
        window = replace(
            self, n_embd_head_k=d, n_embd_head_v=d, n_rot=n_rot, rope_freq_base=base,
            rope_freq_scale=1.0,
        )  # fmt: skip
        found = tuple(
            replace(window if n_swa else self, n_head_kv=n_head_kv)
            for n_swa, n_head_kv in zip(self.windows, self.heads_kv)
        )
        for each in found:
            each.__dict__["_each"] = found  # what it says of other layers is what the model says
        return found

    def at(self, il: int) -> Gemma4:
        """Return the same with the heads and the rope of layer il."""
        return self._each[il]

    def layer(self, il: int) -> Layer:
        """Return what layer il keeps."""
        n_swa, at = self.windows[il], self._each[il]
        width = at.n_embd_head_k * at.n_head_kv
        mixer = "attention in a window" if n_swa else "attention"
        return Layer(mixer, kv=(width, width), window=n_swa or None)

    @property
    def embedding_scale(self) -> float:
        """Return what embeddings are multiplied by."""
        return float(np.sqrt(np.float32(self.n_embd)))

    @property
    def logit_softcap(self) -> float:
        """Return the bound of logits."""
        return self.f_final_logit_softcapping

    @property
    def attention_scale(self) -> float:
        """Return what the products of Q and K are multiplied by: their norms do it all."""
        return 1.0

    @property
    def mixer_width(self) -> int:
        """Return a bound on the F32 numbers that a mixer has of a row."""
        return 4 * self.n_head * max(at.n_embd_head_k for at in self._each)

    def model_tensors(self) -> dict[str, Expected]:
        """Return what divides the frequencies of rope in layers without a window."""
        heads = [at.n_embd_head_k for at, n_swa in zip(self._each, self.windows) if not n_swa]
        return {_FACTORS: vector(heads[0] // 2)} if heads else {}

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of layer il."""
        at, n_embd = self._each[il], self.n_embd
        d = at.n_embd_head_k
        norms = (
            "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_ffw_norm_1",
            "pre_ffw_norm_2", "post_ffw_norm_2",
        )  # fmt: skip
        return {
            **{f"{name}.weight": vector(n_embd) for name in norms},
            "attn_q.weight": matrix(n_embd, d * self.n_head),
            "attn_k.weight": matrix(n_embd, d * at.n_head_kv),
            "attn_v.weight": matrix(n_embd, d * at.n_head_kv, required=False),
            "attn_output.weight": matrix(d * self.n_head, n_embd),
            "attn_q_norm.weight": vector(d),
            "attn_k_norm.weight": vector(d),
            "ffn_gate_inp.scale": vector(n_embd),
            "ffn_down_exps.scale": vector(self.n_expert),
            "layer_output_scale.weight": vector(1, required=False),
            **ffn_tensors(self, self.n_ff_shexp),
            **expert_tensors(self, merged),
        }

    def mixer(
        self, b: Builder, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
        cur: Tensor, il: int,
    ) -> Tensor:  # fmt: skip
        """Append attention."""
        at, eps, n = self._each[il], self.f_norm_rms_eps, cur.ne[1]
        d, factors = at.n_embd_head_k, None if self.windows[il] else w[_FACTORS]
        names = ["attn_q.weight", "attn_k.weight", "attn_v.weight"]
        q, k, *rest = project(b, w, names if names[2] in w else names[:2], cur)
        q, k = b.name(q, "Qcur", il), b.name(k, "Kcur", il)
        v = b.name(rest[0] if rest else k, "Vcur", il)
        q = b.norm(b.reshape(q, d, self.n_head, n), w["attn_q_norm.weight"], eps)
        q = b.rope(b.name(q, "Qcur_normed", il), inp.pos, at, factors)
        k, v = b.reshape(k, d, at.n_head_kv, n), b.reshape(v, d, at.n_head_kv, n)
        k = b.norm(k, w["attn_k_norm.weight"], eps)
        v = b.name(b.rms_norm(v, eps), "Vcur_normed", il)
        k = b.rope(b.name(k, "Kcur_normed", il), inp.pos, at, factors)
        qkv = b.name(q, "Qcur_pos", il), b.name(k, "Kcur_pos", il), v
        return b.mul_mat(w["attn_output.weight"], attend(b, at, memory, inp, shape, qkv, il))

    def ffn_input(
        self, b: Builder, w: Weights, cur: Tensor, x: Tensor, il: int
    ) -> tuple[Tensor, Tensor]:
        """Append the norm of the mixer's output, residual, and the norm of the experts' input."""
        eps = self.f_norm_rms_eps
        cur = b.name(b.norm(cur, w["post_attention_norm.weight"], eps), "attn_post_norm", il)
        residual = b.name(b.add(cur, x), "attn_out", il)
        norm = b.norm(residual, w["pre_ffw_norm_2.weight"], eps)
        # experts may be in other graphs, and the router does not read it
        return residual, b.expand(b.name(norm, "ffn_norm_2", il))

    def router(self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, il: int) -> Routing:
        """Append the choice of experts; their factors are the experts' scales, then the weights."""
        scale = float(np.float32(1) / np.sqrt(np.float32(self.n_embd)))
        rows = b.scale(b.rms_norm(residual, self.f_norm_rms_eps), scale)
        found = build_router(b, self, w, b.mul(rows, w["ffn_gate_inp.scale"]), il)
        k, n = found.topk.ne[0], found.topk.ne[1]
        ids = b.cont(found.topk) if n > 1 else found.topk
        scales = b.reshape(w["ffn_down_exps.scale"], 1, self.n_expert)
        scales = b.reshape(b.get_rows(scales, b.reshape(ids, k * n)), 1, k, n)
        factors = b.expand(b.concat(scales, found.weights, 0))
        return Routing(found.argsort, found.topk, factors, factors)

    def layer_end(
        self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, moe: Tensor | None, il: int
    ) -> Tensor:
        """Append the dense FFN, the norms of its output and of the experts' sum, and their sum."""
        if moe is None:
            raise InternalError("a layer of gemma4 ends before its experts were summed")
        eps = self.f_norm_rms_eps
        out = b.name(b.norm(residual, w["ffn_norm.weight"], eps), "ffn_norm_1", il)
        out = build_ffn(b, w, out, il, glu=self.glu)
        out = b.name(b.norm(out, w["post_ffw_norm_1.weight"], eps), "ffn_mlp", il)
        moe = b.name(b.norm(moe, w["post_ffw_norm_2.weight"], eps), "ffn_moe", il)
        out = b.name(b.add(out, moe), "ffn_moe_combined", il)
        out = b.name(b.norm(out, w["post_ffw_norm.weight"], eps), "ffn_post_norm", il)
        out = b.add(out, residual)
        if "layer_output_scale.weight" in w:
            out = b.mul(out, w["layer_output_scale.weight"])
        return b.expand(b.name(out, "l_out", il))


def _refuse(meta: Metadata) -> None:
    """Refuse dense models, what only they have, and what has a file of its own."""
    if not meta.integer(".expert_count", 0, MAX_DIM, 0):
        what = "is 0: the model is dense; moegraph runs Mixture-of-Experts models"
        raise meta.error(".expert_count", what, UnsupportedModel)
    for key, what in (
        (".embedding_length_per_layer_input", "per-layer embeddings"),
        (".attention.shared_kv_layers", "layers that share K and V"),
    ):
        if n := meta.integer(key, 0, MAX_DIM, 0):
            raise meta.error(key, f"is {n}; moegraph does not run {what}", UnsupportedModel)


def _heads(meta: Metadata, kind: str) -> tuple[int, int]:
    """Return head size and rotated part of layers without a window, or with one (`_swa`)."""
    key = f".attention.key_length{kind}"
    d = meta.integer(key, 1, 65_536)
    if d % 64:
        raise meta.error(key, f"is {d}; moegraph runs multiples of 64 here", UnsupportedModel)
    head_v = meta.integer(f".attention.value_length{kind}", 1, 65_536)
    if head_v != d:
        what = f"is {head_v} but key heads have {d}; this architecture needs them equal"
        raise meta.error(f".attention.value_length{kind}", what)
    key = f".rope.dimension_count{kind}"
    n_rot = meta.integer(key, 2, 65_536, d)
    if n_rot % 2 or n_rot > d:
        raise meta.error(key, f"is {n_rot}; it must be even and at most the head size {d}")
    return d, n_rot
