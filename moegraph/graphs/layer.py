"""One layer in two parts: `mixer_router` ends at the router's choice, `moe` is the expert FFN.

The input norm is a part of its own, so that the graph that ends a layer can compute it for the
next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arch.base import Routing
from ..arch.blocks.experts import build_expert_rows
from ..arch.inputs import PassInputs, PassShape
from ..errors import InternalError
from ..ggml.ops import Builder, Tensor
from ..resident.stage import Stage
from .experts import build_expert_sum


@dataclass(frozen=True)
class Routed:
    """Results of mixer and router; residual and post_norm are F32 [n_embd, n_tokens]."""

    residual: Tensor
    post_norm: Tensor
    routing: Routing


def build_input_norm(b: Builder, stage: Stage, x: Tensor, il: int) -> Tensor:
    """Append the norm of layer il's input F32 [n_embd, n_tokens]; after the last: the head's."""
    weights, eps = stage.weights, stage.hp.f_norm_rms_eps
    if il < stage.layers.stop:
        norm = b.norm(x, weights.layer(il)["attn_norm.weight"], eps)
        return b.expand(b.name(norm, "attn_norm", il))
    if weights.head is None:
        raise InternalError(f"the stage of {stage.layers} has no head")
    return b.expand(b.name(b.norm(x, weights.head.norm, eps), "h_nextn"))


def build_hidden(b: Builder, stage: Stage, x: Tensor, norm: Tensor, il: int) -> None:
    """Keep what a drafter wants of layer il's input x and its norm; n_layer means the head.

    x, norm: F32 [n_embd, n_tokens], both appended already. The input of a layer is the output of
    the one before once it is complete, also where missing experts were added to it.
    """
    if il > 0:
        stage.hidden_states.keep(b, x, il - 1)
    if il == stage.hp.n_layer:
        stage.hidden_states.keep(b, norm, il)


def build_last_hidden(
    b: Builder, stage: Stage, inp: PassInputs, shape: PassShape, x: Tensor, norm: Tensor
) -> None:
    """Keep what a drafter wants of the head's input x and its norm, and copy it to the ring.

    The rows of a verify pass come to the ring when some of them are committed.
    """
    build_hidden(b, stage, x, norm, stage.hp.n_layer)
    if inp.hidden_rows is not None:
        stage.hidden_states.append(b, inp.hidden_rows, shape.n_tokens)


def build_mixer_router(
    b: Builder, stage: Stage, inp: PassInputs, shape: PassShape, x: Tensor, cur: Tensor, il: int
) -> Routed:
    """Append mixer, residual, norm and router for the layer input x and its norm cur.

    x, cur: F32 [n_embd, n_tokens].
    """
    hp, w = stage.hp, stage.weights.layer(il)
    cur = hp.mixer(b, w, stage.state, inp, shape, cur, il)
    # a view, so that ggml's CUDA backend does not put a single row's product and this sum into one
    # kernel: ours for the product, and for the sum with the norm after it, take less time
    cur = b.reshape(cur, hp.n_embd, x.ne[1])
    residual, post_norm = hp.ffn_input(b, w, cur, x, il)
    return Routed(residual, post_norm, hp.router(b, w, residual, post_norm, il))


def build_dense_layer(
    b: Builder, stage: Stage, inp: PassInputs, shape: PassShape, x: Tensor, cur: Tensor, il: int
) -> Tensor:
    """Append a layer without a router for its input x and the norm cur; return l_out.

    All are F32 [n_embd, n_tokens].
    """
    hp, w = stage.hp, stage.weights.layer(il)
    cur = hp.mixer(b, w, stage.state, inp, shape, cur, il)
    residual, cur = hp.ffn_input(b, w, b.reshape(cur, hp.n_embd, x.ne[1]), x, il)
    return hp.layer_end(b, w, residual, cur, None, il)


def build_moe(
    b: Builder, stage: Stage, residual: Tensor, post_norm: Tensor, slots: Tensor, weights: Tensor,
    il: int,
) -> Tensor:  # fmt: skip
    """Append the expert FFN and the residual; return l_out F32 [n_embd, n_tokens].

    slots I32 [n_expert_used, n_tokens], where a slot < 0 adds nothing; weights F32 [n_factors,
    n_expert_used, n_tokens].
    """
    bank, moe = stage.banks.layer(il), None
    if bank.n_slots:
        rows = build_expert_rows(b, bank.parts, post_norm, slots, weights, il, stage.hp.glu)
        moe = build_expert_sum(b, rows, il)
    return stage.hp.layer_end(b, stage.weights.layer(il), residual, post_norm, moe, il)
