"""Look-ups of the slots of routed experts, and the sum of their rows."""

from __future__ import annotations

from ..arch.inputs import PassInputs
from ..errors import InternalError
from ..ggml.lib import C
from ..ggml.ops import F32, I32, Builder, Tensor
from ..resident.bank import ExpertBanks


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
