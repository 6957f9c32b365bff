"""What most families have in common: layers of attention, an FFN or experts, and residuals.

A family overrides what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..base import Architecture, Layer, Routing
from ..hparams import MAX_DIM, read_experts, read_layers
from ..inputs import Memory, PassInputs, PassShape, Weights
from .attention import attention_layer, build_attention, build_keys_values
from .experts import build_ffn, build_shared_expert
from .router import Rules, build_router

if TYPE_CHECKING:
    from ...ggml.ops import Builder, Tensor
    from ...gguf.metadata import Metadata


@dataclass(frozen=True, kw_only=True)
class CommonArchitecture(Architecture):
    """See `Architecture`.

    n_layer_dense_lead: first layers, which have an FFN of width n_ff and no experts. rules: of the
    routers.
    """

    # the node of the residual before the FFN, the weights of its norm, and the norm's node
    ffn_norm: ClassVar[tuple[str, str, str]] = ("ffn_inp", "ffn_norm.weight", "ffn_norm")
    # the node of a shared expert without a gate
    shexp: ClassVar[str] = "ffn_shexp"

    n_layer_dense_lead: int = 0
    n_ff: int = 0
    rules: Rules = field(default_factory=Rules)

    def layer(self, il: int) -> Layer:
        """Return what a layer keeps."""
        return replace(attention_layer(self), n_ff=self.n_ff * (il < self.n_layer_dense_lead))

    def mixer(
        self, b: Builder, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
        cur: Tensor, il: int,
    ) -> Tensor:  # fmt: skip
        """Append attention."""
        return build_attention(b, self, w, memory, inp, shape, cur, il)

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
        before, weights, after = self.ffn_norm
        residual = b.name(b.add(cur, x), before, il)
        return residual, b.name(b.norm(residual, w[weights], self.f_norm_rms_eps), after, il)

    def router(self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, il: int) -> Routing:
        """Append the choice of experts."""
        return build_router(b, self, w, cur, il, self.rules)

    def layer_end(
        self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, moe: Tensor | None, il: int
    ) -> Tensor:
        """Append dense FFN or shared expert, if there is one, sum and residual."""
        if il < self.n_layer_dense_lead:
            moe = build_ffn(b, w, cur, il, in_f32=self.sums_in_f32)
        elif self.n_ff_shexp:
            out = build_shared_expert(b, w, cur, il, self.sums_in_f32, self.shexp)
            moe = out if moe is None else b.name(b.add(moe, out), "ffn_out", il)
        out = b.cont(residual) if moe is None else b.add(moe, residual)
        return b.expand(b.name(out, "l_out", il))


def read_dense_lead(meta: Metadata) -> dict[str, Any]:
    """Read the numbers of layers, dense first layers, and routed and shared experts."""
    layers = read_layers(meta, has_nextn=True)
    n_layer = layers["n_layer"]
    n_dense = meta.integer(".leading_dense_block_count", 0, n_layer - 1, 0)
    experts = read_experts(meta, sum(layers.values()), shared=False, grouped=True)
    n_shared = meta.integer(".expert_shared_count", 1, 1024)
    return layers | experts | {
        "n_ff_shexp": n_shared * experts["n_ff_exp"],
        "n_layer_dense_lead": n_dense,
        "n_ff": meta.integer(".feed_forward_length", 1, MAX_DIM) if n_dense else 0,
    }  # fmt: skip
