"""The report of a finished generation: the JSON object and the line on stderr."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..events import GenerationEvent
from ..sampling import SamplingParams
from ..units import format_bytes, format_duration
from .starttimes import StartTimes

if TYPE_CHECKING:
    from ..engine import Engine


def stats_line(
    event: GenerationEvent, memory: dict[str, int], sampling: SamplingParams | None = None
) -> str:
    """Return one line about speed and memory, and the seed if sampling used one."""
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
    if sampling is not None and not sampling.is_greedy:
        line += f"; seed {sampling.seed}"
    if memory["device_peak_bytes"]:
        line += f"; peak {format_bytes(memory['device_peak_bytes'])} on the device"
    line += f"; peak {format_bytes(memory['host_peak_bytes'])} on the host"
    copies = memory["host_pinned_bytes"]
    return f"{line}, {format_bytes(copies)} of it copies of experts" if copies else line


def _tokens(n: int) -> str:
    return "token" if n == 1 else "tokens"


def model_report(engine: Engine) -> dict[str, Any]:
    """Return path, name, architecture, size and main dimensions of a model."""
    hp, kv = engine.hparams, engine.file.kv
    return {
        "path": str(engine.file.path),
        "name": kv.get("general.name"),
        "architecture": kv.get("general.architecture"),
        "n_bytes": engine.file.n_bytes,
        "n_vocab": hp.n_vocab,
        "n_embd": hp.n_embd,
        "n_layer": hp.n_layer,
        "n_expert": hp.n_expert,
        "n_expert_used": hp.n_expert_used,
        "n_ctx_train": hp.n_ctx_train,
    }


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


def run_report(
    engine: Engine,
    params: SamplingParams,
    prompt: Sequence[int],
    tokens: Sequence[int],
    text: str,
    event: GenerationEvent,
    times: StartTimes,
    from_file: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the object that --json prints; durations in seconds, sizes in bytes."""
    return {
        "model": model_report(engine),
        "config": config_report(engine),
        "sampling": sampling_report(params, from_file),
        "prompt_tokens": list(prompt),
        "tokens": list(tokens),
        "text": text,
        "finish_reason": event.finish_reason,
        "n_prompt": event.n_prompt,
        "n_computed": event.n_computed,
        "n_generated": event.n_generated,
        "prefill_tps": round(event.prefill_tps, 3),
        "decode_tps": round(event.decode_tps, 3),
        "timings": {
            **times.report(),
            "prefill_s": round(event.prefill_s, 6),
            "decode_s": round(event.decode_s, 6),
            "load": {name: round(s, 6) for name, s in engine.load_times.items()},
        },
        "memory": engine.memory(),
        "experts": expert_report(engine),
        "stages": stage_report(engine),
    }


def stage_report(engine: Engine) -> list[dict[str, Any]]:
    """Return the device of each stage, its layers from the first to before the last, and memory."""
    return [
        {
            "device": stage.device.name,
            "layers": [stage.layers.start, stage.layers.stop],
            "mode": part.mode,
            "n_slots": sum(stage.n_slots[il] for il in stage.layers),
            "resident_share": round(planned.plan.resident_share, 5),
            "device_peak_bytes": stage.device.note_peak(),
        }
        for stage, part, planned in zip(engine.stages, engine.runner.parts, engine.stage_plans)
    ]


def expert_report(engine: Engine) -> dict[str, Any] | None:
    """Return slots, hits, bytes uploaded and phases; None if one graph computes the whole pass."""
    stats = engine.expert_stats()
    if stats is None:
        return None
    return {"n_slots_by_layer": list(engine.plan.n_slots), **stats.report()}
