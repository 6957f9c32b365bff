"""Divides device memory between experts, drafters and rows of prompts that are computed at a time.

Longer chunks are faster: on an H200 with all experts resident, 2,048 rows at a time read 13,600
tokens a second, 1,024 rows 12,800, 512 rows 10,600. But their intermediates take memory from
experts (35B-A3B: 0.9 GiB more), and every token of an answer pays for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..arch import ModelFile
from ..arch.draftfile import DraftFile
from ..config import CPU_ROWS, EngineConfig
from ..errors import ConfigError, OutOfDeviceMemory
from ..resident.layout import MAX_MTP_DRAFT
from ..units import format_bytes
from .drafters import (
    Price,
    Sources,
    captured_drafts,
    drafters_bytes,
    is_fitting,
    price_of,
    sources_of,
)
from .footprint import needed_bytes, sweep_rows
from .planner import Demand, Footprint, Plan
from .split import Place, SplitSettings, StagePlan, merged, split_layers

# What is tried, the fastest first. More rows are hardly faster.
_CHUNKS = (2048, 1024, 512, 256)
_LEAST = 128
# Longer chunks may take so much of the memory for experts. A tenth fewer resident experts make an
# answer 2 to 5 % slower (`moegraph simulate`).
_SHARE = 1 / 12


@dataclass(frozen=True)
class Budget:
    """The device memory that a model and its drafters may use.

    n_bytes: None without a limit. source: what sets it, for messages. is_own: the device has memory
    of its own, which kernels take too, and which chunks of a prompt share with experts. demand: as
    of `make_plan`. places: the devices, if there are several; n_bytes is then what they have
    together. shares: of the layers that each gets, if the user set them.
    """

    n_bytes: int | None
    source: str = "--vram"
    is_own: bool = True
    demand: Demand | None = None
    places: tuple[Place, ...] = ()
    shares: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls, places: Sequence[Place], is_own: bool = True, demand: Demand | None = None,
        shares: tuple[float, ...] | None = None,
    ) -> Budget:  # fmt: skip
        """Return the memory of one or several devices."""
        budgets = [place.budget for place in places]
        total = None if None in budgets else sum(n for n in budgets if n is not None)
        several = tuple(places) if len(places) > 1 else ()
        return cls(total, places[0].name, is_own, demand, several, shares)


@dataclass(frozen=True)
class Choice:
    """What drafts, and the memory of everything.

    n_ubatch: rows of a chunk of a prompt. need_of: what the model needs beside these drafters with
    so many, on all devices. price: None if nothing is loaded that takes memory. notes: what `auto`
    does not load and why, a line each. stages: the layers of each device, and its plan.
    """

    sources: Sources
    plan: Plan
    n_ubatch: int
    need_of: Callable[[int], Footprint]
    price: Price | None = None
    notes: tuple[str, ...] = ()
    stages: tuple[StagePlan, ...] = ()


def choose(
    model: ModelFile, config: EngineConfig, n_ctx: int, draft: DraftFile | None, budget: Budget
) -> Choice:
    """Return what is loaded to draft tokens, and the plan for it.

    That is the first choice that fits, and with `auto` is worth its memory. config: after
    `with_drafts`. draft: the open drafter's file, if there is one.
    """
    is_named, tried = config.spec != "auto", list[Choice]()
    plain = _planned(model, config, n_ctx, budget, Sources())
    choices = sources_of(model, config, draft)
    for sources in choices:
        is_last = is_named and sources is choices[-1]
        try:
            found = _planned(model, config, n_ctx, budget, sources)
        except (ConfigError, OutOfDeviceMemory):
            if is_last:
                raise
            continue
        if is_last or is_fitting(found.plan, sources):
            price = _price(plain, found, config)
            tried.append(replace(found, price=price))
            if is_named:
                return tried[-1]
            if price.is_worth_it:
                return replace(tried[-1], notes=_left_out(sources, choices, tried))
    return replace(plain, notes=_left_out(Sources(), choices, tried))


def _planned(
    model: ModelFile, config: EngineConfig, n_ctx: int, budget: Budget, sources: Sources
) -> Choice:
    places = budget.places or (Place(budget.n_bytes, budget.source),)
    n_layer = model.hparams.n_layer

    def need_of_layers(n_rows: int, layers: range, at: int = 0) -> Footprint:
        """Return what some layers need on a device; drafters are where the last layer is."""
        rows, drafters = replace(config, n_ubatch=n_rows), 0
        if layers.stop == n_layer:
            drafters = drafters_bytes(model, rows, n_ctx, sources)
            if budget.is_own:
                drafters += captured_drafts(model.hparams, rows, n_ctx, sources)
            if sources.draft:  # copies of hidden states of other stages
                n_sweep = sweep_rows(min(rows.n_rows, n_ctx), n_ctx)
                drafters += 4 * model.hparams.n_embd * n_sweep * (len(places) - 1)
        return needed_bytes(model, rows, n_ctx, drafters, layers, budget.is_own, at)

    def need_of(n_rows: int) -> Footprint:
        need = need_of_layers(n_rows, range(n_layer))
        each = ("compute", "other", "staging", "ring")  # on every device
        return replace(need, **{name: len(places) * getattr(need, name) for name in each})

    n_rows = choose_rows(config, budget.n_bytes if budget.is_own else None, need_of)
    settings = SplitSettings(config.pin_layers, config.cache_slots, budget.shares, budget.demand)
    stages = split_layers(
        n_layer, places, lambda at, layers: need_of_layers(n_rows, layers, at), settings
    )
    need = need_of(n_rows)
    plan = merged(stages, need.slot_bytes, need.n_expert)
    return Choice(sources, plan, n_rows, need_of, stages=stages)


def choose_rows(
    config: EngineConfig, budget: int | None, need_of: Callable[[int], Footprint]
) -> int:
    """Return the rows of a chunk: what the user set, or the most that experts can afford.

    budget: device bytes; None without a limit. need_of: what the model needs with chunks of so many
    rows.
    """
    if config.n_ubatch is not None:
        return config.n_ubatch
    if budget is None:
        return CPU_ROWS
    if config.cache_slots is None and config.pin_layers is None:
        for n_rows in (*_CHUNKS, _LEAST):  # nothing is as good as all experts
            need = need_of(n_rows)
            if need.fixed + need.experts <= budget:
                return n_rows
    least = need_of(_LEAST)
    set_bytes = (config.cache_slots or 0) * max(least.slot_bytes)
    set_bytes += (config.pin_layers or 0) * least.n_expert * max(least.slot_bytes)
    left = budget - least.fixed - least.staging - least.ring - set_bytes
    # what slots and layers that the user set leave has no other use
    share = 1.0 if None not in (config.cache_slots, config.pin_layers) else _SHARE
    for n_rows in _CHUNKS:
        need = need_of(n_rows)
        if need.fixed + need.staging - least.fixed - least.staging <= share * left:
            return n_rows
    return _LEAST


def _price(plain: Choice, found: Choice, config: EngineConfig) -> Price:
    """Return the price of what a choice drafts with."""
    longest = {"mtp": MAX_MTP_DRAFT} if found.sources.mtp else {}
    if found.sources.draft:
        longest[found.sources.draft.hparams.name] = found.sources.draft.hparams.max_draft
    most = {name: min(n, max(config.n_draft, 1)) for name, n in longest.items()}
    return price_of(plain.need_of(plain.n_ubatch), plain.plan, found.plan, most)


def _left_out(loaded: Sources, choices: list[Sources], tried: list[Choice]) -> tuple[str, ...]:
    """Return a line for each drafter that could be loaded and is not."""
    alone: dict[str, Sources] = {}  # of several ways to load one, the last takes least memory
    for one in choices:
        if one.mtp != (one.draft is not None):
            alone["mtp" if one.mtp else "dflash"] = one
    prices = {choice.sources: choice.price for choice in tried if choice.price}
    lines = []
    for spec, one in alone.items():
        if not (loaded.mtp if one.mtp else loaded.draft):
            what = one.draft.path if one.draft else "the MTP block"
            why = _why(prices[one]) if one in prices else "there is no memory for it"
            if one not in prices and (loaded.mtp or loaded.draft):
                why = "beside the other drafter it would take the place of too many experts"
            lines.append(f"{what}: not loaded: {why}; --spec {spec} loads it")
    return tuple(lines)


def _why(price: Price) -> str:
    """Return why a drafter with this price is not loaded."""
    takes = f"its {format_bytes(price.n_bytes)} take the place of {price.n_slots:,} experts"
    if price.drafting <= 1.0:
        return f"{takes}, which costs more than its drafts bring"
    return f"{takes}, and text that it cannot draft would have {price.idle:.2f}x the speed"
