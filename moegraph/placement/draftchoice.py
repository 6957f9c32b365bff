"""Decides what is loaded to draft tokens, and divides device memory between it and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ..config import EngineConfig
from ..errors import ConfigError, OutOfDeviceMemory
from ..modelfile import ModelFile
from ..modelfile.draftfile import DraftFile
from ..resident.layout import MAX_MTP_DRAFT
from ..units import format_bytes
from .chunksize import choose_rows
from .drafters import Sources, drafters_bytes, is_fitting, sources_of
from .draftprice import Price, price_of
from .footprint import needed_bytes
from .planner import Demand, Footprint, Plan, make_plan


@dataclass(frozen=True)
class Room:
    """The device memory that a model and its drafters may use.

    n_bytes: None without a limit. source: what sets it, for messages. is_own: the device has memory
    of its own, which chunks of a prompt share with experts. demand: as of `make_plan`.
    """

    n_bytes: int | None
    source: str = "--vram"
    is_own: bool = True
    demand: Demand | None = None


@dataclass(frozen=True)
class Choice:
    """What drafts, and the memory of everything.

    n_ubatch: rows of a chunk of a prompt. need_of: what the model needs beside these drafters with
    so many. price: None if nothing is loaded that takes memory. notes: what `auto` does not load
    and why, a line each.
    """

    sources: Sources
    plan: Plan
    n_ubatch: int
    need_of: Callable[[int], Footprint]
    price: Price | None = None
    notes: tuple[str, ...] = ()


def choose(
    model: ModelFile, config: EngineConfig, n_ctx: int, draft: DraftFile | None, room: Room
) -> Choice:
    """Return what is loaded to draft tokens, and the plan for it.

    config: after `with_drafts`. draft: the open drafter's file, if there is one.

    Raises:
        ConfigError: the settings name dflash and no file, or slots that do not fit.
        ModelFileError: they name the MTP block, and the file lacks it.
        OutOfDeviceMemory: the part without experts does not fit.
    """
    return _Choosing(model, config, n_ctx, room).choose(sources_of(model, config, draft))


class _Choosing:
    """One call of `choose`."""

    def __init__(self, model: ModelFile, config: EngineConfig, n_ctx: int, room: Room) -> None:
        self._model, self._config, self._n_ctx, self._room = model, config, n_ctx, room

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

    def _planned(self, sources: Sources) -> Choice:
        config, room = self._config, self._room

        def need_of(n_rows: int) -> Footprint:
            rows = replace(config, n_ubatch=n_rows)
            drafters = drafters_bytes(self._model, rows, self._n_ctx, sources)
            return needed_bytes(self._model, rows, self._n_ctx, drafters)

        n_rows = choose_rows(config, room.n_bytes if room.is_own else None, need_of)
        plan = make_plan(
            need_of(n_rows),
            room.n_bytes,
            config.pin_layers if config.pin_layers >= 0 else None,
            config.cache_slots if config.cache_slots >= 0 else None,
            room.source,
            room.demand,
        )
        return Choice(sources, plan, n_rows, need_of)

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
