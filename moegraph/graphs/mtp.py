"""Graphs of the prediction (MTP) block, and their memory: chains of tokens, K and V of known ones.

At position p the block takes the embedding of the token there and what the model's last layer put
out for the position before, and predicts the token of position p + 1. Behind the last known token
it takes its own output instead, and its own prediction as the token: a chain of n tokens is one
graph.

    rows    K and V of known positions; nothing else of the block matters to later ones
    chain   one step after another: block, head, argmax, embedding of the argmax
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arch.blocks.length import spans
from ..arch.inputs import PAGED, PassInputs, PassShape
from ..arch.mtp import build_block_input
from ..ggml.choose import DRAW_WORDS, WINNER_WORD
from ..ggml.handles import Context, Owner
from ..ggml.memory import Block, Sender
from ..ggml.ops import F16, F32, I32, I64, Builder, Tensor
from ..resident.mtp import MtpBlock
from ..units import round_up
from .head import no_races, race_words
from .layer import build_fetched_slots, build_input_norm, build_mixer_router, build_moe
from .paged import ROW_WORDS, fill_rows
from .rows import fill_mask, gathered_rows

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


# Host copies of inputs that may be under way at once.
_N_HOST = 4
# Words; every input begins at a multiple.
_ALIGN = 64
_RESULTS = ("tokens", "ids", "listed", "draws")


class MtpMemory(Owner):
    """Memory for graphs over at most max_rows known rows, and for chains of at most max_draft.

    before: F32 [n_embd, max_rows], l_out of the model at the position before each known row.
    logits: F32 [n_vocab, max_draft]. The other results of a chain: tokens I32 [max_draft], their
    argmax; ids I32 [n_expert_used, max_draft], the experts of each step; listed I32 [words,
    max_draft], their candidates. draws, races: I32 [DRAW_WORDS, max_draft], for candidates without
    a race, and with one.
    """

    def __init__(self, block: MtpBlock, max_rows: int, max_draft: int, is_paged: bool) -> None:
        """is_paged: chains read K and V through pages."""
        device, hp, self._state = block.stage.device, block.stage.hp, block.stage.state
        self.max_rows, self.max_draft = max_rows, max_draft
        self._gathers = self._state.n_seq > 1
        n_vocab, longest = int(block.head.output.ne[1]), PAGED if is_paged else self._state.n_ctx
        n_words = max(self._n_known(max_rows), self._n_chain(max_draft, longest))
        shapes = {
            "inputs": (1, n_words),
            "before": (hp.n_embd, max_rows),
            "logits": (n_vocab, max_draft),
            "tokens": (1, max_draft),
            "ids": (hp.n_expert_used, max_draft),
            "draws": (DRAW_WORDS, max_draft),
            "races": (DRAW_WORDS, max_draft),
            "listed": (_listed_words(n_vocab), max_draft),
        }
        what, remedy = "drafts of the MTP block", "draft fewer tokens"
        self._block = self.own(Block(device, shapes, what, remedy))
        self._tensors, self.n_bytes = self._block.tensors, self._block.n_bytes
        self.before, self.logits = self._tensors["before"], self._tensors["logits"]
        self._block.set("draws", no_races(max_draft))
        self._races = self.own(Sender(device, 4 * DRAW_WORDS * max_draft))
        self._senders = [self.own(Sender(device, 4 * n_words)) for _ in range(_N_HOST)]

    @staticmethod
    def _n_known(n: int) -> int:
        return 5 * round_up(n, _ALIGN) + 2 * _ALIGN

    def _n_chain(self, n: int, n_kv: int) -> int:
        """Return the words of the inputs of a chain: see `chain_leaves`."""
        return self._attention(n) + self._n_attention(n, n_kv)

    @staticmethod
    def _attention(n: int) -> int:
        """Return where the inputs of attention begin; before them: token, slot, pos and kv_idx."""
        return 2 * _ALIGN + 3 * round_up(n, _ALIGN)

    def _n_attention(self, n: int, n_kv: int) -> int:
        if n_kv == PAGED:
            return round_up(self._n_pages, _ALIGN) + ROW_WORDS * n
        return n * n_kv // 2 + n_kv * self._gathers

    @property
    def _n_pages(self) -> int:
        return int(self._state.pool.table.shape[1])

    def _leaf(self, b: Builder, word: int, dtype: int, *ne: int) -> Tensor:
        return self._block.leaf(b, "inputs", dtype, *ne, at=4 * word)

    def before_leaf(self, b: Builder, n: int) -> Tensor:
        """Return a leaf that reads the first n rows of `before`."""
        return self._block.leaf(b, "before", F32, self.before.ne[0], n)

    def known_leaves(self, b: Builder, n: int) -> KnownRows:
        """Return the inputs of n known rows."""
        room = round_up(n, _ALIGN)
        return KnownRows(
            tokens=self._leaf(b, 0, I32, n),
            pos=self._leaf(b, room, I32, n),
            kv_idx=self._leaf(b, 2 * room, I64, n),
            sources=self._leaf(b, 4 * room, I32, n),
            last=self._leaf(b, 5 * room, I32, 1),
            slot=self._leaf(b, 5 * room + _ALIGN, I32, 1),
        )

    def send_known(
        self, slot: int, tokens: npt.NDArray[np.int32], first: int, n_padded: int,
        sources: Sequence[int] | npt.NDArray[np.int64] = (0,),
    ) -> None:  # fmt: skip
        """Upload the inputs of a sequence's known rows from position first on, and padding.

        sources: of accepted rows, where their outputs are in the ring of hidden states.
        """
        n, room, words = len(tokens), round_up(n_padded, _ALIGN), self._next_words()
        places = first + np.arange(n)
        words[: self._n_known(n_padded)] = 0
        words[:n], words[room : room + n] = tokens, places
        rows = words[2 * room : 2 * room + 2 * n_padded].view(np.int64)
        rows[:n], rows[n:] = self._state.pool.run(slot, first, n), self._state.spare_row
        words[4 * room : 4 * room + len(sources)] = sources
        words[5 * room], words[5 * room + _ALIGN] = n - 1, slot
        self._send(self._n_known(n_padded))

    def chain_leaves(
        self, b: Builder, n: int, n_kv: int
    ) -> tuple[Tensor, Tensor, list[PassInputs]]:
        """Return the inputs of a chain of n steps: the first token, the slot, and each step's."""
        token, slot = (self._leaf(b, at * _ALIGN, I32, 1) for at in range(2))
        pos, idx, at = 2 * _ALIGN, 2 * _ALIGN + round_up(n, _ALIGN), self._attention(n)
        pages = kv_rows = None
        if n_kv == PAGED:
            pages = self._leaf(b, at, I32, self._n_pages, 1)
            at += round_up(self._n_pages, _ALIGN)
        elif self._gathers:
            kv_rows = self._leaf(b, at + n * n_kv // 2, I32, n_kv)
            spans(b, n_kv, kv_rows, 0, 1, 2, 3)

        def step(i: int) -> PassInputs:
            mask = rows = None
            if n_kv == PAGED:
                rows = self._leaf(b, at + i * ROW_WORDS, I32, ROW_WORDS, 1)
            else:
                mask = self._leaf(b, at + i * n_kv // 2, F16, n_kv, 1, 1, 1)
                spans(b, n_kv, mask, 0, 1, 2, 3)
            place, row = self._leaf(b, pos + i, I32, 1), self._leaf(b, idx + 2 * i, I64, 1)
            return PassInputs(
                place, row, slot, kq_mask=mask, kv_rows=kv_rows, pages=pages, rows=rows
            )

        return token, slot, [step(i) for i in range(n)]

    def send_chain(self, slot: int, token: int, n: int, n_kv: int, length: int) -> None:
        """Upload the inputs of a chain of n steps; the sequence has pages for them.

        n_kv: what its graph was built for. length: the positions that are read, at most n_kv.
        """
        words, state = self._next_words(), self._state
        first = state.n_past[slot]
        places, idx = first + np.arange(n), 2 * _ALIGN + round_up(n, _ALIGN)
        words[0], words[_ALIGN] = token, slot
        words[2 * _ALIGN : 2 * _ALIGN + n] = places
        words[idx : idx + 2 * n].view(np.int64)[:] = state.pool.run(slot, first, n)
        at = self._attention(n)
        end = at + self._n_attention(n, n_kv)
        if n_kv == PAGED:
            words[at : at + self._n_pages] = state.pool.table[slot]
            fill_rows(words[end - ROW_WORDS * n : end], [first], n, None)
        else:
            mask = words[at : at + n * n_kv // 2].view(np.float16)
            fill_mask(mask.reshape(1, n, n_kv)[:, :, :length], [first])
            if self._gathers:
                rows = words[end - n_kv : end]
                rows[:length] = gathered_rows(state.pool, (slot,), length)[0]
        self._send(end)

    def _next_words(self) -> npt.NDArray[np.int32]:
        """Return host memory that no upload reads any more; `_send` sends it."""
        self._senders.append(self._senders.pop(0))
        return self._senders[-1].begin().view(np.int32)

    def _send(self, n_words: int) -> None:
        self._senders[-1].send(self._tensors["inputs"], 4 * n_words)

    def keep(self, name: str, node: Tensor, at: int) -> None:
        """Have a node write to row `at` of the results of this name: logits, tokens, ids, listed.

        It is F32 [n_vocab, 1], I32 [1], I32 [n_expert_used, 1], or I32 [words, 1].
        """
        self._block.put(node, name, self._tensors[name].nb[1] * at)

    def race_leaf(self, b: Builder, at: int) -> Tensor:
        """Return the leaf with what the race of a step depends on, I32 [DRAW_WORDS, 1]."""
        return self._block.leaf(b, "races", I32, DRAW_WORDS, 1, at=4 * DRAW_WORDS * at)

    def send_races(self, temperature: float, keys: Sequence[int]) -> None:
        """Upload what the races of some steps depend on; the last chain has ended."""
        self._races.put(self._tensors["races"], race_words(temperature, keys))

    def result_leaves(self, b: Builder, n: int) -> dict[str, Tensor]:
        """Return leaves for what n steps leave: logits, tokens, ids, listed; and for draws."""
        shapes = {name: (t.ne[0], n) if t.ne[0] > 1 else (n,) for name, t in self._tensors.items()}
        found = {name: self._block.leaf(b, name, I32, *shapes[name]) for name in _RESULTS}
        return {"logits": self._block.leaf(b, "logits", F32, *shapes["logits"]), **found}


def _listed_words(n_vocab: int) -> int:
    """Return the words of the candidates of a row of logits."""
    with Context(8, 4) as context:
        b = Builder(context, 4)
        draws = b.leaf(I32, (DRAW_WORDS, 1), "draws")
        return int(b.candidates(b.leaf(F32, (n_vocab, 1), "logits"), draws).ne[0])
