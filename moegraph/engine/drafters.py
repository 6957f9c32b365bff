"""Opens what drafts for a model, with memory for what it reads of the model's passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

from ..arch import ModelFile
from ..arch.base import Architecture
from ..config import EngineConfig
from ..draft.controller import FIRST_WIDTH, open_controller
from ..draft.dflash import DFlashDrafter, DSparkDrafter
from ..draft.drafter import Drafter
from ..draft.lookup import LookUp
from ..draft.mtp import MtpDrafter
from ..experts.cost import Experts
from ..ggml.handles import closed_on_failure
from ..gguf.vocab import frequent_ids
from ..passes.speculation import Speculation
from ..placement.draftcounts import DraftCounts
from ..placement.drafters import (
    Sources,
    dflash_graph_bytes,
    hidden_rows,
    longest_draft,
    mtp_graph_bytes,
)
from ..placement.footprint import sweep_rows
from ..resident.draftweights import DraftHead
from ..resident.layout import head_tensor
from ..resident.mtp import open_mtp
from ..resident.stage import Stage
from ..resident.weights import TokenEmbedding
from ..runner import AnyRunner, LayeredRunner
from .warmup import PassTimes

# Rows of verify passes that are ready before the first text: where graphs are captured, fewer if
# experts may be missing, because wider passes pay less then; and elsewhere.
_CAPTURED, _LACKING, _BUILT = (2, FIRST_WIDTH, 8, 12), (FIRST_WIDTH, 8), (FIRST_WIDTH,)
# The same for look-up alone: copies are long.
_COPIES = (2, FIRST_WIDTH, 8, 16)


def open_drafters(
    stages: Sequence[Stage], file: ModelFile, config: EngineConfig, sources: Sources,
    stack: ExitStack,
) -> tuple[Drafter, ...]:  # fmt: skip
    """Open the drafters of a model, which are in its last stage, before graphs are built.

    config: after `with_drafts`. sources: what is loaded; the stage was opened for its MTP block.
    stack: gets the calls that free everything.
    """
    drafters: list[Drafter] = []
    stage = stages[-1]
    with closed_on_failure():
        if sources.mtp:
            block = open_mtp(stage, file, config.draft_vocab, sources.n_kept)
            stack.enter_context(closing(block))
            drafters.append(stack.enter_context(closing(MtpDrafter(block))))
        if sources.draft:
            n_ctx = stage.state.n_ctx
            n_sweep = sweep_rows(min(config.n_rows, n_ctx), n_ctx)
            part = None
            if 0 < config.draft_vocab < file.hparams.n_vocab and sources.draft.takes_part:
                ids = frequent_ids(file.metadata, file.hparams.n_vocab, config.draft_vocab)
                part = DraftHead(stage.device, file, head_tensor(file), ids)
                stack.enter_context(closing(part))
            kind = DSparkDrafter if sources.draft.hparams.markov_rank else DFlashDrafter
            seen, as_stored = config.draft_ctx_max or None, config.draft_keep_bf16
            table = None
            if not stage.has_embedding:
                table = TokenEmbedding(file, file.tensors, file.hparams.embedding_scale)
            dflash = kind(stage, sources.draft, n_sweep, seen, as_stored, part, table)
            drafters.append(stack.enter_context(closing(dflash)))
            sources.draft.source.check_unchanged()
        if config.spec in ("auto", "lookup"):
            drafters.append(LookUp(config.n_seq))
        _reserve_hidden(stages, drafters, config)
        for drafter in drafters:
            if isinstance(drafter, MtpDrafter | DFlashDrafter):
                drafter.reserve()
                if stage.device.can.streams:
                    drafter.warm_up(longest_draft(config, drafter.max_draft))
    return tuple(drafters)


def limit_graphs(
    drafters: Sequence[Drafter], hp: Architecture, config: EngineConfig, n_ctx: int
) -> None:
    """Let the graphs of drafters that a device captures take what the plan has for them.

    hp: of the model. config: after `with_drafts`.
    """
    for drafter in drafters:
        if isinstance(drafter, MtpDrafter):
            drafter.graphs.max_device_bytes = mtp_graph_bytes(hp, config)
        elif isinstance(drafter, DFlashDrafter):
            n_bytes = dflash_graph_bytes(drafter.hparams, config, n_ctx)
            drafter.graphs.max_device_bytes = n_bytes


def _reserve_hidden(
    stages: Sequence[Stage], drafters: Sequence[Drafter], config: EngineConfig
) -> None:
    """Make room for what drafters read; the last stage keeps that of tokens, too."""
    wanted = sorted({il for drafter in drafters for il in drafter.target_layers})
    if wanted:
        stages[-1].hidden_states.reserve(wanted, hidden_rows(config), config.n_seq)
    for before in stages[:-1]:  # the layer after it keeps its output
        mine = [il for il in wanted if il + 1 in before.layers]
        if mine:
            before.hidden_states.reserve(mine, hidden_rows(config))


def first_widths(config: EngineConfig, runner: AnyRunner) -> list[int]:
    """Return the rows of the verify passes whose graphs are built ahead, in order."""
    if config.ddtree:
        return []
    given = config.budget or (config.draft_max and config.draft_max + 1)
    if given and config.spec != "auto":
        return [min(given, config.n_draft + 1)]
    widths: tuple[int, ...] = _BUILT
    if runner.device.can.streams:  # graphs are costly, because the device captures them
        whole = _COPIES if config.spec == "lookup" else _CAPTURED
        widths = whole if runner.mode == "whole" else _LACKING
    return [n for n in widths if n <= min(given or n, config.n_draft + 1)]


def open_speculation(
    drafters: Sequence[Drafter],
    config: EngineConfig,
    runner: AnyRunner,
    times: PassTimes | None = None,
    known: DraftCounts | None = None,
) -> Speculation | None:
    """Return what drafts for a runner's sequences; None without drafters.

    config: `n_draft` says for how many drafted rows there is memory. times: of passes, if known.
    known: how right the drafters were in earlier runs.
    """
    if not drafters:
        return None
    hp, max_rows = runner.hp, min(config.n_draft + 1, runner.n_ubatch)
    layered = [part for part in runner.parts if isinstance(part, LayeredRunner)]
    misses = [part.misses for part in layered if part.misses]
    experts = None
    if misses:
        # where no time may be measured, it is a share of a step that takes 1
        miss_s = 0.02 if config.deterministic else max(one.uploads.seconds(1) for one in misses)
        experts = Experts(len(hp.routed_layers), hp.n_expert, hp.n_expert_used, miss_s)
    captures = runner.device.can.streams
    controller = open_controller(drafters, config, max_rows, experts, captures)
    if times:
        if times.plain and controller.settings.is_timed:
            controller.calibrate(times.plain, times.verify)
        else:
            controller.have(times.built)
    if known and not config.deterministic:  # what was drafted earlier must not matter
        controller.remember(known)
    speculation = Speculation(drafters, controller, hp.n_vocab, max_rows)
    if misses:
        caches = [one.residency.cache for one in misses]
        speculation.n_missing = lambda: sum(cache.n_missing for cache in caches)
    speculation.rejects, speculation.p_min = config.rejection_sampling, config.draft_p_min
    return speculation
