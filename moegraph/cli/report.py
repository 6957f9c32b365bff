"""The report of a finished generation: the JSON object, and the lines on stderr."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..draft.plan import SpecStats
from ..events import GenerationEvent, Stopwatch
from ..sampling import SamplingParams
from ..units import format_bytes, format_duration
from . import ui

if TYPE_CHECKING:
    from ..engine import Engine


_SIZES = ("n_vocab", "n_embd", "n_layer", "n_expert", "n_expert_used", "n_ctx_train")


def result_lines(
    engine: Engine, event: GenerationEvent, drafts: SpecStats | None, sampling: SamplingParams
) -> list[str]:
    """Return one line about speed and memory, with the seed if sampling used one, and of drafts."""
    memory = engine.memory()
    read = f"{event.n_computed} "
    if event.n_computed + event.n_reused < event.n_prompt:
        read += f"of {event.n_prompt} "
    line = f"prefill {read}{_tokens(event.n_prompt)} in {format_duration(event.prefill_s)}"
    if event.n_computed:
        line += f", {event.prefill_tps:.1f} tok/s"
    if event.n_generated > 1:
        # The first token comes with the prompt; decode_s covers the steps after it.
        n_more = event.n_generated - 1
        line += (
            f"; decode {n_more} {_tokens(n_more)} in {format_duration(event.decode_s)}, "
            f"{event.decode_tps:.1f} tok/s"
        )
    if not sampling.is_greedy:
        line += f"; seed {sampling.seed}"
    if memory["device_peak_bytes"]:
        line += f"; peak {format_bytes(memory['device_peak_bytes'])} on the device"
    line += f"; peak {format_bytes(memory['host_peak_bytes'])} on the host"
    pinned = memory["host_pinned_bytes"]
    line += f", {format_bytes(pinned)} of it pinned" if pinned else ""
    return [line, *_draft_lines(drafts, event)]


def _tokens(n: int) -> str:
    return "token" if n == 1 else "tokens"


def config_report(engine: Engine) -> dict[str, Any]:
    """Return the settings in effect."""
    return {
        **dataclasses.asdict(engine.config),
        "device": engine.device_name,
        "mode": engine.mode,
        "n_ctx": engine.n_ctx,
        **engine.threads.report(),
    }


def sampling_report(params: SamplingParams, from_file: Iterable[str] = ()) -> dict[str, Any]:
    """Return the sampler settings; logit biases by token id, "-inf" where a token is banned.

    from_file: settings that the model file recommends and the command line does not set.
    """
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    bias = {
        str(token): value if value != float("-inf") else "-inf"
        for token, value in params.logit_bias.items()
    }
    return {**values, "logit_bias": bias, "from_file": list(from_file)}


@dataclasses.dataclass(frozen=True)
class Generated:
    """A finished generation: the ids of its prompt and its tokens, its text, its last event."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    text: str
    event: GenerationEvent


def run_report(
    engine: Engine, params: SamplingParams, found: Generated, times: StartTimes,
    from_file: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the object that --json prints; durations in seconds, sizes in bytes."""
    event, hp, file, stats = found.event, engine.hparams, engine.file, engine.expert_stats()
    return {
        "model": {
            "path": str(file.path),
            "name": file.kv.get("general.name"),
            "architecture": file.kv.get("general.architecture"),
            "n_bytes": file.n_bytes,
            **{name: getattr(hp, name) for name in _SIZES},
        },
        "config": config_report(engine),
        "sampling": sampling_report(params, from_file),
        "prompt_tokens": list(found.prompt),
        "tokens": list(found.tokens),
        "text": found.text,
        "finish_reason": event.finish_reason,
        **{name: getattr(event, name) for name in ("n_prompt", "n_computed", "n_generated")},
        **speeds(event),
        "timings": {
            **times.report(),
            **durations(event),
            "load": {name: round(s, 6) for name, s in engine.load_times.items()},
        },
        "memory": engine.memory(),
        # of one graph that computes the whole pass, there is nothing to say
        "experts": stats and {"n_slots_by_layer": list(engine.plan.n_slots), **stats.report()},
        "stages": stage_report(engine),
    }


def speeds(event: GenerationEvent) -> dict[str, float]:
    """Return the speeds of a generation, in tokens a second, for JSON."""
    return {name: round(getattr(event, name), 3) for name in ("prefill_tps", "decode_tps")}


def durations(event: GenerationEvent) -> dict[str, float]:
    """Return the durations of a generation, in seconds, for JSON."""
    return {name: round(getattr(event, name), 6) for name in ("prefill_s", "decode_s")}


def stage_report(engine: Engine) -> list[dict[str, Any]]:
    """Return the device of each stage, its layers from the first to before the last, and memory."""
    return [
        {
            "device": stage.device.name,
            "layers": [stage.layers.start, stage.layers.stop],
            "mode": part.mode,
            "n_slots": sum(
                stage.n_slots[il] for il in stage.layers if stage.hp.layer(il).is_routed
            ),
            "resident_share": round(planned.plan.resident_share, 5),
            "device_peak_bytes": stage.device.note_peak(),
        }
        for stage, part, planned in zip(engine.stages, engine.runner.parts, engine.stage_plans)
    ]


def process_age(stat: Path = Path("/proc/self/stat")) -> float | None:
    """Return the seconds since this process started, to 10 ms; None if the system does not tell."""
    try:
        # the name in parentheses may hold spaces; the 20th field after it is the start
        ticks = int(stat.read_text(errors="replace").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class StartTimes(Stopwatch):
    """Measures from the start of the process to the first token.

    process_s: until this object was made. first_token_s: until the first token. Both are None if
    the system does not tell when the process started.
    """

    def __init__(self) -> None:
        self.process_s = process_age()
        super().__init__()  # after it, so that no time counts twice
        self.first_token_s: float | None = None

    def token(self) -> None:
        """Note that a token is there; only the first call counts."""
        if self.first_token_s is None:
            self.first_token_s = process_age()

    def report(self) -> dict[str, float | None]:
        """Return the phases for JSON: their names with _s, and seconds."""
        found = {"process": self.process_s, **self.seconds, "first_token": self.first_token_s}
        return {f"{name}_s": None if s is None else round(s, 6) for name, s in found.items()}


def show_drafters(engine: Engine) -> None:
    """Print what drafts, and from what, if something does."""
    for line in engine.drafter_lines:
        ui.note(line)


def spec_words(stats: SpecStats | None) -> str:
    """Return a few words about drafts, '' if there were none."""
    if stats is None or not stats.steps:
        return ""
    words = (
        f"{stats.source} drafted {stats.drafted}, accepted {stats.acceptance:.0%}, "
        f"{stats.tokens_per_step:.2f} tokens a step"
    )
    return words + (f", {stats.speedup:.2f}x" if stats.speedup else "")


def _draft_lines(stats: SpecStats | None, event: GenerationEvent) -> list[str]:
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
