"""What the loop needs of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass

from ..arch import ModelFile
from ..ggml.device import Device
from ..passes.passes import Passes
from ..passes.prefixes import Prefixes
from ..passes.sequencecopies import SequenceCopies
from ..passes.speculation import Speculation
from ..resident.stage import Stage
from ..runner import AnyRunner


@dataclass(frozen=True)
class Core:
    """A loaded model: what runs its passes, and what is kept of its sequences.

    stage: the last one, which has the results. speculation: what drafts; None without drafters.
    n_ctx: positions of a sequence.
    """

    file: ModelFile
    passes: Passes
    prefixes: Prefixes
    copies: SequenceCopies
    speculation: Speculation | None
    runner: AnyRunner
    devices: tuple[Device, ...]
    stage: Stage
    n_ctx: int
