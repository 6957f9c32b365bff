"""`moegraph plan`: what of a model a card would hold, and how fast that is predicted to be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import EngineConfig
from ..config import settings as engine_settings
from ..errors import ConfigError, OutOfDeviceMemory
from ..units import format_bytes, parse_bytes
from . import options, ui
from .simulate import simulation_fields, trace_fields

if TYPE_CHECKING:
    from ..experts.cost import Machine
    from ..experts.identity import RouterShape
    from ..experts.planner import Footprint, Plan
    from ..experts.policy import Policy
    from ..experts.profile import Profile
    from ..experts.simulate import Simulation
    from ..experts.trace import Trace
    from ..modelfile import ModelFile

_SETTINGS = (
    "n_ctx", "n_ubatch", "type_k", "type_v", "pin_layers", "cache_slots", "policy", "miss"
)  # fmt: skip
# Enough to warm up and to average over; a generated trace does not drift further.
_N_GENERATED, _N_WARM = 512, 192
_HEADER = (
    "budget", "experts resident", "pinned", "slots a layer", "left over", "hit rate", "tok/s",
    "-ncmoe",
)  # fmt: skip


def _plan_options(command: Any) -> Any:
    """Add the engine settings that a plan depends on."""
    for setting in reversed([s for s in engine_settings() if s.name in _SETTINGS]):
        command = options.setting_option(setting)(command)
    return command


@dataclass(frozen=True)
class _Row:
    """One budget: its plan and replay, or why there is none."""

    budget: int
    plan: Plan | None
    found: Simulation | None
    n_cpu_layers: int | None
    refusal: str = ""


@click.command("plan", short_help="Show what fits into a card, and the predicted speed.")
@click.argument("target")
@click.option(
    "--vram",
    multiple=True,
    default=("6", "8", "12", "16", "24"),
    show_default=True,
    metavar="SIZE",
    help="Device memory for everything, in GiB or as 8GiB; repeatable.",
)
@click.option(
    "--context",
    "context",
    default="512MiB",
    show_default=True,
    metavar="SIZE",
    help="What the driver takes of it for itself.",
)
@_plan_options
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Routing profile: spreads the slots by layer and fills them.",
)
@click.option("--profile-class", metavar="NAME", help="Prompt class of the profile; default: all.")
@click.option(
    "--routing",
    "trace_path",
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="Routing trace to predict with; default: a generated one.",
)
@click.option(
    "--machine",
    default="desktop",
    show_default=True,
    metavar="NAME|FILE",
    help="Times to predict with: h200, desktop, or a JSON file of measured ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    target: str, vram: tuple[str, ...], context: str, profile_path: Path | None,
    profile_class: str | None, trace_path: Path | None, machine: str, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Show how the planner divides device memory for the model TARGET; its weights are not loaded.

    The last column is what upstream would need for the same memory: the experts of so many layers
    in host memory.

    \b
    Examples:
      moegraph plan model.gguf
      moegraph plan model.gguf --vram 8 --vram 12 -c 32768 -ctk q8_0 -ctv q8_0
      moegraph plan model.gguf --vram 12 --profile model.gguf.routing.json --routing my.trace
    """
    from ..experts.cost import find_machine
    from ..experts.identity import router_shape
    from ..experts.policy import parse_policy
    from ..experts.profile import read_profile
    from ..footprint import needed_bytes

    config = EngineConfig(**{name: given[name] for name in _SETTINGS}).validate()
    budgets = [parse_bytes(size, unit="g") for size in vram]
    if profile_class is not None and profile_path is None:
        raise click.UsageError("--profile-class needs --profile")
    reserve, times = parse_bytes(context), find_machine(machine)
    with options.open_header(target) as model:
        shape = router_shape(model)
        profile = read_profile(profile_path, shape) if profile_path else None
        trace = _trace(trace_path, shape)
        need = needed_bytes(model, config, config.n_ctx or model.hparams.n_ctx_train)
        size = sum(need.slot_bytes) // need.n_layer
        scaled = times.scaled(need.n_layer, size)
        job = _Job(
            config, parse_policy(config.policy), scaled or times, scaled is not None, trace,
            profile, profile_class,
        )  # fmt: skip
        rows = [_row(need, budget, reserve, job) for budget in budgets]
        if len(rows) == 1 and rows[0].refusal:
            raise OutOfDeviceMemory(rows[0].refusal)
        if as_json:
            click.echo(json.dumps(_report(model, need, job, rows, reserve)))
        else:
            _show(job, rows)


