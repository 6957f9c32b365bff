"""glm4moe: GLM-4.5, GLM-4.6 and GLM-4.7, and their Air models.

Every mixer is attention; files may have biases and norms of heads. The first layers are dense. The
other layers have routed experts, whose scores are sigmoids, and a shared one without a gate.

Source: mirrors llama.cpp src/models/glm4-moe.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import UnsupportedModel
from .base import Architecture, Layer, Routing
from .blocks.attention import attention_layer, attention_tensors, build_attention, build_keys_values
from .blocks.experts import (
    build_ffn,
    expert_tensors,
    ffn_tensors,
    shared_tensors,
)
from .blocks.router import Rules, build_router, read_rules
from .hparams import MAX_DIM, MAX_LAYERS, read_attention, read_experts, read_rope, read_sizes
from .inputs import Memory, PassInputs, PassShape, Weights
from .tensors import Expected, vector

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor
    from ..gguf.metadata import Metadata


@dataclass(frozen=True)
class Glm4Moe(Architecture):
    """See `Architecture`.

    n_layer_dense_lead: first layers, which have an FFN of width n_ff and no experts. rules: of the
    routers.
    """

    name = "glm4moe"
    families = "GLM-4.5, GLM-4.6 and GLM-4.7"
    sums_in_f32 = True

    n_layer_dense_lead: int
    n_ff: int
    rules: Rules

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Glm4Moe:
        """Read and check the hyper-parameters."""
        sizes = read_sizes(meta, n_vocab)
        n_all = meta.integer(".block_count", 1, MAX_LAYERS)
        n_nextn = meta.integer(".nextn_predict_layers", 0, n_all - 1, 0)
        n_layer = n_all - n_nextn
        n_dense = meta.integer(".leading_dense_block_count", 0, n_layer - 1, 0)
        experts = read_experts(meta, n_all, shared=False, grouped=True)
        n_shared = meta.integer(".expert_shared_count", 1, 1024)
        attention = read_attention(meta, sizes["n_embd"], n_all)
        _check_sections(meta, attention["n_rot"], attention["n_embd_head_k"])
        return cls(
            **sizes,
            n_layer=n_layer,
            n_layer_nextn=n_nextn,
            **attention,
            **experts | {"n_ff_shexp": n_shared * experts["n_ff_exp"]},
            **read_rope(meta, sizes["n_ctx_train"]),
            n_layer_dense_lead=n_dense,
            n_ff=meta.integer(".feed_forward_length", 1, MAX_DIM) if n_dense else 0,
            rules=read_rules(meta, experts["n_expert"], is_sigmoid=True),
        )

    def layer(self, il: int) -> Layer:
        """Return what a layer keeps."""
        return replace(attention_layer(self), n_ff=self.n_ff * (il < self.n_layer_dense_lead))

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of a layer."""
        found = attention_tensors(self, gated=False, varies=True)
        found["post_attention_norm.weight"] = vector(self.n_embd)
        if not self.layer(il).is_routed:
            return found | ffn_tensors(self, self.n_ff)
        bias = {"exp_probs_b.bias": vector(self.n_expert)}
        # llama.cpp knows no merged stacks here
        experts = expert_tensors(self, merged=False) | shared_tensors(self, gated=False)
        return found | bias | experts

    def mixer(
        self, b: Builder, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
        cur: Tensor, il: int,
    ) -> Tensor:  # fmt: skip
        """Append attention."""
        return build_attention(b, self, w, memory, inp, shape, cur, il, gated=False)

    def keys_values(
        self, b: Builder, w: Weights, memory: Memory, pos: Tensor, kv_idx: Tensor, cur: Tensor,
        il: int,
    ) -> None:  # fmt: skip
        """Append the writes of K and V."""
        build_keys_values(b, self, w, memory, pos, kv_idx, cur, il)

    def ffn_input(
        self, b: Builder, w: Weights, cur: Tensor, x: Tensor, il: int
    ) -> tuple[Tensor, Tensor]:
        """Append residual and norm."""
        residual = b.name(b.add(cur, x), "ffn_inp", il)
        norm = b.norm(residual, w["post_attention_norm.weight"], self.f_norm_rms_eps)
        return residual, b.name(norm, "post_attn_norm", il)

    def router(self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, il: int) -> Routing:
        """Append the choice of experts."""
        return build_router(b, self, w, cur, il, self.rules)

    def layer_end(
        self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, moe: Tensor | None, il: int
    ) -> Tensor:
        """Append dense FFN or shared expert, sum and residual."""
        suffix = "_shexp" if self.layer(il).is_routed else ""
        out = build_ffn(b, w, cur, il, suffix, in_f32=self.sums_in_f32)
        if suffix:
            out = b.name(out, "ffn_shexp_out", il)
        if moe is not None:
            out = b.name(b.add(moe, out), "ffn_out", il)
        return b.expand(b.name(b.add(out, residual), "l_out", il))


def _check_sections(meta: Metadata, n_rot: int, n_embd_head: int) -> None:
    """Check that M-RoPE, which files of vision models have, is plain rope for text.

    A text position is equal in the first three of its four components and 0 in the fourth, so no
    rotated pair may take its angle from the fourth.

    Source: llama.cpp ggml/src/ggml-cpu/ops.cpp ggml_mrope_cache_init.
    """
    key = ".rope.dimension_sections"
    sections = meta.integers(key, 4, 0, MAX_DIM) if key in meta else (0,)
    total = sum(sections)
    if all(sections[:2]) and (total > n_embd_head or min(total, n_rot // 2) > sum(sections[:3])):
        what = f"is {list(sections)}; moegraph runs text, whose positions have no fourth component"
        raise meta.error(key, what, UnsupportedModel)
