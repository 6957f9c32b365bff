"""Opens what drafts for a model, with memory for what it reads of the model's passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

from ..config import EngineConfig
from ..draft.drafter import Drafter
from ..draft.lookup import LookUp
from ..draft.mtp import MtpDrafter
from ..draft.opening import open_controller
from ..draft.stepcost import Experts
from ..ggml.handles import closed_on_failure
from ..kinds import SHORT_PROMPT
from ..modelfile import ModelFile
from ..resident.mtp import open_mtp
from ..resident.stage import Stage
from ..runner import LayeredRunner, Runner
from .speculation import Speculation


def open_drafters(
    stage: Stage, file: ModelFile, config: EngineConfig, has_mtp: bool, stack: ExitStack
) -> tuple[Drafter, ...]:
    """Open the drafters of a stage with all layers, before graphs of its passes are built.

    has_mtp: the MTP block drafts; the stage was opened for it. stack: gets the calls that free
    everything.

    Raises:
        ModelFileError, OutOfDeviceMemory, NativeError: as in `open_mtp` and `MtpDrafter`.
    """
    drafters: list[Drafter] = []
    with closed_on_failure():
        if has_mtp:
            block = stack.enter_context(closing(open_mtp(stage, file, config.draft_vocab)))
            mtp = stack.enter_context(closing(MtpDrafter(block)))
            mtp.reserve()
            drafters.append(mtp)
        if config.spec in ("auto", "lookup"):
            drafters.append(LookUp(config.n_seq))
        taps = {il for drafter in drafters for il in drafter.taps}
        if taps:
            n_rows = config.n_seq * (config.n_draft + 1)
            stage.taps.reserve(sorted(taps), max(SHORT_PROMPT, n_rows))
    return tuple(drafters)


def open_speculation(
    drafters: Sequence[Drafter], config: EngineConfig, runner: Runner
) -> Speculation | None:
    """Return what drafts for a runner's sequences; None without drafters.

    config: `n_draft` says for how many drafted rows there is memory.
    """
    if not drafters:
        return None
    hp, max_rows = runner.stage.hp, min(config.n_draft + 1, runner.n_ubatch)
    misses = runner.misses if isinstance(runner, LayeredRunner) else None
    if not misses:
        controller = open_controller(drafters, config, max_rows)
        return Speculation(drafters, controller, hp.n_vocab, max_rows)
    miss_s = 0.0 if config.deterministic else misses.link.seconds(1)
    experts = Experts(hp.n_layer, hp.n_expert, hp.n_expert_used, miss_s)
    controller = open_controller(drafters, config, max_rows, experts)
    cache = misses.residency.cache
    return Speculation(drafters, controller, hp.n_vocab, max_rows, lambda: cache.n_missing)
