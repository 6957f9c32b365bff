"""Divides device memory between experts and drafters, and decides which drafters are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..arch import ModelFile
from ..arch.draftfile import DraftFile
from ..config import EngineConfig
from ..errors import ConfigError, OutOfDeviceMemory
from ..resident.layout import MAX_MTP_DRAFT
from ..units import format_bytes
from .chunksize import choose_rows
from .drafters import Sources, drafters_bytes, is_fitting, sources_of
from .draftgraphs import captured_drafts
from .draftprice import Price, price_of
from .footprint import needed_bytes, sweep_rows
from .planner import Demand, Footprint, Plan
from .split import Place, SplitSettings, StagePlan, merged, plan_stage, split_layers


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

    config: after `with_drafts`. draft: the open drafter's file, if there is one.
    """
    choosing = _Choosing(model, config, n_ctx, budget)
    found = choosing.choose(sources_of(model, config, draft))
    choosing.forget()
    return found


class _Choosing:
    """One call of `choose`."""

    def __init__(self, model: ModelFile, config: EngineConfig, n_ctx: int, budget: Budget) -> None:
        self._model, self._config, self._n_ctx, self._budget = model, config, n_ctx, budget

    def choose(self, choices: list[Sources]) -> Choice:
        """Return the first choice that fits, and with `auto` is worth its memory."""
        is_named, tried = self._config.spec != "auto", list[Choice]()
        if not choices:
            return self._plain
        for sources in choices:
            is_last = is_named and sources is choices[-1]
            try:
                found = self._planned(sources)
            except (ConfigError, OutOfDeviceMemory):
                if is_last:
                    raise
                continue
            if is_last or is_fitting(found.plan, sources):
                tried.append(replace(found, price=self._price(found)))
                if is_named:
                    return tried[-1]
                if _is_worth_it(tried[-1]):
                    return replace(tried[-1], notes=_left_out(sources, choices, tried))
        return replace(self._plain, notes=_left_out(Sources(), choices, tried))

    def forget(self) -> None:
        """Drop what refers to this object, which would keep the model file in a cycle."""
        vars(self).pop("_plain", None)

    def _planned(self, sources: Sources) -> Choice:
        config, budget = self._config, self._budget
        places = budget.places or (Place(budget.n_bytes, budget.source),)
        n = len(places)

        def need_of(n_rows: int) -> Footprint:
            need = self._need(sources, n_rows)
            # these are on every device
            each = {
                name: n * getattr(need, name) for name in ("compute", "other", "staging", "ring")
            }
            return replace(need, **each)

        n_rows = choose_rows(config, budget.n_bytes if budget.is_own else None, need_of)
        settings = SplitSettings(
            config.pin_layers,
            config.cache_slots,
            budget.shares,
            budget.demand,
        )
        n_layer = self._model.hparams.n_layer
        if n == 1:
            layers = range(n_layer)
            plan = plan_stage(places[0], need_of(n_rows), layers, n_layer, settings)
            return Choice(sources, plan, n_rows, need_of, stages=(StagePlan(layers, plan),))
        stages = split_layers(
            n_layer, places, lambda _, layers: self._need(sources, n_rows, layers), settings
        )
        need = need_of(n_rows)
        plan = merged(stages, need.slot_bytes, need.n_expert)
        return Choice(sources, plan, n_rows, need_of, stages=stages)

    def _need(self, sources: Sources, n_rows: int, layers: range | None = None) -> Footprint:
        """Return what some layers, or all, need; drafters are where the last layer is."""
        rows, n_ctx = replace(self._config, n_ubatch=n_rows), self._n_ctx
        drafters = 0
        if layers is None or layers.stop == self._model.hparams.n_layer:
            drafters = drafters_bytes(self._model, rows, n_ctx, sources)
            if self._budget.is_own:
                drafters += captured_drafts(self._model.hparams, rows, n_ctx, sources)
            if self._budget.places and sources.draft:  # copies of taps of other stages
                n_sweep = sweep_rows(min(rows.n_rows, n_ctx), n_ctx)
                drafters += (
                    4 * self._model.hparams.n_embd * n_sweep * (len(self._budget.places) - 1)
                )
        return needed_bytes(self._model, rows, n_ctx, drafters, layers, self._budget.is_own)

    def _price(self, found: Choice) -> Price:
        plain, limit = self._plain, max(self._config.n_draft, 1)
        most = {name: min(n, limit) for name, n in _longest(found.sources).items()}
        return price_of(plain.need_of(plain.n_ubatch), plain.plan, found.plan, most)

    @cached_property
    def _plain(self) -> Choice:
        """What is loaded without drafters that take memory."""
        return self._planned(Sources())


def _is_worth_it(choice: Choice) -> bool:
    return choice.price is not None and choice.price.is_worth_it


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


def _longest(sources: Sources) -> dict[str, int]:
    """Return the most tokens that drafters draw up, by name."""
    found = {"mtp": MAX_MTP_DRAFT} if sources.mtp else {}
    if sources.draft:
        found[sources.draft.hparams.name] = sources.draft.hparams.max_draft
    return found
