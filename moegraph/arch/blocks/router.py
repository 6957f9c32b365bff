"""Router: the experts of each row and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import UnsupportedModel
from ..base import Architecture, Routing
from ..hparams import MAX_EXPERTS
from ..inputs import Weights

if TYPE_CHECKING:
    from ...ggml.ops import Builder, Tensor
    from ...gguf.metadata import Metadata

# Smallest normal F16; like upstream, avoids a division by zero.
_MIN_SUM = 6.103515625e-5


@dataclass(frozen=True)
class Rules:
    """How a router chooses.

    is_sigmoid: a score is a sigmoid; else scores are a softmax. normed: the weights of a row are
    divided by their sum. scale: of the weights then; 0: none. n_groups: a row chooses from the
    n_group_used groups of experts whose two best scores have the largest sums.
    """

    is_sigmoid: bool = False
    normed: bool = True
    scale: float = 0.0
    n_groups: int = 1
    n_group_used: int = 1


def read_rules(meta: Metadata, n_expert: int, is_sigmoid: bool) -> Rules:
    """Read how a router chooses; is_sigmoid: what holds for a file that does not say it."""
    kind, key = meta.integer(".expert_gating_func", 0, 1 << 31, 0), ".expert_group_count"
    if kind > 2:
        what = f"is {kind}; moegraph runs 1 (softmax) and 2 (sigmoid)"
        raise meta.error(".expert_gating_func", what, UnsupportedModel)
    n_groups, n_used = meta.integer(key, 0, MAX_EXPERTS, 0), 1
    if n_groups > 1:
        n_used = meta.integer(".expert_group_used_count", 1, n_groups - 1)
        if n_expert % n_groups or n_expert == n_groups:
            raise meta.error(key, f"is {n_groups}, which does not divide {n_expert} experts")
    return Rules(
        kind == 2 if kind else is_sigmoid,
        meta.boolean(".expert_weights_norm", False),
        meta.number(".expert_weights_scale", 0.0, 1e6, 0.0),
        max(n_groups, 1),
        n_used,
    )


def build_router(
    b: Builder, hp: Architecture, w: Weights, cur: Tensor, il: int, rules: Rules = Rules()
) -> Routing:
    """Append the choice of experts for rows F32 [n_embd, n_tokens].

    A bias of the experts, if there is one, counts for the choice and not for the weights. CUDA runs
    the nodes from the scores to the last reshape as one kernel, in this order.

    Source: mirrors llama.cpp src/llama-graph.cpp build_moe_ffn.
    """
    n_expert, k, n_tokens = hp.n_expert, hp.n_expert_used, cur.ne[1]
    logits = b.name(b.mul_mat(w["ffn_gate_inp.weight"], cur), "ffn_moe_logits", il)
    scores = b.sigmoid(logits) if rules.is_sigmoid else b.soft_max(logits)
    chosen_by = scores = b.name(scores, "ffn_moe_probs", il)
    if "exp_probs_b.bias" in w:
        chosen_by = b.name(b.add(scores, w["exp_probs_b.bias"]), "ffn_moe_probs_biased", il)
    if rules.n_groups > 1:
        chosen_by = _build_groups(b, rules, chosen_by, il)
    topk = b.argsort_top_k(chosen_by, k)
    argsort = b.name(topk.src[0], "ffn_moe_argsort", il)
    topk = b.name(topk, "ffn_moe_topk", il)

    data = weights = b.name(
        b.get_rows(b.reshape(scores, 1, n_expert, n_tokens), topk), "ffn_moe_weights", il
    )
    if rules.normed:
        weights = b.reshape(weights, k, n_tokens)
        total = b.name(b.sum_rows(weights), "ffn_moe_weights_sum", il)
        total = b.name(b.clamp(total, _MIN_SUM, float("inf")), "ffn_moe_weights_sum_clamped", il)
        data = weights = b.name(b.div(weights, total), "ffn_moe_weights_norm", il)
        weights = b.reshape(weights, 1, k, n_tokens)
    if rules.scale not in (0.0, 1.0):
        data = weights = b.name(b.scale(weights, rules.scale), "ffn_moe_weights_scaled", il)
    b.expand(weights)
    return Routing(argsort, topk, weights, data)


def _build_groups(b: Builder, rules: Rules, scores: Tensor, il: int) -> Tensor:
    """Append scores F32 [n_expert, n_tokens], minus infinity outside the groups that a row takes.

    Source: mirrors llama.cpp src/llama-graph.cpp build_moe_ffn.
    """
    (n_expert, n_tokens), n = scores.ne[0:2], rules.n_groups
    groups = b.reshape(scores, n_expert // n, n, n_tokens)
    best = b.argsort_top_k(groups, 2)
    best = b.get_rows(b.reshape(groups, 1, n_expert // n, n, n_tokens), best)
    best = b.reshape(b.sum_rows(b.reshape(best, 2, n, n_tokens)), n, n_tokens)
    taken = b.name(b.argsort_top_k(best, rules.n_group_used), "ffn_moe_group_topk", il)
    rest = b.fill(groups, float("-inf"))
    masked = b.set_rows(rest, b.get_rows(groups, taken), taken)
    return b.name(b.reshape(masked, n_expert, n_tokens), "ffn_moe_probs_masked", il)
