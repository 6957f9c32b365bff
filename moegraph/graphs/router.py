"""Router: the experts of each row and their weights."""

from __future__ import annotations

from dataclasses import dataclass

from ..arch.hparams import HParams
from ..ggml.lib import C
from ..ggml.ops import F32, I32, Builder, Tensor
from ..resident.weights import LayerWeights
from .inputs import PassInputs

# Smallest normal F16; like upstream, avoids a division by zero.
_MIN_SUM = 6.103515625e-5


@dataclass(frozen=True)
class Routing:
    """A router's choice.

    argsort I32 [n_expert, n_tokens]: all experts, best first. topk I32 [n_expert_used, n_tokens]: a
    view of the best ones. weights F32 [1, n_expert_used, n_tokens]: sum 1 in each row.
    weights_data: the node whose memory holds the weights.
    """

    argsort: Tensor
    topk: Tensor
    weights: Tensor
    weights_data: Tensor


def build_absent(b: Builder, inp: PassInputs, ids: Tensor) -> Tensor:
    """Return ids, or slots, I32 [n_expert_used, n_tokens]; those of padding become -1, in place.

    So padding costs no expert: none is read, and none is fetched. Nodes that need the ids as they
    were come first.
    """
    if inp.padding is None or inp.absent is None:
        return ids
    (k, n_tokens), stride = (ids.ne[0], ids.ne[1]), ids.nb[1]
    words = C.ggml_view_2d(b.ctx, ids, k, n_tokens, stride, 0)
    words.type = F32  # ggml moves rows of F32
    written = b.expand(b.set_rows(words, inp.absent, inp.padding))
    again = C.ggml_view_2d(b.ctx, written, k, n_tokens, stride, 0)
    again.type = I32
    return b.expand(again)


def build_router(b: Builder, hp: HParams, w: LayerWeights, cur: Tensor, il: int) -> Routing:
    """Append softmax, top-k and normalisation for rows F32 [n_embd, n_tokens].

    CUDA runs the nodes from soft_max to the last reshape as one kernel, in this order.

    Source: mirrors llama.cpp src/llama-graph.cpp build_moe_ffn.
    """
    n_expert, k, n_tokens = hp.n_expert, hp.n_expert_used, cur.ne[1]
    logits = b.name(b.mul_mat(w["ffn_gate_inp.weight"], cur), "ffn_moe_logits", il)
    probs = b.name(b.soft_max(logits), "ffn_moe_probs", il)
    topk = b.argsort_top_k(probs, k)
    argsort = b.name(topk.src[0], "ffn_moe_argsort", il)
    topk = b.name(topk, "ffn_moe_topk", il)

    weights = b.get_rows(b.reshape(probs, 1, n_expert, n_tokens), topk)
    weights = b.reshape(b.name(weights, "ffn_moe_weights", il), k, n_tokens)
    total = b.name(b.sum_rows(weights), "ffn_moe_weights_sum", il)
    total = b.name(b.clamp(total, _MIN_SUM, float("inf")), "ffn_moe_weights_sum_clamped", il)
    data = weights = b.name(b.div(weights, total), "ffn_moe_weights_norm", il)
    weights = b.reshape(weights, 1, k, n_tokens)
    b.expand(weights)
    return Routing(argsort, topk, weights, data)
