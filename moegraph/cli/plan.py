"""`moegraph plan`: how much of a model fits on a card, and the predicted speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import EngineConfig
from ..config import settings as engine_settings
from ..errors import OutOfDeviceMemory
from ..ggml.free_memory import host_memory
from ..units import format_bytes, format_share, parse_bytes
from . import models, options, ui
from .budget import (
    CARD_HEADER,
    HEADER,
    Budget,
    budget_fields,
    card_rows,
    card_sizes,
    chooser,
    default_budgets,
    draft_fields,
    draft_row,
    host_text,
    memory_rows,
    plain_need,
    plan_budget,
    plan_cards,
    refusals,
    slots_text,
)
from .models import target_argument
from .prediction import (
    AUTO,
    Assumption,
    Sizes,
    assumed_text,
    find_sizes,
    profile_of,
    prompt_cells,
    prompt_fields,
    prompt_header,
    prompts_of,
    simulation_fields,
    trace_fields,
)

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..experts.cost import Machine
    from ..experts.policy import Policy
    from ..placement.identity import RouterShape
    from ..placement.memory import Choice
    from ..placement.planner import Footprint, Plan
    from ..placement.profile import Profile
    from ..placement.prompttime import PromptEstimate
    from ..placement.simulate import Simulation
    from ..placement.trace import Trace

_SETTINGS = (
    "n_ctx", "n_ubatch", "type_k", "type_v", "split", "pin_layers", "cache_slots", "policy", "miss",
    "spec", "draft", "draft_vocab",
)  # fmt: skip
# Tokens of a generated trace: enough to warm up and to average over.
_N_GENERATED, _N_WARM = 512, 192
_HEADER = (
    "budget", "experts resident", "full layers", "slots a layer", "left over", "hit rate", "tok/s",
    "-ncmoe",
)  # fmt: skip


def _plan_options(command: Any) -> Any:
    """Add the options of the engine settings that a plan depends on."""
    chosen = [s for s in engine_settings() if s.name in _SETTINGS]
    chosen = [options.spec_by_draft(s) if s.name == "spec" else s for s in chosen]
    for setting in reversed(chosen):
        command = options.setting_option(setting)(command)
    return command


@click.command("plan")
@target_argument
@click.option(
    "--vram", multiple=True, metavar="SIZE",
    help="Device memory of the card, such as 8 (in GiB) or 8192MiB, or of several cards, such as "
    "8,12; repeatable. Default: 6, 8, 12, 16, 24 and this machine's card; if the model fits into "
    "6, sizes that hold 25 to 100 % of its experts.",
)  # fmt: skip
@click.option(
    "--driver-memory", default="512MiB", metavar="SIZE",
    help="Part of --vram that the driver takes for itself.",
)  # fmt: skip
@_plan_options
@click.option(
    "--profile", "profile_path", type=click.Path(path_type=Path), metavar="FILE",
    help="Routing profile, from which the planner spreads and fills the slots.",
)  # fmt: skip
@click.option(
    "--profile-class", metavar="NAME", help="Class of prompts in the profile. Default: all classes."
)
@click.option(
    "--routing", "trace_path", type=click.Path(path_type=Path), metavar="TRACE",
    help="Predict speed with this routing trace. Default: a generated one.",
)  # fmt: skip
@click.option(
    "--machine", default=AUTO, metavar="auto|NAME|FILE",
    help="Machine to predict for: auto, h200, rtx2060, rtx4060, rtx3060, rtx4060ti, desktop, or "
    "the output of doctor --measure. auto: the card of this machine if it has so much memory, or "
    "else a usual card of that size.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    target: str, vram: tuple[str, ...], driver_memory: str, profile_path: Path | None,
    profile_class: str | None, trace_path: Path | None, machine: str, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Show how the planner divides device memory for the model TARGET, without loading weights.

    A full layer has all its experts on the device; the other layers share the slots. The last
    column is the -ncmoe (number of layers whose experts stay in host memory) with which llama.cpp
    needs the same device memory. The speeds are predicted for one machine, or for a usual card of
    each size; the line "machine" says which.

    \b
    Examples:
      moegraph plan model.gguf
      moegraph plan model.gguf --vram 8 --vram 12 -c 32768 -ctk q8_0 -ctv q8_0
      moegraph plan model.gguf --vram 12 --vram 8,12
      moegraph plan model.gguf --vram 12 --profile model.gguf.routing.json --routing my.trace
      moegraph plan model.gguf --draft dflash.gguf --draft-vocab 32768
    """
    from ..experts.policy import parse_policy
    from ..placement.drafters import with_drafts
    from ..placement.identity import router_shape
    from ..placement.split import shares_of

    shares = shares_of(given.pop("split"))
    config = with_drafts(options.build_config(given))
    given_sizes = card_sizes(vram)
    for cards in given_sizes:
        if shares is not None and len(cards) not in (1, len(shares)):
            raise click.UsageError(f"--split has {len(shares)} entries for {len(cards)} cards")
    reserve, assumed = parse_bytes(driver_memory), Assumption.of(machine)
    with models.open_header(target) as model, ExitStack() as stack:
        shape = router_shape(model)
        profile = profile_of(profile_path, profile_class, shape)
        trace = _trace(trace_path, shape)
        need_of = plain_need(model, config)
        need = need_of(config.n_rows)
        job = _Job(
            config, parse_policy(config.policy), assumed, need.slot_bytes, trace, profile,
            profile_class,
        )  # fmt: skip
        own = assumed.card.n_bytes if assumed.card else None
        sizes = given_sizes or [[n] for n in default_budgets(need, config, reserve, own)]
        demand = profile.demand().tolist() if profile else None
        choice_of = chooser(model, config, demand, stack, shares)
        rows = []
        for cards in sizes:
            choice, refused = choice_of([n - reserve for n in cards])
            if len(cards) > 1:
                budget = plan_cards(cards, reserve, choice, refused)
            else:
                beside = choice.need_of if choice else need_of
                budget = plan_budget(beside, config, cards[0], reserve, demand)
            rows.append(_predict(budget, cards, job, choice))
        if len(rows) == 1 and rows[0].budget.refusal:
            raise OutOfDeviceMemory(rows[0].budget.refusal)
        if as_json:
            click.echo(json.dumps(_report(model, need, job, rows)))
        else:
            _show(model, need, job, rows)


