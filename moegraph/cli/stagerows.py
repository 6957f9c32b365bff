"""What `moegraph simulate` says of several devices: each stage, and several sequences in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import MoegraphError
from ..units import format_share
from . import ui

if TYPE_CHECKING:
    from ..placement.simulate import Simulation

_N_SEQUENCES = (1, 8, 32)
_STAGES = ("layers", "hit rate", "ms/token")
_SEQUENCES = ("sequences", "groups", "tok/s", "busy")


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
    click.echo()
    ui.heading("Devices")
    ui.table(cells, ("resident", *_STAGES))
    if not has_times:
        return
    counts = [
        (format_share(at), f"{n}", f"{groups}", f"{speed:.0f}", format_share(busy))
        for at in sorted(first) for n, groups, speed, busy in _sequences(first[at])
    ]  # fmt: skip
    click.echo()
    ui.heading("Several sequences, estimated")
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
