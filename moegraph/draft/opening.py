"""Makes the controller of an engine from its settings and drafters."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import EngineConfig
from ..experts.rowlaw import Experts
from ..placement.draftprice import PRIORS
from ..resident.layout import USUAL_MTP_DRAFT
from .controller import Controller
from .drafter import Drafter, as_joint
from .plan import DraftSettings, Source
from .tree import DDTree, TreeDrafter


def open_controller(
    drafters: Sequence[Drafter], config: EngineConfig, max_rows: int,
    experts: Experts | None = None, captures: bool = True,
) -> Controller:  # fmt: skip
    """Return the controller of an engine with these drafters.

    max_rows: rows of a verify pass that there is memory for. experts: None if none can be missing.
    captures: the device captures graphs. Settings that name dflash mean a DSpark drafter too.
    """
    spec, names = config.spec, {drafter.name for drafter in drafters}
    if config.budget == 1:
        spec = "off"
    elif spec == "dflash" and "dspark" in names:
        spec = "dspark"
    sources = []
    for drafter in drafters:
        prior, has_tree = PRIORS[drafter.name], isinstance(drafter, TreeDrafter)
        costs, most = (prior.fixed, prior.per_token, prior.accept, prior.n_top), drafter.max_draft
        if spec == "auto" and drafter.name == "mtp":  # longer ones hardly pay, and have no graphs
            most = min(most, config.draft_max or USUAL_MTP_DRAFT)
        joins, is_free = as_joint(drafter) is not None, drafter.is_free
        sources.append(Source(drafter.name, most, *costs, has_tree, joins, is_free))
    tree = DDTree(config.ddtree_budget, config.ddtree_temp, not config.ddtree_no_chain_seed)
    settings = DraftSettings(
        spec, config.draft_max, config.draft_p_min, config.budget,
        ddtree=tree if config.ddtree else None, max_rows=max_rows,
        is_timed=not config.deterministic, captures=captures,
    )  # fmt: skip
    return Controller(sources, settings, experts)
