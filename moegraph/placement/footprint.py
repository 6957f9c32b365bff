"""Device memory that a model needs, from its header alone; the planner reads it before loading."""

from __future__ import annotations

from ..arch import ModelFile
from ..arch.base import Architecture, Layer
from ..arch.summary import kv_bytes, state_bytes, summarize
from ..config import EngineConfig
from ..experts.crossing import padded
from ..resident import layout
from ..resident.kvpool import PoolShape
from ..resident.layout import N_STAGING
from ..units import round_up
from .planner import Footprint

# Most rows of a prompt in one sweep, if the context is as long. Computing so many takes longer than
# sending all experts, so more rows would not hide more of it.
SWEEP_ROWS = 8192
# Patterns of masks, and what aligns the inputs of chunks.
_SWEEP_CONSTANTS = 256 << 10
# On an H200 kernel images take 74 MiB, what prompts have cuBLAS allocate 100, a scratch pool 2.
_OTHER_BYTES = 176 << 20
# A picture encoder: Qwen3.5 has a tower of 0.84 GiB in F16; an H200 took 2,209 MiB in all.
ENCODER_BYTES = 2304 << 20
# Numbers of rows of passes that verify drafts, most of the time.
_DRAFT_WIDTHS = 3
# A captured graph of an attention layer on an H200, of which each chunk of a prompt has its own,
# and what all of them take at most, because the cache of graphs drops some.
_CHUNK_GRAPH_BYTES, _CHUNK_GRAPHS_BYTES = 640 << 10, 256 << 20
# A context that follows from the memory: its least and most positions, and the part of the memory
# that it may take from experts.
LEAST_CTX, _MOST_CTX, _CTX_PART = 4096, 1 << 22, 16
# Bytes; no device aligns tensors to more.
_ALIGN = 128
# Words that describe a row to attention over pages: ROW_WORDS of graphs/paged.py. Rows of a prompt
# that it computes at once: MOEGRAPH_ATTN_TOGETHER of native/.
_ROW_WORDS, _PLANNED_ROWS = 36, 128


def needed_bytes(
    model: ModelFile, config: EngineConfig, n_ctx: int, drafters: int = 0,
    layers: range | None = None, is_own: bool = True, at: int = 0,
) -> Footprint:  # fmt: skip
    """Return the bytes that a model needs under a configuration, with a context of n_ctx.

    Weights, caches and states are exact. Intermediates are an upper bound, because their layout is
    known only after the graphs are built. Verify passes count as far as n_draft announces them. Not
    included: logits of all rows of a prompt (--logits-out), n_ubatch * n_vocab * 4 bytes.

    drafters: what drafters take (drafters.py). layers: of a stage, which alone are counted, and the
    head if the last layer is one of them; None: all. is_own: the device has memory of its own,
    which its kernels and the graphs that it captures take too. at: its number among the devices.
    """
    hp = model.hparams
    layers = range(hp.n_layer) if layers is None else layers
    kept = [hp.layer(il) for il in layers]
    has_head = layers.stop == hp.n_layer
    shape = PoolShape.of(config, n_ctx)
    tensors = {il: layout.expert_tensors(model, il) for il in layers}
    sizes = tuple(layout.Packing.of(tensors[il]).stride for il in layers)
    kinds = {layout.stack_kind(tensors[il]): n for il, n in zip(layers, sizes) if n}
    n_ubatch, rows = shape.n_chunk, shape.pass_rows(shape.n_chunk)
    masks = 2 * shape.n_rows * n_ubatch + _window_bytes(hp.window, n_ubatch, rows, config.n_seq)
    logits = 8 * hp.n_vocab * has_head
    compute = rows * _row_bytes(hp) + masks + logits * config.n_seq
    drafted = config.n_seq * min(config.n_draft + 1, config.n_rows) if config.n_draft else 0
    inputs = masks + 4 * rows * (hp.n_embd + hp.n_expert_used + 8)
    narrow = (_narrow_bytes(hp, n, logits) for n in (config.n_seq, drafted))
    compute = max(compute, *(inputs + n_bytes for n_bytes in narrow))
    if config.type_k != "f16" or config.type_v != "f16":
        # attention over many rows converts the visible part of a quantized cache to F16
        compute += 4 * shape.n_rows * max((layer.kv[0] for layer in kept if layer.kv), default=0)
    if config.deterministic or not hp.adds_late:  # rows of single experts: `CarryBuffers`
        compute += 4 * hp.n_embd * hp.n_expert_used * (rows + sweep_rows(n_ubatch, shape.n_ctx) + 1)
        compute += layout.paged_scratch_bytes(hp, min(n_ubatch, _PLANNED_ROWS))
    compute += 4 * hp.n_embd * rows * (len(layers) < hp.n_layer)  # between stages
    kv = [(layer.window, kv_bytes(layer, config.type_k, config.type_v)) for layer in kept]
    n_sweep = sweep_rows(n_ubatch, shape.n_ctx)
    compute += _sweep_bytes(hp, n_sweep, n_ubatch, shape.n_ctx, config.n_seq)
    compute += _gathered_bytes(kv, rows, shape)
    # a snapshot too, to undo a prompt
    state = sum(state_bytes(layer, config.n_seq + 1) for layer in kept)
    name = f"cuda:{at}" if config.device in ("auto", "cuda") else config.devices[at]
    encoder = ENCODER_BYTES if name == config.mmproj_device else 0
    state += sum(size * min(window, shape.ring(window)) for window, size in kv if window)
    return Footprint(
        n_expert=hp.n_expert,
        n_expert_used=hp.n_expert_used,
        slot_bytes=sizes,
        weights=_dense_bytes(model, layers, has_head),
        kv=sum(size * (shape.cache_rows(window) + 1) for window, size in kv),
        state=state + layout.zeros_bytes(hp) + _draft_bytes(kept, drafted),
        compute=compute,
        other=_OTHER_BYTES + encoder + captured_graphs(hp, config, n_ctx, layers) if is_own else 0,
        staging=2 * N_STAGING * sum(kinds.values()) + lacking_bytes(hp, n_sweep, n_ubatch, is_own),
        ring_groups=layout.N_GROUPS,
        ring=layout.ring_bytes(kinds.values(), layout.group_size(hp.n_expert)),
        drafters=drafters,
    )


