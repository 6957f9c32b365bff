"""`moegraph simulate`: replay a routing trace through the expert cache, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MoegraphError
from ..units import format_share, parse_bytes
from . import models, options, prediction, ui
from .prediction import Assumption, Prediction, Routing, Times

if TYPE_CHECKING:
    from ..experts.cost import Machine
    from ..placement.trace import Trace

_N_SEQUENCES = (1, 8, 32)
_HEADER = (
    "resident", "slots", "policy", "hit rate", "missing/token", "MiB/token", "from file",
    "ms/token", "tok/s", "best",
)  # fmt: skip
_MAX_SHARES = 100


def _shares(_: click.Context, __: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    from ..placement.split import shares_of

    try:
        shares = shares_of(text) if text else None
    except MoegraphError as error:
        raise click.BadParameter(str(error)) from None
    if shares is not None and (len(shares) < 2 or min(shares) < 0 or not sum(shares)):
        raise click.BadParameter(f"{text!r}; write a share for each of several devices, as 2,1")
    return shares


def _stage_fields(one: Prediction, stages: Sequence[range]) -> dict[str, Any]:
    """Return the JSON fields of several stages; none for a single one."""
    from ..placement.simulate import throughput

    if not stages:
        return {}
    found, is_known, seconds = one.found, bool(one.times.slot_bytes), one.found.stage_s.tolist()
    hits, misses = found.stats.hits, found.stats.misses
    rates = []
    for layers in stages:
        own = slice(layers.start, layers.stop)
        n = int(hits[own].sum() + misses[own].sum())
        rates.append(float(hits[own].sum() / n) if n else 1.0)
    each = [(n, *throughput(seconds, n)) for n in _N_SEQUENCES]
    return {
        "stages": [
            {"layers": [layers.start, layers.stop], "hit_rate": round(rate, 5),
             "token_us": round(1e6 * s, 2) if is_known else None}
            for layers, rate, s in zip(stages, rates, seconds)
        ],
        "sequences": [
            {"n": n, "n_groups": n_groups, "tokens_per_s": round(speed, 1), "busy": round(busy, 3)}
            for n, speed, n_groups, busy in each
        ] if is_known else None,
    }  # fmt: skip


def _show_stages(rows: Sequence[_Row], stages: Sequence[range]) -> None:
    """Show a table of several stages, and one of several sequences; rows: one of each share."""
    found = [(format_share(row.share), _stage_fields(row.predicted, stages)) for row in rows]
    ui.section("Devices")
    ui.table([
        (share, f"{stage['layers'][0]} to {stage['layers'][1] - 1}", f"{stage['hit_rate']:.3f}",
         ui.NONE if stage["token_us"] is None else f"{stage['token_us'] / 1e3:.2f}")
        for share, fields in found for stage in fields["stages"]
    ], ("resident", "layers", "hit rate", "ms/token"))  # fmt: skip
    if not rows[0].predicted.times.slot_bytes:
        return
    ui.section("Several sequences, estimated")
    ui.table([
        (share, f"{at['n']}", f"{at['n_groups']}", f"{at['tokens_per_s']:.0f}",
         format_share(at["busy"]))
        for share, fields in found for at in fields["sequences"]
    ], ("resident", "sequences", "groups", "tok/s", "busy"))  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """What is predicted for a policy, with a share (0 to 1) of the experts resident."""

    share: float
    policy: str
    predicted: Prediction


def _percentages(_: click.Context, __: click.Parameter, text: str) -> tuple[float, ...]:
    how = "percentages as 25,60,100"
    found = options.read_list((text,), lambda part: [float(part)], how, _MAX_SHARES)
    if not all(0 <= share <= 100 for share in found):
        raise click.BadParameter(f"{text!r}; give percentages of 0 to 100")
    return tuple(found)


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
@click.option(
    "--split", "shares", callback=_shares, metavar="LIST",
    help="Several such machines' devices: the share of the layers that each has, as 1,1 or 2,1.",
)  # fmt: skip
@options.engine_options(only=("miss",))
@click.option(
    "--machine", default=prediction.AUTO, metavar="auto|NAME|FILE",
    help="Machine to predict for: auto, h200, rtx2060, rtx4060, rtx3060, rtx4060ti, desktop "
    "(24 GB), or the output of doctor --measure. auto: the card of this machine, or else desktop.",
)  # fmt: skip
@click.option(
    "--model", "target", metavar="TARGET",
    help="Take sizes of weights from this model. Default: that of an expert from the trace.",
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
@prediction.host_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate_command(
    trace_path: Path, resident: tuple[float, ...], policies: tuple[str, ...],
    shares: tuple[float, ...] | None, miss: str,
    machine: str, target: str | None, expert_size: str | None, skip: int,
    profile_path: Path | None, profile_class: str | None, host_mem: str | None, disk: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Replay TRACE, a recorded or generated routing trace, for several policies and cache sizes.

    The replay uses the same cache as decode, so it counts hits and bytes exactly. It predicts times
    from those of --machine, for the bytes of --model's weights, or else for layers that read as
    much as those of the model that the machine was measured with. The times of prompts are
    estimates: within about 10 % on the machine they were fitted to. `moegraph trace` records a
    trace, and `moegraph doctor --measure` measures a machine.

    \b
    Examples:
      moegraph simulate routing.trace
      moegraph simulate routing.trace --resident 25,60 --policy lfu:half_life=64 --skip 64
      moegraph simulate routing.trace --resident 60 --split 1,1
      moegraph simulate routing.trace --machine mine.json --json
    """
    from ..experts.policy import parse_policy
    from ..placement.simulate import even_slots
    from ..placement.split import by_shares
    from ..placement.trace import read_trace

    chosen = {text: parse_policy(text) for text in policies}
    assumed = Assumption.of(machine).machine()
    trace = read_trace(trace_path)
    times = _times(assumed, trace, trace_path, target, expert_size)
    routing = Routing.of(trace, profile_path, profile_class)
    stages = by_shares(trace.shape.n_layer, shares) if shares else []
    routed, limit = trace.routed.tolist(), prediction.host_limit(host_mem, disk)
    rows = []
    with ui.Bars() as bars:
        for at, percent in enumerate(resident):
            n_slots = even_slots(routed, trace.shape.n_expert, percent / 100)
            for name, policy in chosen.items():
                bars("simulate", at, len(resident))
                found = routing.predict(
                    n_slots, policy, times, miss, stages=stages, skip=skip, limit=limit
                )
                rows.append(_Row(percent / 100, name, found))
    if as_json:
        click.echo(json.dumps(_report(trace, times, miss, rows, stages)))
    else:
        _show(routing, times, rows, stages)


