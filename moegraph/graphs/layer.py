"""One layer in two parts: `mixer_router` ends at the router's choice, `moe` is the expert FFN.

The input norm is a part of its own, so that the graph that ends a layer can compute it for the
next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InternalError
from ..ggml.ops import Builder, Tensor
from ..resident.stage import Stage
from .attention import build_attention
from .deltanet import build_deltanet
from .experts import build_routed_experts, build_shared_expert
from .inputs import PassInputs, PassShape
from .router import Routing, build_router
from .tree import build_tree_deltanet


@dataclass(frozen=True)
class Routed:
    """Results of mixer and router; residual and post_norm are F32 [n_embd, n_tokens]."""

    residual: Tensor
    post_norm: Tensor
    routing: Routing


def build_input_norm(b: Builder, stage: Stage, x: Tensor, il: int) -> Tensor:
    """Append the norm of layer il's input F32 [n_embd, n_tokens]; the last layer's + 1: the head.

    Raises:
        InternalError: the stage has no head.
    """
    weights, eps = stage.weights, stage.hp.f_norm_rms_eps
    if il < stage.layers.stop:
        norm = b.norm(x, weights.layer(il)["attn_norm.weight"], eps)
        return b.expand(b.name(norm, "attn_norm", il))
    if weights.head is None:
        raise InternalError(f"the stage of {stage.layers} has no head")
    return b.expand(b.name(b.norm(x, weights.head.norm, eps), "h_nextn"))


def build_tap(b: Builder, stage: Stage, x: Tensor, norm: Tensor, il: int) -> None:
    """Keep what a drafter wants of layer il's input x and its norm; n_layer means the head.

    x, norm: F32 [n_embd, n_tokens], both appended already. The input of a layer is the output of
    the one before once it is complete, also where missing experts were added to it.
    """
    if il > 0:
        stage.taps.keep(b, x, il - 1)
    if il == stage.hp.n_layer:
        stage.taps.keep(b, norm, il)


def build_last_tap(
    b: Builder, stage: Stage, inp: PassInputs, shape: PassShape, x: Tensor, norm: Tensor
) -> None:
    """Keep what a drafter wants of the head's input x and its norm, and the taps in their ring.

    The rows of a verify pass come to the ring when some of them are committed.
    """
    build_tap(b, stage, x, norm, stage.hp.n_layer)
    if inp.taps is not None:
        stage.taps.append(b, inp.taps, shape.n_tokens)


def build_mixer_router(
    b: Builder,
    stage: Stage,
    inp: PassInputs,
    shape: PassShape,
    x: Tensor,
    cur: Tensor,
    il: int,
) -> Routed:
    """Append mixer, residual, norm and router for the layer input x and its norm cur.

    x, cur: F32 [n_embd, n_tokens].
    """
    w, eps = stage.weights.layer(il), stage.hp.f_norm_rms_eps
    if stage.hp.is_recurrent(il):
        if inp.parents is None:
            cur = build_deltanet(b, stage.hp, w, stage.state, shape, inp.slots, cur, il, inp.joint)
        else:
            args = (b, stage.hp, w, stage.state, shape, inp.slots, inp.parents)
            cur, rows = build_tree_deltanet(*args, cur, il)
            stage.state.drafts.keep(b, (rows.qkv, rows.gate, rows.beta), il)
    else:
        cur = build_attention(b, stage.hp, w, stage.state, inp, shape, cur, il)
    # a view, so that ggml's CUDA backend does not put a single row's product and this sum into one
    # kernel: ours for the product, and for the sum with the norm behind it, take less time
    cur = b.reshape(cur, stage.hp.n_embd, x.ne[1])
    residual = b.name(b.add(cur, x), "attn_residual", il)
    post_norm = b.norm(residual, w["post_attention_norm.weight"], eps)
    b.name(post_norm, "attn_post_norm", il)
    return Routed(residual, post_norm, build_router(b, stage.hp, w, post_norm, il))


def build_moe(
    b: Builder,
    stage: Stage,
    residual: Tensor,
    post_norm: Tensor,
    slots: Tensor,
    weights: Tensor,
    il: int,
) -> Tensor:
    """Append the expert FFN and the residual; return l_out F32 [n_embd, n_tokens].

    slots I32 [n_expert_used, n_tokens]; weights F32 [1, n_expert_used, n_tokens].
    """
    bank, moe = stage.banks.layer(il), None
    if bank.n_slots:
        moe = build_routed_experts(b, stage, post_norm, slots, weights, il)
    return build_layer_end(b, stage, residual, post_norm, moe, il)


def build_layer_end(
    b: Builder, stage: Stage, residual: Tensor, post_norm: Tensor, moe: Tensor | None, il: int
) -> Tensor:
    """Append shared expert and residual; add moe, the sum of the routed experts, if given.

    All are F32 [n_embd, n_tokens].
    """
    out = build_shared_expert(b, stage.weights.layer(il), post_norm, il)
    if moe is not None:
        out = b.name(b.add(moe, out), "ffn_out", il)
    return b.expand(b.name(b.add(out, residual), "l_out", il))
