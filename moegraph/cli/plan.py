"""`moegraph plan`: how much of a model fits on a card, and the predicted speed."""

from __future__ import annotations

import functools
import json
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import EngineConfig
from ..errors import OutOfDeviceMemory
from ..ggml.free_memory import host_memory
from ..units import format_bytes, format_share, parse_bytes
from . import models, options, prediction, ui
from .budget import (
    HEADER,
    Budget,
    Planner,
    budget_fields,
    draft_fields,
    draft_row,
    memory_rows,
    refusals,
    show_cards,
    sizes_of,
    slots_text,
)
from .models import target_argument
from .prediction import Assumption, Prediction, Routing, Times

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..experts.cost import Machine
    from ..experts.policy import Policy
    from ..placement.identity import RouterShape
    from ..placement.known import KnownModel
    from ..placement.planner import Footprint
    from ..placement.simulate import HostLimit
    from ..placement.trace import Trace

# The engine settings that a plan depends on.
_SETTINGS = (
    "n_ctx", "n_ubatch", "type_k", "type_v", "split", "pin_layers", "cache_slots", "policy", "miss",
    "spec", "draft", "draft_vocab", "mmproj_device",
)  # fmt: skip
# Tokens of a generated trace: enough to warm up and to average over.
_N_GENERATED, _N_WARM = 512, 192
_HEADER = (
    "budget", "experts resident", "full layers", "slots a layer", "left over", "host memory",
    "hit rate", "tok/s", "-ncmoe",
)  # fmt: skip


# Without a model: what may be given, and tokens of a generated trace.
_OF_MACHINE = ("vram", "driver_memory", "machine", "as_json")
_N_KNOWN = 256


