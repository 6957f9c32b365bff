"""What fits into a given amount of device memory: experts, slots, and drafters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    "weights": "weights outside experts", "kv": "KV cache", "state": "states of sequences",
    "compute": "compute buffers", "other": "kernels, tables, encoder", "slots": "expert slots",
    "pinned": "experts of full layers", "staging": "staging of experts", "drafters": "drafters",
}  # fmt: skip
# JSON keys of the parts whose key differs from the plan's.
_KEYS = {"pinned": "full_layers"}
HEADER = ("budget", "drafter", "memory", "experts displaced", "drafting", "nothing drafted")


@dataclass(frozen=True)
class Budget:
    """Device memory, and what fits into it, or the reason why nothing does.

    cards: bytes of each card. reserve: bytes that the driver takes of all of them. choice: plan and
    drafters. n_ubatch: prompt tokens that are computed at a time. n_cpu_layers: the -ncmoe with
    which upstream would fit into the same memory of one card.
    """

    cards: tuple[int, ...]
    reserve: int
    choice: Choice | None
    n_ubatch: int
    n_cpu_layers: int | None
    refusal: str

    @property
    def title(self) -> str:
        """Return the budget in words."""
        return " + ".join(map(format_bytes, self.cards))

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all cards."""
        return sum(self.cards)

    @property
    def plan(self) -> Plan | None:
        """Return the plan for the memory of all cards."""
        return self.choice.plan if self.choice else None

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """Return the layers of each of several cards, and its plan."""
        return self.choice.stages if self.choice and len(self.cards) > 1 else ()


def sizes_of(sizes: Iterable[str]) -> list[list[int]]:
    """Return the bytes of the cards that each --vram names; a bare number means GiB."""
    return [[parse_bytes(one, unit="g") for one in size.split(",")] for size in sizes]


class Planner:
    """Says what of a model and its drafters fits into the memory of one or several cards."""

    def __init__(
        self, model: ModelFile, config: EngineConfig, stack: ExitStack,
        reserve: int = RESERVE_BYTES, demand: Demand | None = None,
        shares: tuple[float, ...] | None = None,
    ) -> None:  # fmt: skip
        """Open the drafter's file; stack gets the call that closes it.

        config: after `with_drafts`. reserve: bytes of each card that its driver takes. demand: as
        of `make_plan`. shares: of the layers that several cards get; None: the planner chooses.
        """
        from ..placement.drafters import open_draft_file, sources_of

        self._model, self._config, self._reserve = model, config, reserve
        self._demand, self._shares = demand, shares
        self._n_ctx = config.ctx_within(model.hparams.n_ctx_train)
        self._draft = open_draft_file(model, config, stack)
        sources_of(model, config, self._draft)  # refuses what cannot draft

    def need_of(self, n_rows: int) -> Footprint:
        """Return what the model needs without drafters, with so many rows in a chunk."""
        from ..placement.footprint import needed_bytes

        return needed_bytes(self._model, replace(self._config, n_ubatch=n_rows), self._n_ctx)

    def default_sizes(self, own: int | None) -> list[int]:
        """Return sizes worth a look: usual cards, or parts of a model that fits into all.

        own: bytes of this machine's card.
        """
        config, need = self._config, self.need_of(self._config.n_rows)
        whole = self._reserve + need.fixed + need.experts
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

    def budget(self, cards: Sequence[int]) -> Budget:
        """Return what fits into cards of so many bytes; refuses settings that no memory allows."""
        from ..placement.memory import choose_rows
        from ..placement.planner import upstream_cpu_layers

        reserve = len(cards) * self._reserve
        usable, choice, refusal = sum(cards) - reserve, None, ""
        n_rows = choose_rows(self._config, usable, self.need_of)
        need = self.need_of(n_rows)
        if usable < 0:
            refusal = (
                f"--vram {format_bytes(sum(cards))} is less than the {format_bytes(reserve)} that "
                "the driver takes for itself (--driver-memory of `moegraph plan`); allow more "
                "memory"
            )
        else:
            try:
                choice = self._choose(cards)
                n_rows = choice.n_ubatch
                need = choice.need_of(n_rows)
            except (OutOfDeviceMemory, ConfigError) as error:
                is_setting = isinstance(error, ConfigError)
                if is_setting and usable >= need.fixed + need.staging + need.ring:
                    raise
                refusal = str(error)
        upstream = upstream_cpu_layers(need, usable) if len(cards) == 1 else None
        return Budget(tuple(cards), reserve, choice, n_rows, upstream, refusal)

    def _choose(self, cards: Sequence[int]) -> Choice:
        from ..placement.memory import Budget, choose
        from ..placement.split import Place

        names, shares = [f"--vram of card {at}" for at in range(1, len(cards) + 1)], self._shares
        if len(cards) == 1:
            less = f"less {format_bytes(self._reserve)} for the driver"
            names, shares = [f"--vram {format_bytes(cards[0])} {less}"], None
        places = [Place(max(n - self._reserve, 0), name) for n, name in zip(cards, names)]
        budget = Budget.of(places, True, self._demand, shares)
        return choose(self._model, self._config, self._n_ctx, self._draft, budget)


def show_cards(budget: Budget) -> None:
    """Print what each of several cards holds: layers, experts, slots of a layer, bytes left."""
    ui.table([
        (f"{at}: {format_bytes(n)}", f"{stage.layers.start} to {stage.layers.stop - 1}",
         format_share(stage.plan.resident_share), slots_text(stage.plan),
         format_bytes(stage.plan.margin or 0))
        for at, (n, stage) in enumerate(zip(budget.cards, budget.stages), 1)
    ], ("card", "layers", "their experts", "slots a layer", "left over"))  # fmt: skip


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


def slots_text(plan: Plan) -> str:
    """Return the slots of a layer that is not full, as '126' or '100 to 126'; '-' if all are."""
    rest = [n for il, n in enumerate(plan.n_slots) if il not in (*plan.pinned, *plan.dense)]
    if not rest:
        return "-"
    return f"{rest[0]}" if min(rest) == max(rest) else f"{min(rest)} to {max(rest)}"


def resident_text(plan: Plan) -> str:
    """Return in words which experts are resident."""
    if plan.all_resident:
        return "all experts resident"
    text = f"{format_share(plan.resident_share)} of the experts resident"
    n_full = len(plan.pinned)
    full = f", {n_full} full layer{'s' if n_full > 1 else ''}" if n_full else ""
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
