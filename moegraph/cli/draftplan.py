"""What `moegraph plan` says of drafters: their memory, the experts' slots it takes, the effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import ConfigError, OutOfDeviceMemory
from ..units import format_bytes
from . import ui

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..placement.draftchoice import Choice
    from ..placement.drafters import Sources
    from ..placement.planner import Demand, Footprint

Chooser = Callable[[Sequence[int]], "tuple[Choice | None, str]"]
HEADER = ("budget", "drafter", "memory", "experts displaced", "drafting", "nothing drafted")


def chooser(
    model: ModelFile, config: EngineConfig, demand: Demand | None, stack: ExitStack,
    shares: tuple[float, ...] | None = None,
) -> Chooser:  # fmt: skip
    """Return what divides budgets in device bytes, one or several cards', and says what drafts.

    Where nothing fits it returns None, and the reason.

    config: after `with_drafts`. stack: gets the call that closes the drafter's file. shares: of the
    layers that several cards get; None: the planner chooses.
    """
    from ..placement.draftchoice import Room, choose
    from ..placement.drafters import open_draft_file, sources_of
    from ..placement.split import Place

    draft, n_ctx = (
        open_draft_file(model, config, stack),
        config.ctx_within(model.hparams.n_ctx_train),
    )
    sources_of(model, config, draft)

    def choice_of(budgets: Sequence[int]) -> tuple[Choice | None, str]:
        names = [f"--vram of card {at + 1}" for at in range(len(budgets))]
        names = names if len(budgets) > 1 else ["--vram"]
        places = [Place(max(n, 0), name) for n, name in zip(budgets, names)]
        mine = shares if len(places) > 1 else None
        try:
            return choose(model, config, n_ctx, draft, Room.of(places, True, demand, mine)), ""
        except (ConfigError, OutOfDeviceMemory) as error:
            return None, str(error)

    return choice_of


def plain_need(model: ModelFile, config: EngineConfig) -> Callable[[int], Footprint]:
    """Return what gives the memory that a model needs without drafters, by rows of a chunk."""
    from ..placement.footprint import needed_bytes

    n_ctx = config.ctx_within(model.hparams.n_ctx_train)
    return lambda n_rows: needed_bytes(model, replace(config, n_ubatch=n_rows), n_ctx)


def draft_row(title: str, choice: Choice) -> tuple[str, ...]:
    """Return the cells of a budget."""
    price = choice.price
    if price is None:
        return (title, *[ui.NONE] * (len(HEADER) - 1))
    return (
        title, " + ".join(_names(choice.sources)), format_bytes(price.n_bytes),
        f"{price.n_slots:,}", f"{price.drafting:.2f}x", f"{price.idle:.3f}x",
    )  # fmt: skip


def draft_fields(choice: Choice | None) -> dict[str, Any] | None:
    """Return what drafts in a budget, for JSON; None if nothing does."""
    if choice is None or (choice.price is None and not choice.notes):
        return None
    price = choice.price
    return {
        "loaded": _names(choice.sources),
        "bytes": price.n_bytes if price else 0,
        "displaced_experts": price.n_slots if price else 0,
        "drafting_speedup": round(price.drafting, 4) if price else None,
        "idle_speedup": round(price.idle, 4) if price else None,
        "notes": list(choice.notes),
    }


def _names(sources: Sources) -> list[str]:
    file = [sources.draft.hparams.name] if sources.draft else []
    return [*(["mtp"] if sources.mtp else []), *file]