@click.command("plan")
@functools.partial(target_argument, is_needed=False)
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
@options.engine_options(only=_SETTINGS)
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
    "--machine", default=prediction.AUTO, metavar="auto|NAME|FILE",
    help="Machine to predict for: auto, h200, rtx2060, rtx4060, rtx3060, rtx4060ti, desktop, or "
    "the output of doctor --measure. auto: the card of this machine if it has so much memory, or "
    "else a usual card of that size.",
)  # fmt: skip
@prediction.host_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    target: str | None, vram: tuple[str, ...], driver_memory: str, profile_path: Path | None,
    profile_class: str | None, trace_path: Path | None, machine: str, host_mem: str | None,
    disk: float, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Show how the planner divides device memory for the model TARGET, without loading weights.

    Without TARGET, it shows which of the best-known models this machine can run, and how fast.

    A full layer has all its experts on the device; the other layers share the slots, and have
    copies of their experts in host memory. The last column is the -ncmoe (number of layers whose
    experts stay in host memory) with which llama.cpp needs the same device memory. The speeds are
    predicted for one machine, or for a usual card of each size; the line "machine" says which.

    \b
    Examples:
      moegraph plan
      moegraph plan model.gguf
      moegraph plan model.gguf --vram 8 --vram 12 -c 32768 -ctk q8_0 -ctv q8_0
      moegraph plan model.gguf --vram 12 --vram 8,12
      moegraph plan model.gguf --vram 12 --profile model.gguf.routing.json --routing my.trace
      moegraph plan model.gguf --draft dflash.gguf --draft-vocab 32768
    """
    from ..experts.policy import parse_policy
    from ..placement.drafters import with_drafts
    from ..placement.footprint import token_work
    from ..placement.identity import router_shape
    from ..placement.split import shares_of

    shares = shares_of(given.pop("split"))
    config = with_drafts(options.build_config(given))
    given_sizes = sizes_of(vram)
    for cards in given_sizes:
        if shares is not None and len(cards) not in (1, len(shares)):
            raise click.UsageError(f"--split has {len(shares)} entries for {len(cards)} cards")
    reserve, assumed = parse_bytes(driver_memory), Assumption.of(machine)
    if target is None:
        _show_known(assumed, [sum(cards) for cards in given_sizes], reserve, as_json)
        return
    with models.open_header(target) as model, ExitStack() as stack:
        trace = _trace(trace_path, router_shape(model))
        routing = Routing.of(trace, profile_path, profile_class)
        demand = routing.profile.demand().tolist() if routing.profile else None
        planner = Planner(model, config, stack, reserve, demand, shares)
        need, policy = planner.need_of(config.n_rows), parse_policy(str(config.policy))
        limit = prediction.host_limit(host_mem, disk)
        job = _Job(config, policy, assumed, need, routing, token_work(model), limit)
        own = assumed.card.n_bytes if assumed.card else None
        sizes = given_sizes or [[n] for n in planner.default_sizes(own)]
        rows = [_predict(planner.budget(cards), job) for cards in sizes]
        if len(rows) == 1 and rows[0].budget.refusal:
            raise OutOfDeviceMemory(rows[0].budget.refusal)
        if as_json:
            click.echo(json.dumps(_report(model, job, rows)))
        else:
            _show(model, job, rows)


def _show_known(assumed: Assumption, sizes: list[int], reserve: int, as_json: bool) -> None:
    """Print which known models fit into card and host memory, and their predicted speed."""
    from ..placement.known import known_models

    for param in click.get_current_context().command.params:
        if param.name not in _OF_MACHINE and options.is_typed(param.name or ""):
            raise click.UsageError(f"{param.opts[0]} is for a model; give TARGET or -hf")
    card = max(sizes, default=assumed.card.n_bytes if assumed.card else 0)
    room, rows = models.memory_for_model(card), list[dict[str, Any]]()
    for one in known_models(room):
        share, speed = None, None
        if card and one.n_bytes <= room:
            with suppress(OutOfDeviceMemory):
                share, speed = _predict_known(one, card - reserve, assumed.machine([card]))
        rows.append({
            "name": one.name, "repo": one.repo, "quant": one.quant, "bytes": one.n_bytes,
            "fits": one.n_bytes <= room, "resident_share": share, "decode_tps": speed,
        })  # fmt: skip
    if as_json:
        click.echo(json.dumps({"card_bytes": card, "memory_bytes": room, "models": rows}))
        return
    title = assumed.machine([card]).title if card else "no card, so the CPU computes"
    ui.heading(f"{title}; {format_bytes(room)} of card and host memory for a model")
    ui.table([
        (r["name"], r["quant"], format_bytes(r["bytes"]),
         ui.NONE if r["resident_share"] is None else format_share(r["resident_share"]),
         ui.NONE if r["decode_tps"] is None else f"{r['decode_tps']:.0f}", f"-hf {r['repo']}")
        for r in rows if r["fits"]
    ], ("model", "type", "about", "experts on the card", "tok/s", "moegraph chat"))  # fmt: skip
    if large := [r["name"] for r in rows if not r["fits"]]:
        ui.note(f"too large for this memory: {', '.join(large)}")


def _predict_known(model: KnownModel, usable: int, machine: Machine) -> tuple[float, float]:
    """Return the share of experts in so many bytes of a card, and tokens a second."""
    from ..experts.policy import parse_policy
    from ..placement.generator import generate_trace
    from ..placement.identity import RouterShape
    from ..placement.planner import make_plan

    need = model.need
    plan = make_plan(need, usable)
    shape = RouterShape(need.n_layer, need.n_expert, need.n_expert_used)
    routing = Routing(generate_trace(shape, _N_KNOWN), None, None)
    times = Times.of(machine, need.slot_bytes, model.token)
    policy = parse_policy(str(EngineConfig.policy))
    found = routing.predict(plan.n_slots, policy, times, "auto", skip=_N_KNOWN // 2)
    return round(plan.resident_share, 5), round(found.found.tokens_per_s, 2)


@dataclass(frozen=True)
class _Job:
    """What all budgets have in common.

    need: of the model without drafters. token: as of `Machine.scaled`.
    """

    config: EngineConfig
    policy: Policy
    assumed: Assumption
    need: Footprint
    routing: Routing
    token: tuple[int, int, int]
    limit: HostLimit | None


@dataclass(frozen=True)
class _Row:
    """A budget, and the speeds predicted for it; None where nothing fits."""

    budget: Budget
    times: Times
    found: Prediction | None


def _trace(path: Path | None, shape: RouterShape) -> Trace:
    from ..placement.generator import generate_trace
    from ..placement.trace import read_trace

    if path is None:
        return generate_trace(shape, _N_GENERATED)
    trace = read_trace(path)
    trace.shape.require(shape, f"{path}: the trace")
    return trace


def _predict(budget: Budget, job: _Job) -> _Row:
    times = Times.of(job.assumed.machine(budget.cards), job.need.slot_bytes, job.token)
    if budget.plan is None:
        return _Row(budget, times, None)
    trace = job.routing.trace
    return _Row(budget, times, job.routing.predict(
        budget.plan.n_slots, job.policy, times, job.config.miss, budget.n_ubatch,
        stages=[stage.layers for stage in budget.stages],
        skip=_N_WARM if trace.n_tokens - trace.n_prompt > 2 * _N_WARM else 0, limit=job.limit,
    ))  # fmt: skip


def _show(model: ModelFile, job: _Job, rows: list[_Row]) -> None:
    ui.heading("Plan")
    ui.table(_head(model, job, rows))
    click.echo()
    budgets = [row.budget for row in rows]
    are_several = len({row.times.machine.name for row in rows}) > 1
    columns = (*_HEADER, "predicted for") if are_several else _HEADER
    ui.table([_cells(row)[: len(columns)] for row in rows], columns)
    if job.config.spec != "off":
        _show_drafts(budgets)
    prediction.show_prompts(("budget", "-ub"), [
        ((row.budget.title, f"{row.budget.n_ubatch}"), row.found) for row in rows if row.found
    ])  # fmt: skip
    if len(rows) == 1:
        if budgets[0].stages:
            ui.section("Cards")
            show_cards(budgets[0])
        ui.section("Device memory")
        ui.table(memory_rows(budgets[0]))
    for line in refusals(budgets):
        ui.note(line)
    most = max((b.plan.host_bytes for b in budgets if b.plan), default=0)
    spare = host_memory().spare
    if job.limit:
        _show_limit(job.limit, rows)
    elif spare is not None and spare < most:
        ui.note(f"this machine has {format_bytes(spare)} of host memory for copies of experts, not "
                f"{format_bytes(most)}; reading the rest from the file makes tokens slower than "
                "predicted; --host-mem predicts that")  # fmt: skip


def _show_limit(limit: HostLimit, rows: list[_Row]) -> None:
    for row in rows:
        if row.found:
            n_bytes = row.found.found.file_bytes // row.found.found.n_tokens
            ui.note(f"{row.budget.title} with {format_bytes(limit.n_bytes)} of host memory: a "
                    f"token reads {format_bytes(n_bytes)} from the file, "
                    f"{1e3 * n_bytes / limit.disk_rate:.1f} ms")  # fmt: skip


def _show_drafts(budgets: list[Budget]) -> None:
    """Print what drafts in each budget, and what `auto` does not load."""
    chosen = [(budget.title, budget.choice) for budget in budgets if budget.choice]
    ui.section("Drafters, predicted; speeds beside those without a drafter")
    ui.table([draft_row(title, choice) for title, choice in chosen], HEADER)
    for title, choice in chosen:
        for line in choice.notes:
            ui.note(f"{title}: {line}")


def _head(model: ModelFile, job: _Job, rows: list[_Row]) -> list[tuple[str, str]]:
    """Return the rows that describe model, context, machine, routing and policy."""
    hp, config = model.hparams, job.config
    name = model.kv.get("general.name") or model.path.name
    machines = {row.times.machine.name: row.times.machine.title for row in rows}
    machine = next(iter(machines.values()))
    if len(machines) > 1:
        machine = "by size, the one in the last column; all but h200 are computed from data sheets"
    kinds = config.type_k if config.type_k == config.type_v else f"{config.type_k}/{config.type_v}"
    return [
        ("model", f"{name}: {len(hp.routed_layers)} layers of {hp.n_expert} experts, "
                  f"{hp.n_expert_used} used; {format_bytes(model.n_bytes)}"),
        ("context", f"{config.ctx_within(hp.n_ctx_train):,} positions, KV cache {kinds}, "
                    f"{format_bytes(job.need.kv)}"),
        ("machine", machine),
        ("routing", job.routing.trace.source or "as recorded"),
        ("policy", f"{config.policy}, missing experts: {config.miss}"),
    ]  # fmt: skip


def _cells(row: _Row) -> list[str]:
    budget, plan, machine = row.budget, row.budget.plan, row.times.machine
    upstream = ui.NONE if budget.n_cpu_layers is None else f"{budget.n_cpu_layers}"
    if plan is None or row.found is None:
        return [budget.title, *[ui.NONE] * 7, upstream, machine.name]
    found = row.found.found
    return [
        budget.title, format_share(plan.resident_share), f"{len(plan.pinned)}",
        slots_text(plan), format_bytes(plan.margin or 0),
        format_bytes(plan.host_bytes) if plan.host_bytes else ui.NONE,
        f"{found.stats.hit_rate:.3f}", f"{found.tokens_per_s:.0f}", upstream, machine.name,
    ]  # fmt: skip


def _report(model: ModelFile, job: _Job, rows: list[_Row]) -> dict[str, Any]:
    need, config = job.need, job.config
    return {
        "path": str(model.path),
        "n_layer": need.n_layer, "n_expert": need.n_expert, "n_expert_used": need.n_expert_used,
        "n_ctx": config.ctx_within(model.hparams.n_ctx_train),
        "type_k": config.type_k, "type_v": config.type_v,
        "policy": config.policy, "miss": config.miss,
        "slot_bytes_by_layer": list(need.slot_bytes),
        "trace": prediction.trace_fields(job.routing.trace),
        "budgets": [
            {
                **budget_fields(row.budget),
                "machine": row.times.machine.name,
                "predicted": row.found and row.found.fields(),
                "prompts": row.found.prompt_fields() if row.found else [],
                "drafters": draft_fields(row.budget.choice),
            }
            for row in rows
        ],
    }  # fmt: skip