@dataclass(frozen=True)
class _Job:
    """What all budgets have in common. predicts: the machine's times are near this model's."""

    config: EngineConfig
    policy: Policy
    machine: Machine
    predicts: bool
    trace: Trace
    profile: Profile | None
    profile_class: str | None


def _trace(path: Path | None, shape: RouterShape) -> Trace:
    from ..experts.generator import generate_trace
    from ..experts.trace import read_trace

    if path is None:
        return generate_trace(shape, _N_GENERATED)
    trace = read_trace(path)
    trace.shape.require(shape, f"{path}: the trace")
    return trace


def _row(need: Footprint, budget: int, reserve: int, job: _Job) -> _Row:
    from ..experts.planner import make_plan, upstream_cpu_layers
    from ..experts.simulate import simulate

    usable = budget - reserve
    config, profile = job.config, job.profile
    upstream = upstream_cpu_layers(need, usable)
    try:
        plan = make_plan(
            need, usable,
            None if config.pin_layers < 0 else config.pin_layers,
            None if config.cache_slots < 0 else config.cache_slots,
            f"--vram {format_bytes(budget)} less {format_bytes(reserve)} for the driver",
            profile.demand().tolist() if profile else None,
        )  # fmt: skip
    except (OutOfDeviceMemory, ConfigError) as error:
        if isinstance(error, ConfigError) and usable >= need.fixed + need.staging:
            raise
        return _Row(budget, None, None, upstream, str(error))
    trace = job.trace
    found = simulate(
        trace, plan.n_slots, job.policy, job.machine, mode=config.miss, profile=profile,
        profile_class=job.profile_class, slot_bytes=need.slot_bytes,
        skip=_N_WARM if trace.n_tokens - trace.n_prompt > 2 * _N_WARM else 0,
    )  # fmt: skip
    return _Row(budget, plan, found, upstream)


def _show(job: _Job, rows: list[_Row]) -> None:
    cells = []
    for row in rows:
        upstream = "does not fit" if row.n_cpu_layers is None else f"{row.n_cpu_layers}"
        if row.plan is None or row.found is None:
            cells.append([format_bytes(row.budget), "does not fit", *[""] * 5, upstream])
            continue
        plan, found = row.plan, row.found
        rest = [n for il, n in enumerate(plan.n_slots) if il not in plan.pinned]
        spread = f"{min(rest)} to {max(rest)}" if rest and min(rest) < max(rest) else ""
        cells.append([
            format_bytes(row.budget), f"{plan.resident_share:.1%}", f"{len(plan.pinned)}",
            spread or (f"{rest[0]}" if rest else "-"), format_bytes(plan.margin or 0),
            f"{found.hit_rate:.3f}",
            f"{found.tokens_per_s:.0f}" if job.predicts else "-",
            upstream,
        ])  # fmt: skip
    ui.table(cells, _HEADER)
    if len(rows) == 1 and rows[0].plan is not None:
        ui.heading("device memory")
        ui.table([(name, format_bytes(n)) for name, n in rows[0].plan.bytes.items() if n])
    for row in rows:
        if row.refusal:
            ui.note(row.refusal)
    speed = f"speed predicted for machine {job.machine.name}"
    if not job.predicts:
        speed = f"no speed: machine {job.machine.name} was measured with far other experts"
    ui.note(f"routing: {job.trace.source or 'as recorded'}; {speed}")


def _report(
    model: ModelFile, need: Footprint, job: _Job, rows: list[_Row], reserve: int
) -> dict[str, Any]:
    return {
        "model": str(model.path),
        "n_layer": need.n_layer, "n_expert": need.n_expert,
        "slot_bytes": list(need.slot_bytes),
        "driver_bytes": reserve,
        "machine": job.machine.name,
        "trace": trace_fields(job.trace),
        "budgets": [
            {
                "budget": row.budget,
                "refusal": row.refusal or None,
                "upstream_n_cpu_moe": row.n_cpu_layers,
                "plan": _plan_fields(row.plan) if row.plan else None,
                "predicted": _predicted(row.found, job) if row.found else None,
            }
            for row in rows
        ],
    }  # fmt: skip


def _predicted(found: Simulation, job: _Job) -> dict[str, Any]:
    fields = simulation_fields(found)
    if not job.predicts:
        fields |= {"ms_per_token": None, "tokens_per_s": None}
    return fields


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {
        "n_slots": list(plan.n_slots), "pinned": list(plan.pinned), "bytes": plan.bytes,
        "total_bytes": plan.total, "margin_bytes": plan.margin,
        "all_resident": plan.all_resident, "resident_share": round(plan.resident_share, 5),
    }  # fmt: skip
