"""What fits into a given amount of device memory: experts, slots, and drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import ConfigError, OutOfDeviceMemory
from ..units import GiB, MiB, format_bytes, format_share, parse_bytes
from . import ui

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..placement.drafters import Sources
    from ..placement.memory import Choice
    from ..placement.planner import Demand, Footprint, Plan
    from ..placement.split import StagePlan

# Device memory that a CUDA driver takes for itself, if it was not measured.
RESERVE_BYTES = 512 * MiB
# Device memory of usual cards.
_CARDS = tuple(n * GiB for n in (6, 8, 12, 16, 24))
# Cards of one size differ by less than this share of it.
_ALIKE = 0.03
_PURPOSES = {
    "weights": "weights outside experts", "kv": "KV cache", "state": "recurrent state",
    "compute": "compute buffers", "other": "kernels and tables", "staging": "staging of experts",
    "pinned": "experts of full layers", "slots": "expert slots", "drafters": "drafters",
}  # fmt: skip
# JSON keys of the parts whose key differs from the plan's.
_KEYS = {"pinned": "full_layers"}
CARD_HEADER = "card", "layers", "their experts", "slots a layer", "left over"
Chooser = Callable[[Sequence[int]], "tuple[Choice | None, str]"]
HEADER = ("budget", "drafter", "memory", "experts displaced", "drafting", "nothing drafted")


@dataclass(frozen=True)
class Budget:
    """A budget in bytes, and its plan or the reason why it has none.

    n_cpu_layers: the -ncmoe with which upstream would fit into the same budget. n_ubatch: prompt
    tokens that are computed at a time. cards: the budget of each card, if there are several;
    n_bytes and reserve are then those of all. stages: the layers of each, and its plan.
    """

    n_bytes: int
    reserve: int
    plan: Plan | None
    n_cpu_layers: int | None
    n_ubatch: int
    refusal: str = ""
    cards: tuple[int, ...] = ()
    stages: tuple[StagePlan, ...] = ()

    @property
    def title(self) -> str:
        """Return the budget in words."""
        return " + ".join(map(format_bytes, self.cards or (self.n_bytes,)))


def card_sizes(sizes: Iterable[str]) -> list[list[int]]:
    """Return the bytes of the cards that each --vram names; a bare number means GiB."""
    return [[parse_bytes(one, unit="g") for one in size.split(",")] for size in sizes]


def default_budgets(
    need: Footprint, config: EngineConfig, reserve: int, own: int | None = None
) -> list[int]:
    """Return budgets in bytes worth a look: usual cards, or parts of a model that fits into all.

    reserve: device memory that the driver takes for itself, in bytes. own: of this machine's card.
    """
    whole = reserve + need.fixed + need.experts
    if whole > _CARDS[0] or (config.pin_layers, config.cache_slots) != (None, None):
        if own is None or any(abs(own - n) < n * _ALIKE for n in _CARDS):
            return list(_CARDS)
        return sorted((*_CARDS, own))
    # staging is not needed once all experts are resident
    parts = [
        whole - need.experts * missing // 4 + need.staging + need.ring for missing in (3, 2, 1)
    ]
    in_mib = {-(-n // MiB) for n in (*parts, whole) if n <= whole}
    return [n * MiB for n in sorted(in_mib)]


def plan_budget(
    need_of: Callable[[int], Footprint], config: EngineConfig, n_bytes: int, reserve: int,
    demand: list[list[float]] | None = None,
) -> Budget:  # fmt: skip
    """Plan a budget of n_bytes, of which the driver takes `reserve` bytes.

    need_of: the memory that the model needs, by the rows of a chunk. demand: as of `make_plan`.
    """
    from ..placement.chunksize import choose_rows
    from ..placement.planner import make_plan, upstream_cpu_layers

    usable = n_bytes - reserve
    n_rows = choose_rows(config, usable, need_of)
    need = need_of(n_rows)
    if usable < 0:
        return Budget(n_bytes, reserve, None, None, n_rows, (
            f"--vram {format_bytes(n_bytes)} is less than the {format_bytes(reserve)} that the "
            "driver takes for itself (--driver-memory of `moegraph plan`); allow more memory"
        ))  # fmt: skip
    upstream = upstream_cpu_layers(need, usable)
    try:
        plan = make_plan(
            need, usable,
            config.pin_layers,
            config.cache_slots,
            f"--vram {format_bytes(n_bytes)} less {format_bytes(reserve)} for the driver",
            demand,
        )  # fmt: skip
    except (OutOfDeviceMemory, ConfigError) as error:
        if isinstance(error, ConfigError) and usable >= need.fixed + need.staging + need.ring:
            raise
        return Budget(n_bytes, reserve, None, upstream, n_rows, str(error))
    return Budget(n_bytes, reserve, plan, upstream, n_rows)


def plan_cards(cards: Sequence[int], reserve: int, choice: Choice | None, refused: str) -> Budget:
    """Return the budget of several cards, of each of which the driver takes `reserve` bytes.

    choice: how they are divided, or None with the reason.
    """
    n, each = sum(cards), len(cards) * reserve
    if choice is None:
        return Budget(n, each, None, None, 0, refused, tuple(cards))
    return Budget(
        n, each, choice.plan, None, choice.n_ubatch, cards=tuple(cards), stages=choice.stages
    )


def card_rows(budget: Budget) -> list[tuple[str, ...]]:
    """Return what each of several cards holds: layers, experts, slots of a layer, bytes left."""
    return [
        (
            f"{at}: {format_bytes(n)}", f"{stage.layers.start} to {stage.layers.stop - 1}",
            format_share(stage.plan.resident_share), slots_text(stage.plan),
            format_bytes(stage.plan.margin or 0),
        )
        for at, (n, stage) in enumerate(zip(budget.cards, budget.stages), 1)
    ]  # fmt: skip


def memory_rows(budget: Budget) -> list[tuple[str, str]]:
    """Return what takes device memory; the rows add up to the budget. Empty without a plan."""
    if budget.plan is None:
        return []
    rows = [("driver", budget.reserve)]
    rows += [(_PURPOSES[name], n) for name, n in budget.plan.bytes.items()]
    rows.append(("left over", budget.plan.margin or 0))
    return [(name, format_bytes(n)) for name, n in rows if n] + [
        ("together", format_bytes(budget.n_bytes))
    ]


def host_text(plan: Plan, spare: int | None) -> str:
    """Return in words what copies of experts take in host memory.

    spare: what they may take on this machine, None if unknown.
    """
    if not plan.host_bytes:
        return "none"
    text = f"{format_bytes(plan.host_bytes)} pinned, for the experts of layers that are not full"
    if spare is None or plan.host_bytes <= spare:
        return text
    return f"{text}; this machine can spare {format_bytes(spare)}, the rest stays in the file"


def slots_text(plan: Plan) -> str:
    """Return the slots of a layer that is not full, as '126' or '100 to 126'; '-' if all are."""
    rest = [n for il, n in enumerate(plan.n_slots) if il not in plan.pinned]
    if not rest:
        return "-"
    return f"{rest[0]}" if min(rest) == max(rest) else f"{min(rest)} to {max(rest)}"


def resident_text(plan: Plan) -> str:
    """Return in words which experts are resident."""
    if plan.all_resident:
        return "all experts resident"
    text = f"{format_share(plan.resident_share)} of the experts resident"
    full = f", {len(plan.pinned)} full layers" if plan.pinned else ""
    return f"{text}, {slots_text(plan)} slots a layer{full}"


def refusals(budgets: Sequence[Budget]) -> list[str]:
    """Return one line for each distinct reason why budgets do not fit."""
    refused = [b for b in budgets if b.refusal]
    lines = []
    for below in (True, False):
        group = [b for b in refused if (b.n_bytes < b.reserve) is below]
        if group:
            # The largest of these budgets stands for all that fail for the same reason.
            largest = max(group, key=lambda b: b.n_bytes)
            others = ", ".join(b.title for b in group if b is not largest)
            lines.append(largest.refusal + (f" (nor does it fit into {others})" if others else ""))
    return lines


def budget_fields(budget: Budget) -> dict[str, Any]:
    """Return a budget for JSON; `bytes`, left_over included, adds up to budget_bytes."""
    plan = budget.plan
    return {
        "budget_bytes": budget.n_bytes,
        "refusal": budget.refusal or None,
        "upstream_n_cpu_moe": budget.n_cpu_layers,
        "n_ubatch": budget.n_ubatch,
        "cards": [
            {
                "budget_bytes": n,
                "layers": [stage.layers.start, stage.layers.stop],
                "resident_share": round(stage.plan.resident_share, 5),
                "left_over": stage.plan.margin,
            }
            for n, stage in zip(budget.cards, budget.stages)
        ],
        "plan": None if plan is None else {
            "n_slots_by_layer": list(plan.n_slots),
            "full_layers": list(plan.pinned),
            "all_resident": plan.all_resident,
            "resident_share": round(plan.resident_share, 5),
            "host_bytes": plan.host_bytes,
            "bytes": {
                "driver": budget.reserve,
                **{_KEYS.get(name, name): n for name, n in plan.bytes.items()},
                "left_over": plan.margin,
            },
        },
    }  # fmt: skip


def chooser(
    model: ModelFile, config: EngineConfig, demand: Demand | None, stack: ExitStack,
    shares: tuple[float, ...] | None = None,
) -> Chooser:  # fmt: skip
    """Return what divides budgets in device bytes, one or several cards', and says what drafts.

    Where nothing fits it returns None, and the reason.

    config: after `with_drafts`. stack: gets the call that closes the drafter's file. shares: of the
    layers that several cards get; None: the planner chooses.
    """
    from ..placement.drafters import open_draft_file, sources_of
    from ..placement.memory import Budget, choose
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
            return choose(model, config, n_ctx, draft, Budget.of(places, True, demand, mine)), ""
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
