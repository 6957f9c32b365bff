"""Makes the controller of an engine from its settings and drafters."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import EngineConfig
from .controller import Controller
from .drafter import Drafter
from .plan import DraftSettings, Source
from .stepcost import Experts
from .tree import DDTree, TreeDrafter

# What is believed of a drafter before it has run: seconds of a draft and of each of its tokens, in
# plain steps of a 35B-A3B; how often it is right; how many candidates it can name.
_KNOWN = {
    "mtp": (0.02, 0.17, 0.75, 3),
    "dflash": (0.18, 0.0, 0.7, 3),
    "dspark": (0.22, 0.0, 0.7, 3),
    "lookup": (0.0, 0.0, 0.6, 1),
}
# Seconds of a missing expert for a step that takes 1, where no time may be measured.
_UNTIMED_MISS = 0.02


def open_controller(
    drafters: Sequence[Drafter],
    config: EngineConfig,
    max_rows: int,
    experts: Experts | None = None,
) -> Controller:
    """Return the controller of an engine with these drafters.

    max_rows: rows of a verify pass that there is memory for. experts: None if none can be missing.
    Settings that name dflash mean a DSpark drafter too.
    """
    spec, names = config.spec, {drafter.name for drafter in drafters}
    if spec == "dflash" and "dspark" in names:
        spec = "dspark"
    sources = []
    for drafter in drafters:
        fixed, per_token, accept, n_top = _KNOWN[drafter.name]
        known = (fixed, per_token, accept, n_top, isinstance(drafter, TreeDrafter))
        sources.append(Source(drafter.name, drafter.max_draft, *known))
    if experts and config.deterministic:
        experts = Experts(experts.n_layer, experts.n_expert, experts.n_expert_used, _UNTIMED_MISS)
    return Controller(sources, draft_settings(config, spec, max_rows), experts)


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
