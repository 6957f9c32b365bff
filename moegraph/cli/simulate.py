"""`moegraph simulate`: replay a routing trace through the expert cache, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..config import settings as engine_settings
from ..errors import MoegraphError
from ..units import format_share, parse_bytes
from . import models, options, ui
from .prediction import (
    AUTO,
    Assumption,
    Sizes,
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
    from ..experts.cost import Machine
    from ..experts.policy import Policy
    from ..placement.profile import Profile
    from ..placement.prompttime import PromptEstimate
    from ..placement.simulate import Simulation
    from ..placement.trace import Trace

_N_SEQUENCES = (1, 8, 32)
_STAGES = ("layers", "hit rate", "ms/token")
_SEQUENCES = ("sequences", "groups", "tok/s", "busy")
_HEADER = (
    "resident", "slots", "policy", "hit rate", "missing/token", "MiB/token", "ms/token", "tok/s",
    "best",
)  # fmt: skip
_MAX_SHARES = 100


def _shares(_: click.Context, __: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    """Parse the shares of --split."""
    from ..placement.split import shares_of

    try:
        shares = shares_of(text) if text else None
    except MoegraphError as error:
        raise click.BadParameter(str(error)) from None
    if shares is not None and (len(shares) < 2 or min(shares) < 0 or not sum(shares)):
        raise click.BadParameter(f"{text!r}; write a share for each of several devices, as 2,1")
    return shares


shares_option = click.option(
    "--split",
    "shares",
    callback=_shares,
    metavar="LIST",
    help="Several such machines' devices: the share of the layers that each has, as 1,1 or 2,1.",
)


def stage_fields(found: Simulation, stages: Sequence[range], has_times: bool) -> dict[str, Any]:
    """Return the JSON fields of several stages; none for a single one."""
    if not stages:
        return {}
    return {
        "stages": [
            {"layers": [layers.start, layers.stop], "hit_rate": round(rate, 5),
             "token_us": round(1e6 * seconds, 2) if has_times else None}
            for layers, rate, seconds in _stages(found, stages)
        ],
        "sequences": [
            {"n": n, "n_groups": groups, "tokens_per_s": round(speed, 1), "busy": round(busy, 3)}
            for n, groups, speed, busy in _sequences(found)
        ] if has_times else None,
    }  # fmt: skip


def show_stages(
    first: Mapping[float, Simulation], stages: Sequence[range], has_times: bool
) -> None:
    """Show a table of stages and one of several sequences; nothing for a single device.

    first: by share of the resident experts, a replay with it.
    """
    if not stages:
        return
    cells = [
        (format_share(at), f"{layers.start} to {layers.stop - 1}", f"{rate:.3f}",
         f"{1e3 * seconds:.2f}" if has_times else ui.NONE)
        for at in sorted(first) for layers, rate, seconds in _stages(first[at], stages)
    ]  # fmt: skip
    ui.section("Devices")
    ui.table(cells, ("resident", *_STAGES))
    if not has_times:
        return
    counts = [
        (format_share(at), f"{n}", f"{groups}", f"{speed:.0f}", format_share(busy))
        for at in sorted(first) for n, groups, speed, busy in _sequences(first[at])
    ]  # fmt: skip
    ui.section("Several sequences, estimated")
    ui.table(counts, ("resident", *_SEQUENCES))


def _stages(found: Simulation, stages: Sequence[range]) -> list[tuple[range, float, float]]:
    hits, misses = found.stats.hits, found.stats.misses
    rates = []
    for layers in stages:
        own = slice(layers.start, layers.stop)
        n = int(hits[own].sum() + misses[own].sum())
        rates.append(float(hits[own].sum() / n) if n else 1.0)
    return list(zip(stages, rates, found.stage_s.tolist()))


def _sequences(found: Simulation) -> list[tuple[int, int, float, float]]:
    """Return sequences, groups, tokens a second, and how busy the stages are."""
    from ..placement.pipeline import HOP_S, throughput

    each = [(n, throughput(found.stage_s.tolist(), HOP_S, n)) for n in _N_SEQUENCES]
    return [(n, one.n_groups, one.tokens_per_s, one.busy) for n, one in each]


@dataclass(frozen=True)
class _Row:
    """The replay of one policy with a share (0 to 1) of the experts resident.

    prompts: what prompts take at the start; empty if the size of an expert is unknown.
    """

    share: float
    policy: str
    found: Simulation
    prompts: list[PromptEstimate]


def _percentages(_: click.Context, __: click.Parameter, text: str) -> tuple[float, ...]:
    """Parse a comma list of percentages."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}; write percentages as 25,60,100") from None
    if len(found) > _MAX_SHARES or not all(0 <= share <= 100 for share in found):
        raise click.BadParameter(f"{text!r}; at most {_MAX_SHARES} percentages of 0 to 100")
    return found


