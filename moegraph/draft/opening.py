"""Makes the controller of an engine from its settings and drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config import EngineConfig
from ..placement.draftprice import PRIORS
from ..resident.layout import USUAL_MTP_DRAFT
from .controller import Controller
from .drafter import Drafter, as_joint
from .estimates import Experts
from .plan import DraftSettings, Source
from .tree import DDTree, TreeDrafter

# What the first passes of a width cost in plain steps, where graphs are captured, and elsewhere.
_CAPTURED, _BUILT = 16.0, 2.0
# Seconds of a missing expert for a step that takes 1, where no time may be measured.
_UNTIMED_MISS = 0.02


def open_controller(
    drafters: Sequence[Drafter],
    config: EngineConfig,
    max_rows: int,
    experts: Experts | None = None,
    captures: bool = True,
) -> Controller:
    """Return the controller of an engine with these drafters.

    max_rows: rows of a verify pass that there is memory for. experts: None if none can be missing.
    captures: the device captures graphs. Settings that name dflash mean a DSpark drafter too.
    """
    spec, names = config.spec, {drafter.name for drafter in drafters}
    if spec == "dflash" and "dspark" in names:
        spec = "dspark"
    sources = []
    for drafter in drafters:
        known, has_tree = PRIORS[drafter.name], isinstance(drafter, TreeDrafter)
        costs, most = (known.fixed, known.per_token, known.accept, known.n_top), drafter.max_draft
        if spec == "auto" and drafter.name == "mtp":  # longer ones hardly pay, and have no graphs
            most = min(most, config.draft_max or USUAL_MTP_DRAFT)
        joins, is_free = as_joint(drafter) is not None, drafter.is_free
        sources.append(Source(drafter.name, most, *costs, has_tree, joins, is_free))
    if experts and config.deterministic:
        experts = Experts(experts.n_layer, experts.n_expert, experts.n_expert_used, _UNTIMED_MISS)
    settings = draft_settings(config, spec, max_rows)
    settings = replace(settings, graph_price=_CAPTURED if captures else _BUILT)
    return Controller(sources, settings, experts)


def draft_settings(config: EngineConfig, spec: str, max_rows: int) -> DraftSettings:
    """Return the settings of the controller. spec: a drafter's name, "auto" or "off"."""
    seed = not config.ddtree_no_chain_seed
    ddtree = DDTree(config.ddtree_budget, config.ddtree_temp, seed) if config.ddtree else None
    return DraftSettings(
        spec="off" if config.budget == 1 else spec,
        draft_max=config.draft_max,
        p_min=config.draft_p_min,
        budget=config.budget,
        ddtree=ddtree,
        max_rows=max_rows,
        is_timed=not config.deterministic,
    )
