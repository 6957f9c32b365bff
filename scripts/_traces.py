"""Routing for the bench scripts: generated or recorded traces, one after another in one replay.

An engine takes one recording when it loads, and loading a model of 22 GB takes longer than
measuring it. So several traces are put end to end: single-row passes consume the recording one step
each, whatever the sequence does, and the caller decodes exactly as many tokens as a part is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegraph.experts.generator import PRESETS, generate_trace
from moegraph.experts.identity import RouterShape
from moegraph.experts.trace import Trace, read_trace
from moegraph.experts.tracestats import trace_stats
from moegraph.modelfile import open_model


@dataclass(frozen=True)
class ModelFacts:
    """What the scripts need of a model's header. expert_bytes: one expert of one layer, mean."""

    n_layer: int
    n_expert: int
    n_expert_used: int
    n_vocab: int
    expert_bytes: int

    @property
    def n_experts(self) -> int:
        """Return the experts of all layers."""
        return self.n_layer * self.n_expert

    @property
    def shape(self) -> RouterShape:
        """Return the router's shape, of no model in particular."""
        return RouterShape(self.n_layer, self.n_expert, self.n_expert_used)

    @classmethod
    def of(cls, path: Path) -> ModelFacts:
        """Read a model's header."""
        with open_model(path) as model:
            hp = model.hparams
            stacks = [info for info in model.tensors.values() if "_exps." in info.name]
            n_bytes = sum(info.nbytes for info in stacks)
        n_experts = hp.n_layer * hp.n_expert
        return cls(hp.n_layer, hp.n_expert, hp.n_expert_used, hp.n_vocab, n_bytes // n_experts)


def find_trace(name: str, shape: RouterShape, n_tokens: int, seed: int = 0) -> Trace:
    """Return a trace of a preset, NAME or NAME:PROMPT, or of a file.

    Raises:
        RequestError: the file is not a trace, or one of another shape.
    """
    preset, _, prompt = name.partition(":")
    if preset in PRESETS and (not prompt or prompt.isdecimal()):
        return generate_trace(shape, n_tokens, seed, int(prompt or 0), PRESETS[preset])
    trace = read_trace(name)
    trace.shape.require(shape, f"{name}: the trace")
    return trace.part(trace.n_prompt, trace.n_prompt + n_tokens)


def write_routing(
    path: Path, facts: ModelFacts, names: Sequence[str], n_tokens: int, seed: int = 0
) -> dict[str, object]:
    """Write n_tokens of each trace, end to end, as .npy; return what the raw lines say of them."""
    traces = [find_trace(name, facts.shape, n_tokens, seed) for name in names]
    np.save(path, np.concatenate([trace.ids for trace in traces]).astype(np.int32))
    about = [
        {
            "name": name, "sha256": trace.sha256, "n_tokens": trace.n_tokens,
            "stats": trace_stats(trace).line(),
        }
        for name, trace in zip(names, traces)
    ]  # fmt: skip
    return {"traces": about, "seed": seed}
