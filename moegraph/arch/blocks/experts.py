"""Routed experts over stacks of slots, and the shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..base import Architecture
from ..inputs import Weights
from ..tensors import Expected, matrix, with_biases

if TYPE_CHECKING:
    from ...ggml.ops import Builder, Tensor


def expert_tensors(hp: Architecture, merged: bool) -> dict[str, Expected]:
    """Return the tensors of router and routed experts; merged: as in `layer_tensors`."""
    n_embd, n_ff, n_expert = hp.n_embd, hp.n_ff_exp, hp.n_expert
    if merged:
        experts = {"ffn_gate_up_exps.weight": matrix(n_embd, 2 * n_ff, n_expert)}
    else:
        experts = {
            "ffn_gate_exps.weight": matrix(n_embd, n_ff, n_expert),
            "ffn_up_exps.weight": matrix(n_embd, n_ff, n_expert),
        }
    experts["ffn_down_exps.weight"] = matrix(n_ff, n_embd, n_expert)
    if hp.has_expert_biases:
        experts = with_biases(experts)
    return experts | {"ffn_gate_inp.weight": matrix(n_embd, n_expert)}


def ffn_tensors(hp: Architecture, n_ff: int, suffix: str = "") -> dict[str, Expected]:
    """Return the tensors of an FFN that every token takes; suffix: of their names."""
    return {
        f"ffn_gate{suffix}.weight": matrix(hp.n_embd, n_ff),
        f"ffn_up{suffix}.weight": matrix(hp.n_embd, n_ff),
        f"ffn_down{suffix}.weight": matrix(n_ff, hp.n_embd),
    }


def shared_tensors(hp: Architecture, gated: bool = True) -> dict[str, Expected]:
    """Return the tensors of the shared expert; gated: and its gate."""
    gate = {"ffn_gate_inp_shexp.weight": matrix(hp.n_embd)} if gated else {}
    return gate | ffn_tensors(hp, hp.n_ff_shexp, "_shexp")


def build_expert_rows(
    b: Builder, parts: Mapping[str, Tensor], cur: Tensor, slots: Tensor, weights: Tensor, il: int,
    glu: str = "swiglu",
) -> Tensor:  # fmt: skip
    """Append the weighted outputs of single experts: F32 [n_embd, n_expert_used, n_tokens].

    parts: stacks of slots, `gate`, `up` and `down`, or `gate_up` and `down`, and `gate_bias` and so
    on, F32 [n, 1, n_slots], of experts with biases. cur F32 [n_embd, n_tokens], or [n_embd,
    n_expert_used, n_tokens]: each expert has a row of its own. slots I32 [n_expert_used, n_tokens];
    one below 0 gives a row of zeros. weights F32 [n_factors, n_expert_used, n_tokens]. glu: see
    `Architecture.glu`. For few rows, CUDA runs gate, up and activation as one kernel if they are in
    this order.

    Source: mirrors llama.cpp src/llama-graph.cpp build_moe_ffn.
    """
    k, n_tokens = slots.ne[0], slots.ne[1]
    cur = b.reshape(cur, cur.ne[0], cur.ne[1] * cur.ne[2] // n_tokens, n_tokens)
    several = range(weights.ne[0] if weights.ne[0] > 1 else 0)  # first: CUDA joins what follows
    *scales, weights = [b.expand(_factor(b, weights, i)) for i in several] or [weights]
    if "gate_up" in parts:
        both = _product(b, parts, "gate_up", cur, slots, il)
        half, strides = (both.ne[0] // 2, k, n_tokens), (both.nb[1], both.nb[2])
        gate = b.name(b.view(both, half, strides), "ffn_moe_gate", il)
        up = b.name(b.view(both, half, strides, 2 * both.ne[0]), "ffn_moe_up", il)
    else:
        up = _product(b, parts, "up", cur, slots, il)
        gate = _product(b, parts, "gate", cur, slots, il)
    act = b.name(getattr(b, glu)(gate, up), f"ffn_moe_{glu}", il)
    out = _product(b, parts, "down", act, slots, il)
    for scale in scales:
        out = b.name(b.mul(out, scale), "ffn_moe_down_scaled", il)
    return b.expand(b.name(b.mul(out, weights), "ffn_moe_weighted", il))


def _product(
    b: Builder, parts: Mapping[str, Tensor], part: str, cur: Tensor, slots: Tensor, il: int
) -> Tensor:
    """Append the products with the matrices of one part, and its biases."""
    out = b.name(b.mul_mat_id(parts[part], cur, slots), f"ffn_moe_{part}", il)
    stack = parts.get(f"{part}_bias")
    if stack is None:
        return out
    bias = b.view(stack, (stack.ne[0], stack.ne[2]), (stack.nb[2],))
    # CUDA's kernels for a product and its biases expect these next to each other, which they are
    # not in slots: there the view is between both nodes, so that they are kernels of their own
    if stack.nb[2] == 4 * stack.ne[0]:
        b.expand(bias)
    return b.name(b.add_id(out, bias, slots), f"ffn_moe_{part}_biased", il)


def _factor(b: Builder, weights: Tensor, i: int) -> Tensor:
    """Append a copy of factor i of each choice: F32 [1, n_expert_used, n_tokens]."""
    ne, strides = (1, *weights.ne[1:3]), (weights.nb[1], weights.nb[2])
    return b.cont(b.view(weights, ne, strides, i * weights.nb[0]))


def build_ffn(
    b: Builder, w: Weights, cur: Tensor, il: int, suffix: str = "", glu: str = "swiglu",
    in_f32: bool = False,
) -> Tensor:  # fmt: skip
    """Append an FFN: F32 [n_embd, n_tokens] in and out; suffix: see `ffn_tensors`.

    glu, in_f32: see `Architecture.glu` and `sums_in_f32`.

    Source: mirrors llama.cpp src/llama-graph.cpp build_ffn.
    """
    up = b.name(b.mul_mat(w[f"ffn_up{suffix}.weight"], cur), "ffn_up", il)
    gate = b.name(b.mul_mat(w[f"ffn_gate{suffix}.weight"], cur), "ffn_gate", il)
    act = b.name(getattr(b, glu)(gate, up), f"ffn_{glu}", il)
    return b.name(b.mul_mat(w[f"ffn_down{suffix}.weight"], act, in_f32), "ffn_out", il)


def build_shared_expert(
    b: Builder, w: Weights, cur: Tensor, il: int, in_f32: bool = False, name: str = "ffn_shexp"
) -> Tensor:
    """Append the shared expert, scaled by its gate, if any: F32 [n_embd, n_tokens] in and out.

    in_f32: see `Architecture.sums_in_f32`. name: of the node before the gate.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp build_layer_ffn.
    """
    out = b.name(build_ffn(b, w, cur, il, "_shexp", in_f32=in_f32), name, il)
    if "ffn_gate_inp_shexp.weight" not in w:
        return out
    gate = b.name(b.mul_mat(w["ffn_gate_inp_shexp.weight"], cur), "shared_expert_gate", il)
    gate = b.name(b.sigmoid(gate), "shared_expert_gate_sigmoid", il)
    return b.name(b.mul(out, gate), "ffn_shexp_gated", il)
