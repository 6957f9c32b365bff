"""Opens what drafts for a model, with memory for what it reads of the model's passes."""

from __future__ import annotations

from contextlib import ExitStack, closing

from ..config import EngineConfig
from ..draft.drafter import Drafter
from ..draft.mtp import MtpDrafter
from ..ggml.handles import closed_on_failure
from ..kinds import SHORT_PROMPT
from ..modelfile import ModelFile
from ..resident.mtp import open_mtp
from ..resident.stage import Stage


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
        taps = {il for drafter in drafters for il in drafter.taps}
        if taps:
            n_rows = config.n_seq * (config.n_draft + 1)
            stage.taps.reserve(sorted(taps), max(SHORT_PROMPT, n_rows))
    return tuple(drafters)
