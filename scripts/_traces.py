"""Routing for the bench scripts: generated or recorded traces, joined into one replay.

An engine takes one recording when it loads, and loading a 22 GB model takes longer than measuring
it. So several traces are joined end to end. Each pass of one row consumes one step of the
recording, and the caller decodes exactly as many tokens as each part has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moegraph.arch import open_model
from moegraph.placement.generator import PRESETS, generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.trace import Trace, read_trace, trace_stats


def router_of(path: Path) -> tuple[RouterShape, int]:
    """Return the shape of a model's router, and the mean bytes of an expert of one layer."""
    with open_model(path) as model:
        hp = model.hparams
        n_bytes = sum(info.nbytes for info in model.tensors.values() if "_exps." in info.name)
    shape = RouterShape(hp.n_layer, hp.n_expert, hp.n_expert_used)
    return shape, n_bytes // (hp.n_layer * hp.n_expert)


def find_trace(name: str, shape: RouterShape, n_tokens: int, seed: int = 0) -> Trace:
    """Return a trace generated from a preset (NAME or NAME:PROMPT) or read from a file."""
    preset, _, prompt = name.partition(":")
    if preset in PRESETS and (not prompt or prompt.isdecimal()):
        return generate_trace(shape, n_tokens, seed, int(prompt or 0), PRESETS[preset])
    trace = read_trace(name)
    trace.shape.require(shape, f"{name}: the trace")
    return trace.part(trace.n_prompt, trace.n_prompt + n_tokens)


def write_routing(
    path: Path, shape: RouterShape, names: Sequence[str], n_tokens: int, seed: int = 0
) -> dict[str, object]:
    """Write n_tokens of each trace, end to end, as .npy; return their raw-line fields."""
    traces = [find_trace(name, shape, n_tokens, seed) for name in names]
    np.save(path, np.concatenate([trace.ids for trace in traces]).astype(np.int32))
    about = [
        {
            "name": name, "sha256": trace.sha256, "n_tokens": trace.n_tokens,
            "stats": trace_stats(trace).line(),
        }
        for name, trace in zip(names, traces)
    ]  # fmt: skip
    return {"traces": about, "seed": seed}