def context_within(
    model: ModelFile, config: EngineConfig, n_bytes: int, is_own: bool = True
) -> int:
    """Return the context for which there is memory: the trained length, its half, its quarter...

    Beyond LEAST_CTX it takes at most a sixteenth of the n_bytes that there are, or, if that is
    more, half of what they leave when all experts are there. is_own: as in `needed_bytes`.
    """
    least = needed_bytes(model, config, LEAST_CTX, is_own=is_own)
    most = max(n_bytes // _CTX_PART, (n_bytes - least.fixed - least.experts) // 2)
    n_ctx = min(model.hparams.n_ctx_train, _MOST_CTX)
    while n_ctx > LEAST_CTX:
        if needed_bytes(model, config, n_ctx, is_own=is_own).fixed - least.fixed <= most:
            return n_ctx
        n_ctx //= 2
    return LEAST_CTX


def _dense_bytes(model: ModelFile, layers: range, has_head: bool) -> int:
    """Return the bytes of all weights of a stage except routed experts."""
    dense = [info for info in model.tensors.values() if layout.is_dense(info.name, layers)]
    dense = [info for info in dense if has_head or info.name not in layout.HEAD]
    if has_head and "output.weight" not in model.tensors:
        dense.append(model.tensors["token_embd.weight"])
    return sum(info.nbytes for info in dense)


def captured_graphs(hp: Architecture, config: EngineConfig, n_ctx: int, layers: range) -> int:
    """Return the device memory that captured graphs of a stage's layers may take."""
    n_widths = min(config.n_draft, _DRAFT_WIDTHS)
    if config.n_seq > 1:
        n_widths += sum(width <= config.n_seq for width in layout.PADDED_WIDTHS)
    n_ctx = PoolShape.of(config, n_ctx).n_ctx
    n_chunks = -(-n_ctx // min(config.n_rows, n_ctx))
    n_attention = sum(hp.layer(il).kv is not None for il in layers)
    chunks = min(n_attention * n_chunks * _CHUNK_GRAPH_BYTES, _CHUNK_GRAPHS_BYTES)
    return layout.captured_bytes(len(layers), n_widths) + chunks


def sweep_rows(n_ubatch: int, n_ctx: int) -> int:
    """Return how many rows of a prompt one sweep computes, at most."""
    return max(n_ubatch, min(n_ctx, SWEEP_ROWS))


def _sweep_bytes(hp: Architecture, n_rows: int, n_ubatch: int, n_ctx: int, n_seq: int) -> int:
    """Return a bound on what a sweep of n_rows rows holds: hidden states, inputs, and a mask."""
    n_words, n_lists = (4, 1) if n_seq == 1 else (7, 6)  # of a row, and of KV rows
    n_words += len(hp.rope_sections)
    n_masks = 2 if hp.window else 1
    # of a row: patterns of masks, or its path
    n_seen = max(n_masks * n_ctx // layout.PAGE, _ROW_WORDS)
    inputs = 4 * (n_rows + n_ubatch + 256) * (n_words + n_seen) + 4 * n_lists * n_ctx
    if hp.window:  # what chunks gather, and chunks of several sequences
        n_chunks = -(-n_rows // n_ubatch) + layout.MORE_CHUNKS
        inputs += 24 * n_chunks * (hp.window + layout.PAGE) + 8 * (n_rows + n_ubatch)
        inputs += 4 * n_lists * _columns(hp.window, n_ubatch, n_seq)
    constants = n_masks * _SWEEP_CONSTANTS
    return 4 * hp.n_embd * (n_rows + 1) + inputs + 2 * n_ubatch * n_ctx + constants


def lacking_bytes(hp: Architecture, n_rows: int, n_ubatch: int, is_own: bool = True) -> int:
    """Return what a sweep holds beside that if experts may be missing."""
    n_terms = layout.most_terms(hp.n_expert_used, hp.n_expert)
    unit = 4 * (4 + n_terms) * padded(hp.n_expert_used * n_ubatch // layout.UNIT_SHARE + 64)
    # only the CPU keeps the results of all experts, to add them in routing order
    n_kept = hp.n_expert_used * (hp.n_factors if is_own else hp.n_embd + hp.n_factors)
    return 4 * (hp.n_embd + n_kept) * (n_rows + 1) + unit


def slot_bytes(model: ModelFile) -> tuple[int, ...]:
    """Return the bytes of one slot of each layer, padding included; 0 for a dense layer."""
    layers = range(model.hparams.n_layer)
    return tuple(layout.Packing.of(layout.expert_tensors(model, il)).stride for il in layers)


def token_work(model: ModelFile) -> tuple[int, int, int]:
    """Return the bytes of weights that a token reads, the parameters it uses, and its kernels."""
    hp = model.hparams
    dense = _dense_bytes(model, range(hp.n_layer), has_head=True)
    n_bytes = dense + hp.n_expert_used * sum(slot_bytes(model))
    n_launches = round(hp.n_layer * hp.layer_launches)
    return n_bytes, summarize(hp, model.tensors).active_params, n_launches


def _gathered_bytes(kv: list[tuple[int | None, int]], rows: int, shape: PoolShape) -> int:
    """Return a bound on the KV rows that one layer's attention gathers for a pass.

    kv: the window of each layer, and the bytes of its row.
    """
    found = [size * _columns(window, rows, shape.n_seq) for window, size in kv if window]
    if shape.n_seq > 1:
        found += [(size + 4) * shape.n_rows for window, size in kv if not window]
    return max(found, default=0)


def _window_bytes(window: int | None, n_ubatch: int, rows: int, n_seq: int) -> int:
    """Return a bound on what a pass takes to layers with a window: masks, rows and indices."""
    if not window:
        return 0
    n_bytes = 2 * rows * (n_ubatch + window + 2 * layout.PAGE + 4)
    return n_bytes + 6 * _columns(window, rows, n_seq) + 4 * layout.PAGE


def _columns(window: int, n_rows: int, n_seq: int) -> int:
    """Return a bound on the rows that a pass over n_seq sequences gathers in a window's layer."""
    return max(n_rows + n_seq * (window + 2 * layout.PAGE), 4 * (window + layout.PAGE))


def _row_bytes(hp: Architecture) -> int:
    """Return a bound on the input and one layer's intermediates of a row, without its mask."""
    experts = hp.n_expert_used * (3 * hp.n_embd + 3 * hp.n_ff_exp)
    experts = max(experts, *(3 * hp.layer(il).n_ff for il in range(hp.n_layer)))
    return 4 * (hp.mixer_width + experts + 10 * hp.n_embd + 10 * hp.n_expert + 4 * hp.n_ff_shexp)


def _narrow_bytes(hp: Architecture, n_tokens: int, logits: int) -> int:
    """Return a bound for a decode or verify pass: a head row for each row, and paged attention.

    Its inputs come on top. logits: what a head row takes.
    """
    scratch = layout.paged_scratch_bytes(hp, min(n_tokens, layout.MAX_PAGED_ROWS))
    return n_tokens * (_row_bytes(hp) + logits) + scratch


def _draft_bytes(layers: list[Layer], n_rows: int) -> int:
    """Return the bytes that verify passes of n_rows rows keep; see `DraftRows`."""
    room = layout.draft_room(n_rows) if n_rows else 0
    widths = (width for layer in layers for width in layer.drafts)
    return sum(round_up(4 * width * room, _ALIGN) for width in widths)
