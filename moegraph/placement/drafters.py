"""Device memory that drafters need, from the headers of their files alone, and its price.

A device captures graphs of drafters, too. Each is for a length of a draft. A DFlash drafter's is
also for a sequence and for as many rows of its rings as the sequence needs now, or for a number of
sequences. There is room for all that texts use at once; others are dropped as new ones are built.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from ..arch import ModelFile
from ..arch.base import Architecture
from ..arch.dflash import DFlashHParams
from ..arch.draftfile import DraftFile, open_drafter
from ..arch.mtp import require_nextn
from ..arch.summary import kv_bytes
from ..config import MAX_VERIFY_ROWS, EngineConfig
from ..errors import ConfigError, ModelFileError
from ..experts.cost import expected_missing, independent_rows, pass_time
from ..gguf.resolve import resolve_draft, shipped_drafter
from ..kinds import SHORT_PROMPT
from ..resident import draftlayout, layout
from ..resident.kvpool import PoolShape
from ..units import round_up
from .footprint import sweep_rows
from .planner import Footprint, Plan

# Alignment of the tensors of a block, and its tables.
_SMALL = 64 << 10
# Nodes of a step of a chain of the MTP block, besides two for each expert that it uses, and of
# both graphs of known rows.
_STEP, _KNOWN = 84, 54
# Nodes of a layer over a block and over rows that are taken, of a layer that is read, and the rest.
_LAYER, _LAYER_KEYS, _HIDDEN, _REST = 34, 9, 4, 8
# Nodes of each drafted token with a Markov head.
_MARKOV = 14
# Rows of a verify pass besides the anchor, unless settings say how many.
_N_DRAFT = 15


def with_drafts(config: EngineConfig) -> EngineConfig:
    """Return settings whose `spec` and `n_draft` say what an engine does.

    `auto` drafts no more than all sequences may draft in one pass: with too many of them nothing.
    """
    spec, most = config.spec, layout.MAX_PAGED_ROWS // config.n_seq - 1
    is_shared = spec == "auto" and config.n_seq > 1
    if config.budget == 1 or (is_shared and most < 1):
        spec = "off"
    if spec == "off" or config.n_draft:
        return replace(config, spec=spec)
    n_draft = _N_DRAFT if config.draft_max is None else config.draft_max
    if config.budget is not None:
        n_draft = config.budget - 1
    if config.ddtree:
        n_draft = min(config.ddtree_budget, MAX_VERIFY_ROWS - 1)
    if is_shared:
        n_draft = min(n_draft, most)
    return replace(config, spec=spec, n_draft=n_draft)


def open_draft_file(model: ModelFile, config: EngineConfig, stack: ExitStack) -> DraftFile | None:
    """Open the drafter's file that the settings name, or the one shipped for a shipped model.

    None if there is none, or it is not to draft. config: after `with_drafts`. stack: gets the call
    that closes it.
    """
    if config.spec not in ("auto", "dflash"):
        return None
    path = resolve_draft(config.draft) if config.draft else shipped_drafter(model.path)
    if path is None:
        return None
    file = stack.enter_context(closing(open_drafter(path)))
    file.require_target(model)
    if config.draft_swa:
        file.hparams = file.hparams.with_window(config.draft_swa)
    return file


def wants_mtp(model: ModelFile, config: EngineConfig) -> bool:
    """Return whether the settings ask for drafts of the MTP block, if there is room for it."""
    if config.spec not in ("auto", "mtp"):
        return False
    try:
        require_nextn(model.path, model.hparams, model.tensors)
    except ModelFileError:
        if config.spec == "mtp":
            raise
        return False
    return True


@dataclass(frozen=True)
class Sources:
    """What is loaded to draft tokens: the model's MTP block, and a file that `draft` names.

    n_kept: how many experts of the block stay on the device, the others being fetched; None: all.
    """

    mtp: bool = False
    draft: DraftFile | None = None
    n_kept: int | None = None


def sources_of(model: ModelFile, config: EngineConfig, draft: DraftFile | None) -> list[Sources]:
    """Return what may be loaded, best first; `auto` takes the first that is worth its memory.

    The MTP block comes with all its experts, then with few, if the others can be fetched.
    """
    if config.spec == "dflash":
        if draft is None:
            raise ConfigError("--spec dflash needs the drafter's file; name it with --draft FILE")
        return [Sources(draft=draft)]
    mtp = wants_mtp(model, config)
    found = [Sources(mtp, draft), Sources(False, draft), Sources(mtp)]
    if config.spec != "auto":
        found = [Sources(mtp)]
    if config.host_pin != "none":
        few = kept_experts(model.hparams.n_expert)
        found = [one for each in found for one in (each, replace(each, n_kept=few))]
    found = [one if one.mtp else replace(one, n_kept=None) for one in found]
    return list(dict.fromkeys(one for one in found if one.mtp or one.draft))


def is_fitting(plan: Plan, sources: Sources) -> bool:
    """Return whether a plan has room for all that its drafters keep on the device.

    Where not all experts of the model are there, those of the MTP block give them room.
    """
    return plan.all_resident or not sources.mtp or sources.n_kept is not None


def drafters_bytes(model: ModelFile, config: EngineConfig, n_ctx: int, sources: Sources) -> int:
    """Return a bound on the device memory that drafters take; config: after `with_drafts`."""
    total = mtp_bytes(model, config, n_ctx, sources.n_kept) if sources.mtp else 0
    if sources.draft:
        hp, padded = model.hparams, round_up(n_ctx, layout.PAGE)
        n_sweep = sweep_rows(min(config.n_rows, padded), padded)
        n_layers, n_rows = len(sources.draft.hparams.target_layers), hidden_rows(config)
        seen = PoolShape.of(config, n_ctx).most_seen(config.draft_ctx_max)
        sizes = hp.n_vocab, seen, config.n_seq, n_sweep
        total += draftlayout.dflash_bytes(sources.draft, *sizes, config.draft_keep_bf16)
        total += layout.hidden_bytes(hp.n_embd, n_layers, n_rows, config.n_seq)
        if sources.draft.takes_part:
            total += _head_bytes(model, config.draft_vocab)
    return total


def hidden_rows(config: EngineConfig) -> int:
    """Return the rows of the longest pass that keeps hidden states; config: after `with_drafts`."""
    return max(SHORT_PROMPT, config.n_seq * (config.n_draft + 1))


def kept_experts(n_expert: int) -> int:
    """Return how many experts of the MTP block stay on the device if not all layers are full."""
    return n_expert // 4


def mtp_bytes(model: ModelFile, config: EngineConfig, n_ctx: int, n_kept: int | None = None) -> int:
    """Return a bound on the device memory that drafting with a model's MTP block takes.

    That is its weights, its K and V, the last outputs, and its graphs. n_kept: experts that stay on
    the device, others being fetched; None: all stay.
    """
    hp, il, shape = model.hparams, model.hparams.n_layer, PoolShape.of(config, n_ctx)
    block = range(il, il + 1)
    infos = [info for info in model.tensors.values() if layout.is_dense(info.name, block)]
    weights = sum(info.nbytes for info in infos if info.name.startswith("blk."))
    weights += _head_bytes(model, config.draft_vocab)
    experts = layout.expert_tensors(model, il)
    if n_kept is None or n_kept + hp.n_expert_used >= hp.n_expert:
        weights += sum(info.nbytes for info in experts.values())
    else:
        weights += (n_kept + hp.n_expert_used) * layout.Packing.of(experts).stride
    kv = kv_bytes(hp.layer(il), config.type_k, config.type_v) * (shape.n_rows + 1)
    outputs = 4 * hp.n_embd * (config.n_seq + 1)
    outputs += layout.hidden_bytes(hp.n_embd, 1, hidden_rows(config), config.n_seq)
    return weights + kv + outputs + _graph_bytes(hp, layout.MTP_ROWS, shape.n_ctx) + _SMALL


def _head_bytes(model: ModelFile, n_vocab: int) -> int:
    """Return what a draft head of n_vocab tokens takes, and its table of tokens."""
    n_drafted = layout.draft_vocab(model.hparams.n_vocab, n_vocab)
    if n_drafted == model.hparams.n_vocab:
        return 0
    info = layout.mtp_output(model)
    return n_drafted * (info.nbytes // info.ne[1] + 4)


def _graph_bytes(hp: Architecture, n_rows: int, n_ctx: int) -> int:
    """Return a bound on inputs, results and intermediates of the graphs of the MTP block."""
    kv = hp.n_embd_head_k * hp.n_head_kv
    known = 4 * n_rows * (10 * hp.n_embd + 6 * kv)
    attention = 8 * hp.n_embd_head_k * hp.n_head
    experts = hp.n_expert_used * (3 * hp.n_embd + 3 * hp.n_ff_exp)
    step = 4 * (12 * hp.n_embd + attention + 8 * kv + experts + 8 * hp.n_expert + 4 * hp.n_ff_shexp)
    logits = 4 * layout.MAX_MTP_DRAFT * (hp.n_vocab + 4096)
    return max(known, step + layout.paged_scratch_bytes(hp, 1)) + logits + 2 * 16 * n_ctx


def longest_draft(config: EngineConfig, most: int) -> int:
    """Return the most tokens that a draft has; most: that the drafter can propose."""
    limits = [most, most if config.draft_max is None else config.draft_max]
    if not config.ddtree:  # its budget is for rows, of which a path may have any number
        limits.append(config.n_draft)
    return max(min(limits), 1)


def captured_drafts(hp: Architecture, config: EngineConfig, n_ctx: int, sources: Sources) -> int:
    """Return the memory for all that is loaded; hp: of the model. config: after `with_drafts`."""
    total = mtp_graph_bytes(hp, config) if sources.mtp else 0
    if sources.draft:
        total += dflash_graph_bytes(sources.draft.hparams, config, n_ctx)
    return total


def mtp_graph_bytes(hp: Architecture, config: EngineConfig) -> int:
    """Return the memory of chains, and of known rows.

    hp: of the model. config: after `with_drafts`. Chains go on with the likeliest token, or with
    the winner of a race: there is room for all lengths of one kind, and for usual ones of both.
    """
    n = longest_draft(config, layout.MAX_MTP_DRAFT)
    usual = min(n, layout.USUAL_MTP_DRAFT)
    n_steps = max(n * (n + 1) // 2, usual * (usual + 1))
    chains = n_steps * (_STEP + 2 * hp.n_expert_used) + max(n, 2 * usual) * _REST
    return layout.CAPTURED_NODE_BYTES * (chains + layout.MTP_ROWS.bit_length() * _KNOWN)


def dflash_graph_bytes(hp: DFlashHParams, config: EngineConfig, n_ctx: int) -> int:
    """Return the memory of drafts of every length for each sequence, and of a part of a prompt.

    hp: of the drafter. config: after `with_drafts`.
    """
    n = longest_draft(config, hp.max_draft)
    lengths = {draftlayout.built_length(at, hp.max_draft) for at in range(1, n + 1)}
    block = _LAYER * hp.n_layer + _REST
    drafts = config.n_seq * len(lengths) * block
    if hp.markov_rank:
        # a sequence's drafts that follow winners are of any length, as are trees of one that is
        # alone
        drafts = (config.n_seq + 1) * (n * (block + _REST) + _MARKOV * n * (n + 1) // 2)
        drafts += len(lengths) * (block + _REST + _MARKOV * max(lengths))
    for m in range(2, min(config.n_seq, draftlayout.MOST_JOINT) + 1):
        for each in draftlayout.joint_lengths(n, m, not hp.samples_anchor):
            drafts += block + (_MARKOV * each if hp.markov_rank else 0)
    keys = _LAYER_KEYS * hp.n_layer + _HIDDEN * len(hp.target_layers) + _REST
    shape = PoolShape.of(config, n_ctx)
    rings = draftlayout.ring_shapes(hp, shape.most_seen(config.draft_ctx_max))
    chunk = min(draftlayout.CHUNK, *(ring.n_cells for ring in rings))
    n_sweep = sweep_rows(min(config.n_rows, shape.n_ctx), shape.n_ctx)
    # of tokens that were taken, of a part of a prompt, and of the end of another
    n_keys = draftlayout.N_TAKEN.bit_length() + -(-n_sweep // chunk) + 1
    return layout.CAPTURED_NODE_BYTES * (drafts + n_keys * keys)


@dataclass(frozen=True)
class Prior:
    """What is believed of a drafter that has not run.

    fixed, per_token: seconds of a draft and of each of its tokens, in plain steps of a 35B-A3B.
    accept: how often a drafted token is accepted if all before it were.
    """

    fixed: float
    per_token: float
    accept: float


# Times of mtp and dflash are those of docs/benchmarks/drafts.jsonl: 3 tokens of mtp take 0.53 of a
# plain step, 7 of dflash 0.54, and 11 of it 0.64. The Markov head of dspark reads 64 MiB for each
# token, 0.02 of a plain step; it was not timed. 0.75 is the mean of published rates by text.
PRIORS = {
    "mtp": Prior(0.02, 0.17, 0.75),
    "dflash": Prior(0.46, 0.015, 0.75),
    "dspark": Prior(0.46, 0.035, 0.75),
    "lookup": Prior(0.0, 0.0, 0.6),
}
# How many times longer a byte takes over the link than out of the device's memory, in a decode
# step: 21 were measured on the H200 of the benchmarks, 15 are computed for a desktop.
_LINK = 18.0
# What graphs that fetch add to a step, as a share of it: 1.5 % there, 1.1 % there.
_FETCHING = 0.013
# A loaded drafter may slow down answers that it cannot draft to this.
_LEAST_IDLE = 0.97


@dataclass(frozen=True)
class Price:
    """What a drafter's memory costs and brings, beside the same model without a drafter.

    n_bytes: the device memory. n_slots: the expert slots that it takes. drafting: predicted speed
    where drafts are accepted as often as is usual. idle: predicted speed where nothing is drafted.
    Both are relative to the model without a drafter.
    """

    n_bytes: int
    n_slots: int
    drafting: float
    idle: float

    @property
    def is_worth_it(self) -> bool:
        """Whether drafts bring more than the slots cost, and texts without drafts lose little."""
        return self.drafting > 1.0 and self.idle >= _LEAST_IDLE


def price_of(need: Footprint, plain: Plan, drafting: Plan, most: Mapping[str, int]) -> Price:
    """Return the price of drafters.

    need: of the model. plain, drafting: its plans without and with them. most: the most tokens that
    each draws up, by name (PRIORS).
    """
    alone = _pass_time(need, plain, 1)
    steps = [
        _token_time(need, drafting, PRIORS[name], n)
        for name, longest in most.items()
        for n in range(1, longest + 1)
    ]
    return Price(
        drafting.bytes.get("drafters", 0),
        sum(plain.n_slots) - sum(drafting.n_slots),
        alone / min(steps),
        alone / _pass_time(need, drafting, 1),
    )


def _token_time(need: Footprint, plan: Plan, prior: Prior, n: int) -> float:
    """Return what a token takes in steps that draft n, in passes of one row without misses."""
    tokens = sum(prior.accept**depth for depth in range(n + 1))
    return (prior.fixed + prior.per_token * n + _pass_time(need, plan, n + 1)) / tokens


def _pass_time(need: Footprint, plan: Plan, n_rows: int) -> float:
    """Return the time of a pass, in passes of one row without misses."""
    if plan.all_resident:
        return pass_time(n_rows)
    rows, total = independent_rows(n_rows), sum(need.slot_bytes)
    step_bytes = need.weights + need.n_expert_used * total
    missing = sum(
        size * expected_missing(n, need.n_expert, need.n_expert_used, rows)
        for n, size in zip(plan.n_slots, need.slot_bytes)
    )
    return pass_time(n_rows) + _FETCHING + _LINK * missing / step_bytes
