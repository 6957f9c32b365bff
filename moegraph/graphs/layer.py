"""One layer in two parts: `mixer_router` ends at the router's choice, `moe` is the expert FFN.

Between them the slots of experts are looked up.

The input norm is a part of its own, so that the graph that ends a layer can compute it for the
next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arch.base import Routing
from ..arch.blocks.experts import build_expert_rows
from ..arch.inputs import PassInputs, PassShape
from ..errors import InternalError
from ..ggml.lib import C
from ..ggml.ops import F32, I32, Builder, Tensor
from ..resident.bank import ExpertBanks
from ..resident.stage import Stage


def build_slots(b: Builder, table: Tensor, ids: Tensor) -> Tensor:
    """Append the look-up of the slots of ids I32 [n_expert_used, n_tokens]; same shape.

    table: I32 [1, n_expert], expert -> slot or -1.
    """
    k, n_tokens = ids.ne[0], ids.ne[1]
    if n_tokens > 1:
        ids = b.cont(ids)  # a view of the first columns of each row
    slots = b.get_rows(table, b.reshape(ids, k * n_tokens))
    return b.reshape(slots, k, n_tokens)


def build_fetched_slots(
    b: Builder, banks: ExpertBanks, il: int, ids: Tensor, source: Tensor
) -> Tensor:
    """Append the look-up of the slots of ids I32 [n_expert_used, n_tokens], and fetch; same shape.

    source: packed experts of layer il, F32 [bytes / 4, n_expert], in pinned memory. Missing experts
    go into the slots of the layer's victim list; those beyond the list get slot -1.
    """
    k, n_tokens, rows = ids.ne[0], ids.ne[1], banks.layer(il).rows
    if rows is None:
        raise InternalError(f"layer {il} has no slots to fetch into")
    if n_tokens > 1:
        ids = b.cont(ids)  # a view of the first columns of each row
    n, victims = k * n_tokens, banks.victim_lists[il]
    if n < banks.n_victims:
        victims = b.view(victims, (2, n), (victims.nb[1],))
    slots = b.fetch_rows(banks.tables[il], b.reshape(ids, n), victims, source, rows)
    return b.reshape(slots, k, n_tokens)


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


def build_expert_sum(b: Builder, rows: Tensor, il: int) -> Tensor:
    """Append the sum over each row's experts in routing order: F32 [n_embd, n_tokens].

    All views come before the sums: CUDA then fuses the sums with the product before them.
    """
    n_embd, k, n_tokens = rows.ne[0], rows.ne[1], rows.ne[2]
    parts = [
        b.expand(b.view(rows, (n_embd, n_tokens), (rows.nb[2],), i * rows.nb[1])) for i in range(k)
    ]
    out = parts[0] if k > 1 else b.cont(parts[0])
    for part in parts[1:]:
        out = b.expand(b.add(out, part))
    return b.name(out, "ffn_moe_out", il)


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
    # a view, so that no kernel of upstream takes in a single row's product and this sum: ours take
    # less time, for the product with the sum, or for the sum with the norm after it
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