def _times(
    machine: Machine, trace: Trace, path: Path, target: str | None, expert_size: str | None
) -> Times:
    """Return the times for experts of the size that the user gave, or else the trace."""
    if target is not None and expert_size is not None:
        raise click.UsageError("--model and --expert-size both give the size of experts; give one")
    if target is None:
        size = max(1, parse_bytes(expert_size)) if expert_size is not None else 0
        given = tuple(size * routed for routed in trace.routed.tolist())
        return Times.of(machine, given if size else trace.slot_bytes)
    from ..placement.footprint import slot_bytes, token_work
    from ..placement.identity import router_shape

    with models.open_header(target) as model:
        trace.shape.require(router_shape(model), f"{path}: the trace")
        return Times.of(machine, slot_bytes(model), token_work(model))


def _show(routing: Routing, times: Times, rows: Sequence[_Row], stages: Sequence[range]) -> None:
    from ..placement.trace import trace_stats

    ui.note(trace_stats(routing.trace).line())
    machine = times.machine
    if times.slot_bytes:
        ui.note(f"times of {machine.title}: {1e3 * machine.whole:.2f} ms a token, all resident")
    else:
        ui.note("no times: the trace does not say how large an expert is; give --model or "
                "--expert-size")  # fmt: skip
    cells: list[tuple[str, ...]] = []
    equal: dict[tuple[str, ...], list[str]] = {}
    for share, group in groupby(rows, key=lambda row: row.share):
        tried = list(group)
        found = [row.predicted.found for row in tried]
        ranks = [one.tokens_per_s if times.slot_bytes else one.stats.hit_rate for one in found]
        best = max(ranks) if max(ranks) > min(ranks) else None
        if cells and len(tried) > 1:
            cells.append(())
        cells += [_cells(routing.trace, row, rank == best) for row, rank in zip(tried, ranks)]
        alike: dict[bytes, list[str]] = {}
        for row, one in zip(tried, found):
            if one.stats.misses.any():  # if every expert is resident, all policies are equal
                alike.setdefault(one.missing.tobytes(), []).append(row.policy)
        for names in alike.values():
            if len(names) > 1:
                equal.setdefault(tuple(names), []).append(format_share(share))
    ui.table(cells, _HEADER)
    first = {row.share: row for row in reversed(rows)}
    of_each = [first[share] for share in sorted(first)]
    predicted = [((format_share(row.share),), row.predicted) for row in of_each]
    prediction.show_prompts(("resident",), predicted)
    for policies, shares in equal.items():
        ui.note(f"at {', '.join(shares)}: {' = '.join(policies)}")
    if any({"lfu", "lru"} <= {name.partition(":")[0] for name in names} for names in equal):
        ui.note("if a layer has fewer slots than a token chooses experts, lru acts as lfu")
    if stages:
        _show_stages(of_each, stages)


def _cells(trace: Trace, row: _Row, is_best: bool) -> tuple[str, ...]:
    found, times = row.predicted.found, row.predicted.times
    return (
        format_share(row.share), f"{row.share * trace.shape.n_expert:.0f}", row.policy,
        f"{found.stats.hit_rate:.3f}", f"{found.stats.missing_per_step:.2f}",
        f"{found.bytes_per_token / 2**20:.2f}" if times.slot_bytes else ui.NONE,
        f"{found.file_bytes / found.n_tokens / 2**20:.2f}" if found.file_bytes else ui.NONE,
        f"{1e3 * found.step_s.mean():.2f}" if times.slot_bytes else ui.NONE,
        f"{found.tokens_per_s:.1f}" if times.slot_bytes else ui.NONE,
        "best" if is_best else "",
    )  # fmt: skip


def _report(
    trace: Trace, times: Times, mode: str, rows: Sequence[_Row], stages: Sequence[range]
) -> dict[str, Any]:
    return {
        "trace": prediction.trace_fields(trace),
        "machine": times.machine.name,
        "miss": mode,
        "slot_bytes_by_layer": list(times.slot_bytes) or None,
        "rows": [
            {
                "resident_share": round(row.share, 6), "policy": row.policy,
                **row.predicted.fields(), **_stage_fields(row.predicted, stages),
                "prompts": row.predicted.prompt_fields(),
            }
            for row in rows
        ],
    }  # fmt: skip
