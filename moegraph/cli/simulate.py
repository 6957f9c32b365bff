"""`moegraph simulate`: what a routing trace does to an expert cache, without any model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..config import settings as engine_settings
from . import options, ui
from .outputs import OutputFile

if TYPE_CHECKING:
    from ..experts.cost import Machine
    from ..experts.policy import Policy
    from ..experts.profile import Profile
    from ..experts.simulate import Simulation
    from ..experts.trace import Trace

_HEADER = (
    "resident", "slots", "policy", "hit rate", "missing/token", "MiB/token", "ms/token", "tok/s"
)  # fmt: skip
_MAX_SHARES = 100


def _percentages(_: click.Context, __: click.Parameter, text: str) -> tuple[float, ...]:
    """Parse a comma list of percentages."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}; write percentages as 25,60,100") from None
    if len(found) > _MAX_SHARES or not all(0 <= share <= 100 for share in found):
        raise click.BadParameter(f"{text!r}; at most {_MAX_SHARES} percentages of 0 to 100")
    return found


@click.command("simulate", short_help="Replay a routing trace under policies and budgets.")
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "--resident",
    callback=_percentages,
    default="10,25,40,60,80,100",
    show_default=True,
    metavar="LIST",
    help="Shares of the experts that have a slot, in percent.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("lfu", "lru"),
    show_default=True,
    metavar="NAME[:PARAMETER=N]",
    help="Policy, such as lfu:half_life=64,hysteresis=1.5; repeatable.",
)
@options.setting_option(next(s for s in engine_settings() if s.name == "miss"))
@click.option(
    "--machine",
    default="desktop",
    show_default=True,
    metavar="NAME|FILE",
    help="Times to predict with: h200, desktop, or a JSON file of measured ones.",
)
@click.option(
    "--skip",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Tokens behind the prompt that only warm the cache.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Fill the slots from a routing profile; without one, with the lowest ids.",
)
@click.option("--profile-class", metavar="NAME", help="Prompt class of the profile; default: all.")
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE.svg",
    help="Write hit rate against budget.",
)
@click.option(
    "--heat-map",
    "heat_path",
    type=click.Path(path_type=Path),
    metavar="FILE.svg",
    help="Write how often each layer's experts were chosen, most chosen first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate_command(
    trace_path: Path, resident: tuple[float, ...], policies: tuple[str, ...], miss: str,
    machine: str, skip: int, profile_path: Path | None, profile_class: str | None,
    plot_path: Path | None, heat_path: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay TRACE, the routing of a real run or a generated one, under policies and budgets.

    Hits and bytes are counted by the same cache that serves decode; only times are predicted, from
    the machine's measured ones. `moegraph trace` records traces.

    \b
    Examples:
      moegraph simulate routing.trace
      moegraph simulate routing.trace --resident 25,60 --policy lfu --policy adaptive --skip 64
      moegraph simulate routing.trace --machine mine.json --plot hits.svg --json
    """
    from ..experts.cost import find_machine
    from ..experts.policy import parse_policy
    from ..experts.profile import read_profile
    from ..experts.trace import read_trace
    from . import svg

    with ExitStack() as stack:
        chosen = {text: parse_policy(text) for text in policies}
        times = find_machine(machine)
        trace = read_trace(trace_path)
        times = times.scaled(trace.shape.n_layer, times.expert_bytes) or times
        profile = read_profile(profile_path, trace.shape) if profile_path else None
        if profile_class is not None and profile is None:
            raise click.UsageError("--profile-class needs --profile")
        plot = stack.enter_context(OutputFile(plot_path)) if plot_path else None
        heat = stack.enter_context(OutputFile(heat_path)) if heat_path else None
        replays = _replays(
            trace, resident, chosen, times, miss, profile, profile_class, skip
        )  # fmt: skip
        rows = list(replays)
        if plot:
            plot.write(svg.line_chart(
                "Hit rate against budget", "experts with a slot, %", "hit rate", _series(rows),
                (0.0, 1.0),
            ).encode())  # fmt: skip
        if heat:
            heat.write(heat_map(trace).encode())
        if as_json:
            click.echo(json.dumps(_report(trace, times, miss, rows)))
        else:
            _show(trace, times, rows)


def _replays(
    trace: Trace, resident: tuple[float, ...], policies: dict[str, Policy], machine: Machine,
    mode: str, profile: Profile | None, profile_class: str | None, skip: int,
) -> Iterator[tuple[float, str, Simulation]]:  # fmt: skip
    from ..experts.simulate import even_slots, simulate

    shape = trace.shape
    with ui.Bars() as bars:
        for at, share in enumerate(resident):
            n_slots = even_slots(shape.n_layer, shape.n_expert, share / 100)
            for name, policy in policies.items():
                bars("simulate", at, len(resident))
                yield share, name, simulate(
                    trace, n_slots, policy, machine, mode=mode, profile=profile,
                    profile_class=profile_class, skip=skip,
                )  # fmt: skip


def heat_map(trace: Trace) -> str:
    """Return how often the experts of each layer were chosen, as SVG, most chosen first."""
    from . import svg

    rows = (-np.sort(-trace.counts(), axis=1)).tolist()
    title = f"How often experts were chosen in {trace.n_tokens} tokens"
    return svg.heat_map(title, "experts of a layer, most chosen first", "layer", rows)


def _series(
    rows: list[tuple[float, str, Simulation]]
) -> dict[str, list[tuple[float, float]]]:  # fmt: skip
    """Return (share, hit rate) by policy, the smallest share first."""
    series: dict[str, list[tuple[float, float]]] = {}
    for share, name, found in sorted(rows, key=lambda row: row[0]):
        series.setdefault(name, []).append((share, found.hit_rate))
    return series


def _show(trace: Trace, machine: Machine, rows: list[tuple[float, str, Simulation]]) -> None:
    from ..experts.tracestats import trace_stats

    ui.note(trace_stats(trace).line())
    ui.note(f"times of machine {machine.name}: {1e3 * machine.whole:.2f} ms a token, all resident")
    shape = trace.shape
    cells = [
        (f"{share:g} %", f"{share / 100 * shape.n_expert:.0f}", name, f"{found.hit_rate:.3f}",
         f"{found.stats.missing_per_step:.2f}", f"{found.bytes_per_token / 2**20:.1f}",
         f"{1e3 * found.step_s.mean():.2f}", f"{found.tokens_per_s:.1f}")
        for share, name, found in rows
    ]  # fmt: skip
    ui.table(cells, _HEADER)


def _report(
    trace: Trace, machine: Machine, mode: str, rows: list[tuple[float, str, Simulation]]
) -> dict[str, Any]:
    return {
        "trace": trace_fields(trace),
        "machine": machine.name,
        "miss": mode,
        "rows": [
            {"resident_percent": share, "policy": name, **simulation_fields(found)}
            for share, name, found in rows
        ],
    }


def trace_fields(trace: Trace) -> dict[str, Any]:
    """Return what identifies and describes a trace, for JSON."""
    from ..experts.tracestats import trace_stats

    stats = trace_stats(trace)
    n_layer, n_expert, n_expert_used = trace.shape.sizes
    return {
        "sha256": trace.sha256, "source": trace.source, "n_tokens": trace.n_tokens,
        "n_prompt": trace.n_prompt, "n_layer": n_layer, "n_expert": n_expert,
        "n_expert_used": n_expert_used, "overlap": round(stats.overlap, 4),
        "entropy": round(stats.entropy, 4), "lru": [round(rate, 4) for rate in stats.lru],
    }  # fmt: skip


def simulation_fields(found: Simulation) -> dict[str, Any]:
    """Return what a replay found, for JSON."""
    return {
        "n_tokens": found.n_tokens,
        "hit_rate": round(found.hit_rate, 5),
        "hit_rate_by_layer": [round(rate, 4) for rate in found.stats.hit_rates],
        "missing_per_token": round(found.stats.missing_per_step, 4),
        "missing_per_token_by_quarter": [round(n, 3) for n in found.quarters()],
        "bytes_per_token": round(found.bytes_per_token),
        "streamed": found.n_streamed, "on_cpu": found.n_cpu, "promoted": found.n_promoted,
        "ms_per_token": round(1e3 * float(found.step_s.mean()), 4),
        "tokens_per_s": round(found.tokens_per_s, 2),
    }  # fmt: skip