@click.command("simulate")
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "--resident", callback=_percentages, default="10,25,40,60,80,100", metavar="LIST",
    help="Percentages of the experts that have a slot; each is replayed.",
)  # fmt: skip
@click.option(
    "--policy", "policies", multiple=True, default=("lfu", "lru"), metavar="NAME[:PARAMETER=N]",
    help="Policy to replay, such as lru or lfu:half_life=64,hysteresis=1.5; repeatable.",
)  # fmt: skip
@shares_option
@options.setting_option(next(s for s in engine_settings() if s.name == "miss"))
@click.option(
    "--machine", default=AUTO, metavar="auto|NAME|FILE",
    help="Machine to predict for: auto, h200, rtx2060, rtx4060, rtx3060, rtx4060ti, desktop "
    "(24 GB), or the output of doctor --measure. auto: the card of this machine, or else desktop.",
)  # fmt: skip
@click.option(
    "--model", "target", metavar="TARGET",
    help="Take the size of an expert from this model. Default: from the trace.",
)  # fmt: skip
@click.option(
    "--expert-size", metavar="SIZE", help="Size of an expert, such as 1.8MiB, instead of --model.",
)  # fmt: skip
@click.option(
    "--skip", type=click.IntRange(0), default=0, metavar="N",
    help="Tokens after the prompt that warm the cache and are not counted.",
)  # fmt: skip
@click.option(
    "--profile", "profile_path", type=click.Path(path_type=Path), metavar="FILE",
    help="Fill the slots from this routing profile. Default: with the experts of the lowest ids.",
)  # fmt: skip
@click.option(
    "--profile-class", metavar="NAME", help="Class of prompts in the profile. Default: all."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate_command(
    trace_path: Path, resident: tuple[float, ...], policies: tuple[str, ...],
    shares: tuple[float, ...] | None, miss: str,
    machine: str, target: str | None, expert_size: str | None, skip: int,
    profile_path: Path | None, profile_class: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay TRACE, a recorded or generated routing trace, for several policies and cache sizes.

    The replay uses the same cache as decode, so it counts hits and bytes exactly. It predicts times
    from those of --machine, which hold only for experts of about the size that the machine was
    measured with. The times of prompts are estimates: within about 10 % on the machine they were
    fitted to. `moegraph trace` records a trace, and `moegraph doctor --measure` measures a
    machine.

    \b
    Examples:
      moegraph simulate routing.trace
      moegraph simulate routing.trace --resident 25,60 --policy lfu --policy adaptive --skip 64
      moegraph simulate routing.trace --resident 60 --split 1,1
      moegraph simulate routing.trace --machine mine.json --json
    """
    from ..experts.policy import parse_policy
    from ..placement.split import by_shares
    from ..placement.trace import read_trace

    chosen = {text: parse_policy(text) for text in policies}
    times = Assumption.of(machine).whatever_size()
    trace = read_trace(trace_path)
    sizes = find_sizes(times, trace, _given_sizes(trace, trace_path, target, expert_size))
    profile = profile_of(profile_path, profile_class, trace.shape)
    stages = by_shares(trace.shape.n_layer, shares) if shares else []
    rows = list(_replays(
        trace, resident, chosen, sizes, times, miss, profile, profile_class, skip, stages
    ))  # fmt: skip
    if as_json:
        click.echo(json.dumps(_report(trace, times, sizes, miss, rows, stages)))
    else:
        _show(trace, sizes, rows, profile is not None)
        first = {row.share: row.found for row in reversed(rows)}
        show_stages(first, stages, sizes.machine is not None)


def _given_sizes(
    trace: Trace, path: Path, target: str | None, expert_size: str | None
) -> tuple[int, ...]:
    """Return the bytes of an expert of each layer: given by the user, or else the trace's."""
    if target is not None and expert_size is not None:
        raise click.UsageError("--model and --expert-size both give the size of experts; give one")
    if expert_size is not None:
        return (max(1, parse_bytes(expert_size)),) * trace.shape.n_layer
    if target is None:
        return trace.slot_bytes
    from ..placement.footprint import slot_bytes
    from ..placement.identity import router_shape

    with models.open_header(target) as model:
        trace.shape.require(router_shape(model), f"{path}: the trace")
        return slot_bytes(model)


def _replays(
    trace: Trace, resident: tuple[float, ...], policies: dict[str, Policy], sizes: Sizes,
    machine: Machine, mode: str, profile: Profile | None, profile_class: str | None, skip: int,
    stages: Sequence[range],
) -> Iterator[_Row]:  # fmt: skip
    from ..placement.simulate import even_slots, simulate

    shape = trace.shape
    with ui.Bars() as bars:
        for at, percent in enumerate(resident):
            n_slots = even_slots(shape.n_layer, shape.n_expert, percent / 100)
            for name, policy in policies.items():
                bars("simulate", at, len(resident))
                found = simulate(
                    trace, n_slots, policy, sizes.machine or machine, mode=mode, profile=profile,
                    profile_class=profile_class, skip=skip, slot_bytes=sizes.slot_bytes or None,
                    stages=stages,
                )  # fmt: skip
                prompts = prompts_of(trace, n_slots, policy, sizes, profile, profile_class)
                yield _Row(percent / 100, name, found, prompts)


def _show(trace: Trace, sizes: Sizes, rows: Sequence[_Row], has_profile: bool) -> None:
    from ..placement.tracestats import trace_stats

    ui.note(trace_stats(trace).line())
    times = sizes.machine
    if times:
        ui.note(f"times of {times.title}: {1e3 * times.whole:.2f} ms a token, all resident")
    else:
        ui.note(f"no times: {sizes.why}")
    cells: list[tuple[str, ...]] = []
    notes: list[str] = []
    for share, group in groupby(rows, key=lambda row: row.share):
        tried = list(group)
        ranks = [row.found.tokens_per_s if times else row.found.hit_rate for row in tried]
        best = max(ranks) if max(ranks) > min(ranks) else None
        if cells and len(tried) > 1:
            cells.append(())
        cells += [_cells(trace, sizes, r, rank == best) for r, rank in zip(tried, ranks)]
        notes += [f"at {format_share(share)}: {line}" for line in _equal(tried)]
    ui.table(cells, _HEADER)
    if times and times.prompt:
        ui.section("Prompts, estimated")
        first = {row.share: row for row in reversed(rows)}
        ui.table(
            [(format_share(at), *prompt_cells(first[at].prompts)) for at in sorted(first)],
            ("resident", *prompt_header()),
        )
    for line in [*_folded(notes), *_reasons(notes, has_profile)]:
        ui.note(line)


def _cells(trace: Trace, sizes: Sizes, row: _Row, is_best: bool) -> tuple[str, ...]:
    found, has_times = row.found, sizes.machine is not None
    return (
        format_share(row.share), f"{row.share * trace.shape.n_expert:.0f}", row.policy,
        f"{found.hit_rate:.3f}", f"{found.stats.missing_per_step:.2f}",
        f"{found.bytes_per_token / 2**20:.2f}" if sizes.slot_bytes else ui.NONE,
        f"{1e3 * found.step_s.mean():.2f}" if has_times else ui.NONE,
        f"{found.tokens_per_s:.1f}" if has_times else ui.NONE,
        "best" if is_best else "",
    )  # fmt: skip


def _equal(rows: Sequence[_Row]) -> list[str]:
    """Return the policies that behaved exactly the same, as 'lfu = lru'; rows: of one share."""
    groups: list[list[_Row]] = []
    for row in rows:
        # If every expert is resident, all policies are equal.
        if not row.found.stats.misses.any():
            continue
        same = next(
            (g for g in groups if np.array_equal(g[0].found.missing, row.found.missing)), None
        )
        if same:
            same.append(row)
        else:
            groups.append([row])
    return [" = ".join(row.policy for row in group) for group in groups if len(group) > 1]


def _end(note: str) -> str:
    """Return a note without its share."""
    return note.partition(": ")[2]


def _folded(notes: Sequence[str]) -> list[str]:
    """Return notes such as 'at 10 %: lfu = lru', with equal ones merged into one."""
    by_end: dict[str, list[str]] = {}
    for note in notes:
        by_end.setdefault(_end(note), []).append(note.partition(": ")[0].removeprefix("at "))
    return [f"at {', '.join(shares)}: {end}" for end, shares in by_end.items()]


def _reasons(notes: Sequence[str], has_profile: bool) -> list[str]:
    """Return why the policies that the notes name can behave the same."""
    equal = [{name.partition(":")[0] for name in _end(note).split(" = ")} for note in notes]
    found = []
    if any("lfu" in names and names & {"lru", "adaptive"} for names in equal):
        found.append(
            "if a layer has fewer slots than a token chooses experts, lru and adaptive act as lfu"
        )
    if any({"adaptive", "lru"} <= names for names in equal) and not has_profile:
        found.append("without --profile, adaptive acts as lru")
    return found


def _report(
    trace: Trace, machine: Machine, sizes: Sizes, mode: str, rows: Sequence[_Row],
    stages: Sequence[range],
) -> dict[str, Any]:  # fmt: skip
    has_times = sizes.machine is not None
    return {
        "trace": trace_fields(trace),
        "machine": machine.name,
        "miss": mode,
        "slot_bytes_by_layer": list(sizes.slot_bytes) or None,
        "rows": [
            {
                "resident_share": round(row.share, 6), "policy": row.policy,
                **simulation_fields(row.found, has_times, bool(sizes.slot_bytes)),
                **stage_fields(row.found, stages, has_times),
                "prompts": [prompt_fields(prompt) for prompt in row.prompts],
            }
            for row in rows
        ],
    }  # fmt: skip