@dataclass(frozen=True)
class _Job:
    """What all budgets have in common. slot_bytes: of an expert of each layer."""

    config: EngineConfig
    policy: Policy
    assumed: Assumption
    slot_bytes: tuple[int, ...]
    trace: Trace
    profile: Profile | None
    profile_class: str | None


@dataclass(frozen=True)
class _Row:
    """A budget, the speeds predicted for it, and what drafts; None where nothing fits.

    machine: for which they are predicted. sizes: of the experts, with its times for them.
    """

    budget: Budget
    machine: Machine
    sizes: Sizes
    found: Simulation | None
    prompts: list[PromptEstimate]
    drafts: Choice | None


def _trace(path: Path | None, shape: RouterShape) -> Trace:
    from ..placement.generator import generate_trace
    from ..placement.trace import read_trace

    if path is None:
        return generate_trace(shape, _N_GENERATED)
    trace = read_trace(path)
    trace.shape.require(shape, f"{path}: the trace")
    return trace


def _predict(budget: Budget, cards: Sequence[int], job: _Job, drafts: Choice | None) -> _Row:
    """Return a budget with the speeds on its machine; cards: the bytes of each card."""
    machine = job.assumed.machine(cards)
    sizes = find_sizes(machine, job.trace, job.slot_bytes)
    if budget.plan is None:
        return _Row(budget, machine, sizes, None, [], drafts)
    return _Row(
        budget, machine, sizes, _replay(budget, budget.plan, sizes.machine or machine, job),
        prompts_of(
            job.trace, budget.plan.n_slots, job.policy, sizes, job.profile, job.profile_class,
            budget.n_ubatch,
        ), drafts,
    )  # fmt: skip


def _replay(budget: Budget, plan: Plan, machine: Machine, job: _Job) -> Simulation:
    from ..placement.simulate import simulate

    trace = job.trace
    return simulate(
        trace, plan.n_slots, job.policy, machine, mode=job.config.miss, profile=job.profile,
        profile_class=job.profile_class, slot_bytes=job.slot_bytes,
        stages=[stage.layers for stage in budget.stages],
        skip=_N_WARM if trace.n_tokens - trace.n_prompt > 2 * _N_WARM else 0,
    )  # fmt: skip


