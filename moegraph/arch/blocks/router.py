"""Router: the experts of each row and their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Architecture, Routing
from ..inputs import Weights

if TYPE_CHECKING:
    from ...ggml.ops import Builder, Tensor

# Smallest normal F16; like upstream, avoids a division by zero.
_MIN_SUM = 6.103515625e-5


def build_router(
    b: Builder, hp: Architecture, w: Weights, cur: Tensor, il: int, normed: bool = True,
    scale: float = 0.0,
) -> Routing:  # fmt: skip
    """Append softmax and top-k for rows F32 [n_embd, n_tokens].

    normed: the weights of a row are divided by their sum. scale: of the weights then; 0: none. CUDA
    runs the nodes from soft_max to the last reshape as one kernel, in this order.

    Source: mirrors llama.cpp src/llama-graph.cpp build_moe_ffn.
    """
    n_expert, k, n_tokens = hp.n_expert, hp.n_expert_used, cur.ne[1]
    logits = b.name(b.mul_mat(w["ffn_gate_inp.weight"], cur), "ffn_moe_logits", il)
    probs = b.name(b.soft_max(logits), "ffn_moe_probs", il)
    topk = b.argsort_top_k(probs, k)
    argsort = b.name(topk.src[0], "ffn_moe_argsort", il)
    topk = b.name(topk, "ffn_moe_topk", il)

    data = weights = b.name(
        b.get_rows(b.reshape(probs, 1, n_expert, n_tokens), topk), "ffn_moe_weights", il
    )
    if normed:
        weights = b.reshape(weights, k, n_tokens)
        total = b.name(b.sum_rows(weights), "ffn_moe_weights_sum", il)
        total = b.name(b.clamp(total, _MIN_SUM, float("inf")), "ffn_moe_weights_sum_clamped", il)
        data = weights = b.name(b.div(weights, total), "ffn_moe_weights_norm", il)
        weights = b.reshape(weights, 1, k, n_tokens)
    if scale not in (0.0, 1.0):
        data = weights = b.name(b.scale(weights, scale), "ffn_moe_weights_scaled", il)
    b.expand(weights)
    return Routing(argsort, topk, weights, data)
