"""Drafting on the command line: options of the reference, its summary, what --json says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..draft.stats import SpecStats
from ..events import GenerationEvent
from . import ui
from .command import Option

if TYPE_CHECKING:
    from ..engine import Engine

Command = TypeVar("Command", bound=Callable[..., Any])

# Flags of the reference (test_dflash) whose mechanism does not exist here; what happens instead.
_FLAGS = {
    "--fast-rollback": "accepted rows are taken without another pass, always",
    "--seq-verify": "a draft is verified in one pass",
    "--draft-feature-mirror": "the drafter reads the model's features where they were computed",
    "--peer-access": "what crosses from device to device goes through host memory",
    "--target-split-load-draft": "the drafter is on the last device of the model",
    "--target-split-dflash": "the drafter is on the last device of the model",
}
_VALUES = {
    ("--target-gpu", "--draft-gpu"): "--device chooses the devices; the drafter is on the last one",
    ("--target-gpus", "--target-layer-split"): "--device cuda:0,cuda:1 divides the layers, and "
    "--split N,... sets their shares",
}
_KEY = f"{__name__}.taken"


def reference_options(command: Command) -> Command:
    """Add the reference's options that have no effect; `show_taken` says what happens instead."""
    for flag, why in _FLAGS.items():
        command = _taken(flag, why, is_flag=True)(command)
    for flags, why in _VALUES.items():
        for flag in flags:
            command = _taken(flag, why, is_flag=False)(command)
    return command


def _taken(flag: str, why: str, is_flag: bool) -> Callable[[Command], Command]:
    def take(ctx: click.Context, _: click.Parameter, value: Any) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta.setdefault(_KEY, []).append(f"{flag} has no effect: {why}")

    return click.option(
        flag, is_flag=is_flag, hidden=True, expose_value=False, callback=take, cls=Option,
        group="Draft", help=f"No effect: {why}.",
    )  # fmt: skip


def show_taken(ctx: click.Context) -> None:
    """Print a line for each option of the reference that was given and has no effect."""
    for line in ctx.meta.get(_KEY, ()):
        ui.note(f"note: {line}")


def show_drafters(engine: Engine) -> None:
    """Print what drafts, and from what, if something does."""
    for line in engine.drafter_lines:
        ui.note(line)


def spec_report(stats: SpecStats | None) -> dict[str, Any] | None:
    """Return the value of `spec` in --json."""
    return None if stats is None else stats.report()


def spec_words(stats: SpecStats | None) -> str:
    """Return a few words about drafts, '' if there were none."""
    if stats is None or not stats.steps:
        return ""
    words = (
        f"{stats.source} drafted {stats.drafted}, accepted {stats.acceptance:.0%}, "
        f"{stats.tokens_per_step:.2f} tokens a step"
    )
    return words + (f", {stats.speedup:.2f}x" if stats.speedup else "")


def summary_lines(stats: SpecStats | None, event: GenerationEvent) -> list[str]:
    """Return the reference's summary of a generation, and times of a step; [] without drafts."""
    if stats is None or not stats.steps:
        return []
    report, name = stats.report(), stats.source
    found = [
        f"[{name}] generated {event.n_generated} tokens in {event.decode_s:.3f} s  ->  "
        f"{event.decode_tps:.2f} tok/s",
        f"[{name}] {stats.steps} draft steps, accepted={stats.accepted}/{stats.drafted} "
        f"({100 * stats.acceptance:.1f}% per step), avg commit/step={stats.tokens_per_step:.2f}",
    ]
    rates = " ".join(f"{100 * rate:.0f}" for rate in stats.accepted_by_position)
    times = ", ".join(
        f"{part} {report[f'{part}_ms']:.3f}" for part in ("drafter", "verify", "commit")
    )
    found.append(f"[{name}] accepted by position, %: {rates}; ms a step: {times}")
    plain = f"; {stats.plain_steps} steps without drafts" if stats.plain_steps else ""
    speed = f"about {stats.speedup:.2f}x the speed without drafts" if stats.speedup else ""
    rest = f"{speed}{plain}".removeprefix("; ")
    return [*found, f"[{name}] {rest}"] if rest else found
