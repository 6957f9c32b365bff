"""Graphs of the prediction (MTP) block: chains of drafted tokens, and its K and V of known ones.

At position p the block takes the embedding of the token there and what the model's last layer put
out for the position before, and predicts the token of position p + 1. Behind the last known token
it takes its own output instead, and its own prediction as the token: a chain of n tokens is one
graph.

    rows    K and V of known positions; nothing else of the block matters to later ones
    chain   one step after another: block, head, argmax, embedding of the argmax
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..arch.inputs import PassInputs, PassShape
from ..arch.mtp import build_block_input
from ..ggml.choose import WINNER_WORD
from ..ggml.ops import Builder, Tensor
from ..resident.mtp import MtpBlock
from .experts import build_fetched_slots
from .layer import build_input_norm, build_mixer_router, build_moe

Keep = Callable[[Tensor, int], None]


def _block_input(b: Builder, block: MtpBlock, tokens: Tensor, h: Tensor) -> Tensor:
    hp, table = block.stage.hp, block.embeddings
    return build_block_input(b, hp, block.weights, table, tokens, h)


@dataclass(frozen=True)
class KnownRows:
    """The inputs of known positions.

    tokens I32 [n]; pos I32 [n]; kv_idx I64 [n], rows of the caches. Of accepted rows also: sources
    I32 [n], the row of each in the ring of hidden states; last I32 [1], the number of the last of
    these rows; slot I32 [1], the sequence.
    """

    tokens: Tensor
    pos: Tensor
    kv_idx: Tensor
    sources: Tensor
    last: Tensor
    slot: Tensor


def build_known_rows(b: Builder, block: MtpBlock, inp: KnownRows, before: Tensor) -> None:
    """Append the writes of the block's K and V for known positions.

    before F32 [n_embd, n]: l_out of the model's last layer at the position before each, zeros
    before the first.
    """
    stage = block.stage
    hp, il = stage.hp, stage.layers.start
    h = b.norm(before, block.output_norm, hp.f_norm_rms_eps)
    x = _block_input(b, block, inp.tokens, h)
    cur = build_input_norm(b, stage, x, il)
    hp.keys_values(b, block.weights, stage.state, inp.pos, inp.kv_idx, cur, il)


def build_taken_rows(
    b: Builder, block: MtpBlock, inp: KnownRows, last_out: Tensor, taken: Tensor
) -> None:
    """Append the same for accepted rows; taken F32 [n_embd, n]: l_out of the last layer there.

    last_out F32 [n_embd, n_seq]: that of the position before these, and afterwards of the last.
    """
    n = inp.tokens.ne[0]
    before = b.get_rows(last_out, inp.slot)
    if n > 1:
        before = b.concat(before, b.view(taken, (taken.ne[0], n - 1), (taken.nb[1],)), 1)
    build_known_rows(b, block, inp, b.expand(before))
    b.expand(b.set_rows(last_out, b.get_rows(taken, inp.last), inp.slot))


def build_chain(
    b: Builder, block: MtpBlock, token: Tensor, before: Tensor, steps: list[PassInputs],
    n_kv: int, keep_logits: Keep, keep_ids: Keep, choose: Callable[[Tensor, int], Tensor],
) -> None:  # fmt: skip
    """Append the steps of a chain.

    token I32 [1]: the last known token; before F32 [n_embd, 1]: l_out of the model's last layer at
    the position before it. n_kv: as in `PassShape`. keep_logits: called with a step's logits F32
    [n_vocab, 1] and the number of the step; gives the node memory that lasts. keep_ids: the same
    for the experts I32 [n_expert_used, 1] that a step chose, if not all are on the device. choose:
    appends the choice of a token, I32 [1], from logits.
    """
    stage, shape = block.stage, PassShape(1, 1, n_kv, 1)
    il, eps = stage.layers.start, stage.hp.f_norm_rms_eps
    h = b.norm(before, block.output_norm, eps)
    for at, inputs in enumerate(steps):
        x = _block_input(b, block, token, h)
        norm = build_input_norm(b, stage, x, il)
        r = build_mixer_router(b, stage, inputs, shape, x, norm, il)
        slots = _slots(b, block, r.routing.topk, keep_ids, at)
        out = build_moe(b, stage, r.residual, r.post_norm, slots, r.routing.weights, il)
        h = b.name(b.norm(out, block.head.norm, eps), "h_nextn")
        logits = b.expand(b.name(b.mul_mat(block.head.output, h), "result_output"))
        keep_logits(logits, at)
        token = choose(logits, at)


def build_likeliest(b: Builder, block: MtpBlock, logits: Tensor) -> Tensor:
    """Append the choice of the likeliest token of logits F32 [n, 1]: I32, one number."""
    token = b.name(b.argmax(logits), "result_argmax")
    if block.part:  # its rows are not numbered as the tokens are
        token = b.get_rows(block.part.table, token)
    return b.expand(token)


def build_winner(
    b: Builder, logits: Tensor, draws: Tensor, keep: Callable[[Tensor], None]
) -> Tensor:
    """Append the race over logits F32 [n_vocab, 1]: the winner's id, I32 [1].

    draws: I32 [DRAW_WORDS, 1]. keep: gives the candidates memory that is zeros at first: if none
    is listed, there is an id all the same.
    """
    listed = b.name(b.candidates(logits, draws), "result_candidates")
    keep(listed)
    return b.view(b.expand(listed), (1,), (), 4 * WINNER_WORD)


def _slots(b: Builder, block: MtpBlock, ids: Tensor, keep_ids: Keep, at: int) -> Tensor:
    """Append the look-up of the slots of ids I32 [n_expert_used, 1]; missing ones are fetched."""
    if block.experts is None:
        return ids
    ids = b.cont(ids)
    keep_ids(ids, at)
    stage = block.stage
    return build_fetched_slots(
        b, stage.banks, stage.layers.start, b.expand(ids), block.experts.source
    )
