"""qwen3moe: Qwen3 Mixture-of-Experts models, such as Qwen3-30B-A3B and Qwen3-Coder.

Every mixer is attention, and every layer has routed experts and no shared one.

Source: mirrors llama.cpp src/models/qwen3moe.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Architecture, Layer, Routing
from .blocks.attention import attention_layer, attention_tensors, build_attention
from .blocks.experts import expert_tensors
from .blocks.router import build_router
from .hparams import MAX_LAYERS, read_attention, read_experts, read_rope, read_sizes
from .inputs import Memory, PassInputs, PassShape, Weights
from .tensors import Expected, vector

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor
    from ..gguf.metadata import Metadata


@dataclass(frozen=True)
class Qwen3Moe(Architecture):
    """See `Architecture`."""

    name = "qwen3moe"
    families = "Qwen3 Mixture-of-Experts"

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Qwen3Moe:
        """Read and check the hyper-parameters."""
        sizes = read_sizes(meta, n_vocab)
        n_layer = meta.integer(".block_count", 1, MAX_LAYERS)
        attention = read_attention(meta, sizes["n_embd"], n_layer, rotates_all=True)
        return cls(
            **sizes,
            n_layer=n_layer,
            n_layer_nextn=0,
            **attention,
            **read_experts(meta, n_layer, shared=False),
            **read_rope(meta, sizes["n_ctx_train"]),
        )

    def layer(self, il: int) -> Layer:
        """Return what a layer keeps."""
        return attention_layer(self)

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of a layer."""
        norm = {"ffn_norm.weight": vector(self.n_embd)}
        # llama.cpp knows no merged stacks here
        return attention_tensors(self, gated=False) | norm | expert_tensors(self, merged=False)

    def mixer(
        self, b: Builder, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
        cur: Tensor, il: int,
    ) -> Tensor:  # fmt: skip
        """Append attention."""
        return build_attention(b, self, w, memory, inp, shape, cur, il, gated=False)

    def ffn_input(
        self, b: Builder, w: Weights, cur: Tensor, x: Tensor, il: int
    ) -> tuple[Tensor, Tensor]:
        """Append residual and norm."""
        residual = b.name(b.add(cur, x), "ffn_inp", il)
        norm = b.norm(residual, w["ffn_norm.weight"], self.f_norm_rms_eps)
        return residual, b.name(norm, "ffn_norm", il)

    def router(self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, il: int) -> Routing:
        """Append the choice of experts."""
        return build_router(b, self, w, cur, il)

    def layer_end(
        self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, moe: Tensor | None, il: int
    ) -> Tensor:
        """Append the residual."""
        out = b.cont(residual) if moe is None else b.add(moe, residual)
        return b.expand(b.name(out, "l_out", il))
