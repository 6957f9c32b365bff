"""Routed experts over a bank of slots, and their sum."""

from __future__ import annotations

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..arch.base import Architecture
from ..arch.blocks.experts import build_expert_rows
from ..arch.inputs import PassInputs
from ..errors import InternalError
from ..ggml.lib import C
from ..ggml.ops import F32, I32, Builder, Tensor
from ..resident.bank import Bank, ExpertBanks
from ..resident.layout import PARTS
from ..resident.stage import Stage
from ..units import round_up

# What our kernels on CUDA compute: types, and choices of experts (moegraph_rows_type and
# MOEGRAPH_MAX_SLOTS in native/ggml/src/ggml-cuda).
_OUR_TYPES = {GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}
_MAX_CHOICES = 65536
# Other quantized types have tiles, which are worth being narrowed for more choices than the first
# and up to the second number of rows: more fill them. Tiles are then for so many times as many rows
# as an expert has on average (popular ones have more), and for at least _MIN_TILE: fewer tokens go
# to kernels that multiply vectors. Tiles of Q4_K and Q5_K took 0.95 and 0.97 of the time of 320 and
# 512 rows so; 2,048 rows took as long with this spread, and 1.08 times as long with half of it.
_FEW_CHOICES = 512
_MAX_GROUPED = 512
_TILE_SPREAD = 4
_MIN_TILE = 16


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
    return b.name(_summed(b, parts), "ffn_moe_out", il)


def _summed(b: Builder, parts: list[Tensor]) -> Tensor:
    """Append the sum of views, one after the other."""
    out = parts[0]
    for part in parts[1:]:
        out = b.expand(b.add(out, part))
    return out if len(parts) > 1 else b.cont(out)


def build_routed_experts(
    b: Builder, stage: Stage, cur: Tensor, slots: Tensor, weights: Tensor, il: int
) -> Tensor:
    """Append the weighted sum of each row's experts in routing order: F32 [n_embd, n_tokens].

    The layer has slots. cur F32 [n_embd, n_tokens]; slots I32 [n_expert_used, n_tokens], where a
    slot < 0 adds nothing; weights F32 [n_factors, n_expert_used, n_tokens].
    """
    bank, n = stage.banks.layer(il), slots.ne[1]
    n_group = 1
    if not stage.device.can.exact_sums and _have_tiles(bank, n * slots.ne[0]):
        n_group = rows_together(stage.hp, n)
    if n_group > 1:
        return build_grouped_experts(b, stage.hp, bank, cur, slots, weights, n_group, il)
    rows = build_expert_rows(b, bank.parts, cur, slots, weights, il, stage.hp.glu)
    return build_expert_sum(b, rows, il)


def _have_tiles(bank: Bank, n_choices: int) -> bool:
    """Return whether ggml's tiles compute so many choices of a bank's experts on CUDA."""
    kinds = {bank.parts[part].type for part in PARTS if part in bank.parts}
    if n_choices <= _FEW_CHOICES or (n_choices <= _MAX_CHOICES and kinds <= _OUR_TYPES):
        return False
    return all(GGML_QUANT_SIZES[GGMLQuantizationType(kind)][0] > 1 for kind in kinds)


def rows_together(hp: Architecture, n_tokens: int) -> int:
    """Return how many rows `build_grouped_experts` should take as one; 1: it is of no use.

    CUDA makes tiles for as many rows of an expert as there are tokens, and leaves most of a tile
    empty where there are many experts.
    """
    if n_tokens > _MAX_GROUPED or hp.n_factors > 1:
        return 1
    most = hp.n_expert // (_TILE_SPREAD * hp.n_expert_used)
    return max(1, min(most, n_tokens // _MIN_TILE))


def build_grouped_experts(
    b: Builder, hp: Architecture, bank: Bank, cur: Tensor, slots: Tensor, weights: Tensor,
    n_group: int, il: int,
) -> Tensor:  # fmt: skip
    """Do as `build_routed_experts`, with narrower tiles.

    n_group rows count as one token that chose n_group * n_expert_used experts, so that CUDA's tiles
    are for fewer rows. Its kernels cope with an expert that a token chose several times. If the
    last group is not full, the first rows are computed in it again.
    """
    n_embd, k, n = cur.ne[0], slots.ne[0], slots.ne[1]
    n_full = round_up(n, n_group)
    n_groups = n_full // n_group

    def full(rows: Tensor) -> Tensor:
        if n == n_full:
            return rows
        first = b.view(rows, (rows.ne[0], n_full - n), (rows.nb[1],))
        return b.concat(rows, first, 1)

    def grouped(rows: Tensor) -> Tensor:
        """[k, n_tokens] -> [n_group * k, n_groups]: the rows of a group next to each other."""
        rows = full(rows)
        one = b.view(rows, (k, n_group, n_groups), (rows.nb[1], n_group * rows.nb[1]))
        return b.cont(b.permute(one, 1, 0, 2, 3), n_group * k, n_groups)

    slots, weights = grouped(slots), grouped(b.reshape(weights, k, n))
    weights = b.reshape(weights, 1, n_group * k, n_groups)
    cur = b.reshape(full(cur), n_embd, n_group, n_groups)
    rows = build_expert_rows(b, bank.parts, cur, slots, weights, il, hp.glu)
    shape, strides = (n_embd, n_group, n_groups), (rows.nb[1], rows.nb[2])
    parts = [b.expand(b.view(rows, shape, strides, i * n_group * rows.nb[1])) for i in range(k)]
    out = b.reshape(_summed(b, parts), n_embd, n_full)
    return b.name(b.view(out, (n_embd, n), (out.nb[1],)), "ffn_moe_out", il)