def _show(model: ModelFile, need: Footprint, job: _Job, rows: list[_Row]) -> None:
    ui.heading("Plan")
    ui.table(_head(model, need, job, rows))
    click.echo()
    budgets = [row.budget for row in rows]
    are_several = len({row.machine.name for row in rows}) > 1
    columns = (*_HEADER, "predicted for") if are_several else _HEADER
    ui.table([_cells(row)[: len(columns)] for row in rows], columns)
    if job.config.spec != "off":
        _show_drafts(rows)
    prompts = [
        (row.budget.title, f"{row.budget.n_ubatch}", *prompt_cells(row.prompts))
        for row in rows
        if row.prompts
    ]
    if prompts and all(row.sizes.machine and row.machine.prompt for row in rows):
        ui.section("Prompts, estimated")
        ui.table(prompts, ("budget", "-ub", *prompt_header()))
    if len(rows) == 1:
        if budgets[0].stages:
            ui.section("Cards")
            ui.table(card_rows(budgets[0]), CARD_HEADER)
        ui.section("Device memory")
        ui.table(memory_rows(budgets[0]))
        if plan := budgets[0].plan:
            ui.section("Host memory")
            ui.table([("experts", host_text(plan, host_memory().spare))])
    for line in refusals(budgets):
        ui.note(line)
    if not rows[0].sizes.machine:
        ui.note("no speed; `moegraph doctor --measure TARGET` measures this machine and this model")


def _show_drafts(rows: list[_Row]) -> None:
    """Print what drafts in each budget, and what `auto` does not load."""
    ui.section("Drafters, predicted; speeds beside those without a drafter")
    ui.table([draft_row(row.budget.title, row.drafts) for row in rows if row.drafts], HEADER)
    for row in rows:
        for line in row.drafts.notes if row.drafts else ():
            ui.note(f"{row.budget.title}: {line}")


def _head(model: ModelFile, need: Footprint, job: _Job, rows: list[_Row]) -> list[tuple[str, str]]:
    """Return the rows that describe model, context, machine, routing and policy."""
    hp, config = model.hparams, job.config
    name = model.kv.get("general.name") or model.path.name
    why = rows[0].sizes.why
    kinds = config.type_k if config.type_k == config.type_v else f"{config.type_k}/{config.type_v}"
    return [
        ("model", f"{name}: {hp.n_layer} layers of {hp.n_expert} experts, {hp.n_expert_used} used; "
                  f"{format_bytes(model.n_bytes)}"),
        ("context", f"{config.ctx_within(hp.n_ctx_train):,} positions, KV cache {kinds}, "
                    f"{format_bytes(need.kv)}"),
        ("machine", f"none: {why}" if why else assumed_text([row.machine for row in rows])),
        ("routing", job.trace.source or "as recorded"),
        ("policy", f"{config.policy}, missing experts: {config.miss}"),
    ]  # fmt: skip


def _cells(row: _Row) -> list[str]:
    budget, found = row.budget, row.found
    upstream = ui.NONE if budget.n_cpu_layers is None else f"{budget.n_cpu_layers}"
    plan = budget.plan
    if plan is None or found is None:
        return [budget.title, *[ui.NONE] * 6, upstream, row.machine.name]
    return [
        budget.title, format_share(plan.resident_share), f"{len(plan.pinned)}",
        slots_text(plan), format_bytes(plan.margin or 0), f"{found.hit_rate:.3f}",
        f"{found.tokens_per_s:.0f}" if row.sizes.machine else ui.NONE, upstream, row.machine.name,
    ]  # fmt: skip


def _report(model: ModelFile, need: Footprint, job: _Job, rows: list[_Row]) -> dict[str, Any]:
    return {
        "path": str(model.path),
        "n_layer": need.n_layer, "n_expert": need.n_expert, "n_expert_used": need.n_expert_used,
        "n_ctx": job.config.ctx_within(model.hparams.n_ctx_train),
        "type_k": job.config.type_k, "type_v": job.config.type_v,
        "policy": job.config.policy, "miss": job.config.miss,
        "slot_bytes_by_layer": list(need.slot_bytes),
        "trace": trace_fields(job.trace),
        "budgets": [
            {
                **budget_fields(row.budget),
                "machine": row.machine.name,
                "predicted": row.found and simulation_fields(
                    row.found, row.sizes.machine is not None
                ),
                "prompts": [prompt_fields(prompt) for prompt in row.prompts],
                "drafters": draft_fields(row.drafts),
            }
            for row in rows
        ],
    }  # fmt: skip
