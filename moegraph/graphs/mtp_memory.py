"""Fixed memory for the graphs of the MTP block: their inputs, and what chains leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch.blocks.length import spans
from ..arch.inputs import PAGED
from ..ggml.choose import DRAW_WORDS
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F16, F32, I32, I64, Builder, Tensor
from ..resident.mtp import MtpBlock
from ..units import round_up
from .mtp import KnownRows, StepInputs
from .paged import ROW_WORDS, fill_rows
from .rows import fill_mask, gathered_rows

# Host copies of inputs that may be under way at once.
_N_HOST = 4
# Words; every input begins at a multiple.
_ALIGN = 64


class MtpMemory:
    """Memory for graphs over at most max_rows known rows, and for chains of at most max_draft.

    before: F32 [n_embd, max_rows], l_out of the model at the position before each known row.
    logits: F32 [n_vocab, max_draft]; tokens: I32 [max_draft], their argmax; ids: I32
    [n_expert_used, max_draft], the experts of each step; draws: I32 [DRAW_WORDS, max_draft],
    constant, for candidates without a race; races: the same for races; listed: I32 [words,
    max_draft], their candidates.
    """

    def __init__(self, block: MtpBlock, max_rows: int, max_draft: int, is_paged: bool) -> None:
        """is_paged: chains read K and V through pages."""
        stage = block.stage
        self._device, self._state, hp = stage.device, stage.state, stage.hp
        self.max_rows, self.max_draft = max_rows, max_draft
        self._n_vocab = int(block.head.output.ne[1])
        self._gathers = stage.state.n_seq > 1
        longest = PAGED if is_paged else stage.state.n_ctx
        n_words = max(self._n_known(max_rows), self._n_chain(max_draft, longest))
        self._context = Context(8)
        self._n_used = hp.n_expert_used
        shapes = {
            "inputs": (I32, (n_words,)),
            "before": (F32, (hp.n_embd, max_rows)),
            "logits": (F32, (self._n_vocab, max_draft)),
            "tokens": (I32, (max_draft,)),
            "ids": (I32, (hp.n_expert_used, max_draft)),
            "draws": (I32, (DRAW_WORDS, max_draft)),
            "races": (I32, (DRAW_WORDS, max_draft)),
            "listed": (I32, (_listed_words(self._n_vocab), max_draft)),
        }
        self._row_bytes = {
            name: 4 * (ne[0] if len(ne) > 1 else 1) for name, (_, ne) in shapes.items()
        }
        made, offsets, size = {}, {}, 0
        for name, (dtype, ne) in shapes.items():
            made[name] = C.ggml_new_tensor(self._context.ptr, dtype, len(ne), list(ne))
            offsets[name] = size
            size = round_up(size + C.ggml_nbytes(made[name]), stage.device.alignment)
        self._buffer = stage.device.buffer(size, "drafts of the MTP block", "draft fewer tokens")
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        self._offsets, self.n_bytes = offsets, size
        for name, tensor in made.items():
            place(self._buffer, tensor, offsets[name])
        self.before: Tensor = made["before"]
        self.logits: Tensor = made["logits"]
        self.tokens: Tensor = made["tokens"]
        self._inputs, self._races = made["inputs"], made["races"]
        draws = np.full((max_draft, DRAW_WORDS), -1, dtype=np.int32)
        draws[:, 0] = 0  # no temperature, no race
        C.ggml_backend_tensor_set(made["draws"], ffi.from_buffer(draws), 0, draws.nbytes)
        self._races_host = stage.device.host_buffer(draws.nbytes)
        self._race_words = self._races_host.array[: draws.nbytes].view(np.int32)
        self._race_words = self._race_words.reshape(draws.shape)
        self._race_words[:] = -1
        self._host = stage.device.host_buffer(4 * n_words * _N_HOST)
        self._words = self._host.array[: 4 * n_words * _N_HOST].view(np.int32)
        self._words = self._words.reshape(_N_HOST, n_words)
        self._sent = [stage.device.event() for _ in range(_N_HOST)]
        self._turn = 0

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

    def _leaf(self, b: Builder, dtype: int, ne: tuple[int, ...], name: str, word: int) -> Tensor:
        tensor = b.leaf(dtype, ne, name)
        place(self._buffer, tensor, self._offsets["inputs"] + 4 * word)
        return tensor

    def before_leaf(self, b: Builder, n: int) -> Tensor:
        """Return a leaf that reads the first n rows of `before`."""
        rows = b.leaf(F32, (self.before.ne[0], n), "mtp_before")
        place(self._buffer, rows, self._offsets["before"])
        return rows

    def known_leaves(self, b: Builder, n: int) -> KnownRows:
        """Return the inputs of n known rows."""
        room = round_up(n, _ALIGN)
        return KnownRows(
            tokens=self._leaf(b, I32, (n,), "inp_tokens", 0),
            pos=self._leaf(b, I32, (n,), "inp_pos", room),
            kv_idx=self._leaf(b, I64, (n,), "inp_kv_idx", 2 * room),
            sources=self._leaf(b, I32, (n,), "inp_sources", 4 * room),
            last=self._leaf(b, I32, (1,), "inp_last", 5 * room),
            slot=self._leaf(b, I32, (1,), "inp_slot", 5 * room + _ALIGN),
        )

    def send_known(
        self, slot: int, tokens: npt.NDArray[np.int32], first: int, n_padded: int,
        sources: Sequence[int] | npt.NDArray[np.int64] = (0,),
    ) -> None:  # fmt: skip
        """Upload the inputs of a sequence's known rows from position first on, and padding.

        sources: of accepted rows, where their outputs are in the ring of taps.
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
    ) -> tuple[Tensor, Tensor, list[StepInputs]]:
        """Return the inputs of a chain of n steps: the first token, the slot, and each step's."""
        token, slot = (self._leaf(b, I32, (1,), "inp_token", at * _ALIGN) for at in range(2))
        pos, idx, at = 2 * _ALIGN, 2 * _ALIGN + round_up(n, _ALIGN), self._attention(n)
        pages = kv_rows = None
        if n_kv == PAGED:
            pages = self._leaf(b, I32, (self._n_pages, 1), "inp_pages", at)
            at += round_up(self._n_pages, _ALIGN)
        elif self._gathers:
            kv_rows = self._leaf(b, I32, (n_kv,), "inp_kv_rows", at + n * n_kv // 2)
            spans(b, n_kv, kv_rows, 0, 1, 2, 3)

        def step(i: int) -> StepInputs:
            mask = rows = None
            if n_kv == PAGED:
                rows = self._leaf(b, I32, (ROW_WORDS, 1), "inp_rows", at + i * ROW_WORDS)
            else:
                mask = self._leaf(b, F16, (n_kv, 1, 1, 1), "inp_kq_mask", at + i * n_kv // 2)
                spans(b, n_kv, mask, 0, 1, 2, 3)
            return StepInputs(
                pos=self._leaf(b, I32, (1,), "inp_pos", pos + i),
                kv_idx=self._leaf(b, I64, (1,), "inp_kv_idx", idx + 2 * i),
                slots=slot, kq_mask=mask, kv_rows=kv_rows, pages=pages, rows=rows,
            )  # fmt: skip

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
        """Return host memory that no upload reads any more."""
        self._turn = (self._turn + 1) % _N_HOST
        sent = self._sent[self._turn]
        if sent:
            sent.wait()
        words: npt.NDArray[np.int32] = self._words[self._turn]
        return words

    def _send(self, n_words: int) -> None:
        at, sent = 4 * self._turn * self._words.shape[1], self._sent[self._turn]
        self._device.send(self._inputs, self._host, at, 4 * n_words)
        if sent:
            C.ggml_backend_event_record(sent.ptr, self._device.compute.ptr)

    def keep(self, name: str, node: Tensor, at: int) -> None:
        """Have a node write to row `at` of the results of this name: logits, tokens, ids, listed.

        It is F32 [n_vocab, 1], I32 [1], I32 [n_expert_used, 1], or I32 [words, 1].
        """
        place(self._buffer, node, self._offsets[name] + self._row_bytes[name] * at)

    def race_leaf(self, b: Builder, at: int) -> Tensor:
        """Return the leaf with what the race of a step depends on, I32 [DRAW_WORDS, 1]."""
        leaf = b.leaf(I32, (DRAW_WORDS, 1), "inp_draws")
        self.keep("races", leaf, at)
        return leaf

    def send_races(self, temperature: float, keys: Sequence[int]) -> None:
        """Upload what the races of some steps depend on; the last chain has ended."""
        n, words = len(keys), self._race_words
        with np.errstate(over="ignore"):
            words[:n, 0] = np.float32(1.0 / temperature).view(np.int32)
        words[:n, 1:3] = np.array(keys, dtype=np.uint64).view(np.int32).reshape(n, 2)
        self._device.send(self._races, self._races_host, 0, 4 * DRAW_WORDS * n)

    def result_leaves(self, b: Builder, n: int) -> dict[str, Tensor]:
        """Return leaves for what n steps leave: logits, tokens, ids, listed; and for draws."""
        shapes = {
            "logits": (F32, (self._n_vocab, n)),
            "tokens": (I32, (n,)),
            "ids": (I32, (self._n_used, n)),
            "draws": (I32, (DRAW_WORDS, n)),
            "listed": (I32, (self._row_bytes["listed"] // 4, n)),
        }
        leaves = {name: b.leaf(dtype, ne, f"mtp_{name}") for name, (dtype, ne) in shapes.items()}
        for name, leaf in leaves.items():
            place(self._buffer, leaf, self._offsets[name])
        return leaves

    def close(self) -> None:
        """Free the memory."""
        host = self._host, self._races_host
        parts: list[Any] = [*self._sent, *host, self._buffer, self._context]
        for part in parts:
            if part:
                part.close()


def _listed_words(n_vocab: int) -> int:
    """Return the words of the candidates of a row of logits."""
    with Context(8, 4) as context:
        b = Builder(context, 4)
        draws = b.leaf(I32, (DRAW_WORDS, 1), "draws")
        return int(b.candidates(b.leaf(F32, (n_vocab, 1), "logits"), draws).ne[0])
