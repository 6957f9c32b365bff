"""Predict how long prompts take, by residency: an estimate from a few measured times.

A prompt is a sweep (runner/sweep.py). Rows that chose missing experts are gathered, computed, and
added again. The link sends each chosen missing expert once, and works beside the device, except
for a while after a layer's first router has begun to work: what that one will choose is known in
part only.

    layer = max(compute + rows of missing experts, link + pause)

Compute is the time of a prompt with all experts resident, which a machine knows. On an H200 this
law was within 9 % of prompts of 512 to 8,192 tokens with 60 and 25 % of the experts resident, also
over a link 2 and 4 times slower, and on another one, to which it was not fitted, within 6 %. Since
then the kernels for experts became faster; what a machine knows follows them. A prompt after others
that choose like it takes less than predicted, because these kept what it needs: 0.8 of the time for
512 tokens with 60 % of the experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..experts.cost import Machine
from .footprint import SWEEP_ROWS
from .trace import Trace

# What is predicted unless one asks for other lengths.
PROMPT_LENGTHS = (512, 2048, 8192)
# What rows of missing experts take if all experts are missing, and the pause of the link: shares of
# the compute of a layer, and of its first chunk (H200, 35B-A3B).
_MISSING_ROWS, _PAUSE = 0.2, 0.1
# Added to the counts of a trace that is shorter than a prompt: an expert that it never chose may
# still be chosen.
_UNSEEN = 0.5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PromptEstimate:
    """What a prompt of n_tokens is expected to take.

    n_sweeps: parts of the prompt that go through all layers. sent_bytes: of missing experts.
    link_s, seconds: of sending them, and of the whole prompt; None if the machine does not say it.
    """

    n_tokens: int
    n_sweeps: int
    sent_bytes: int
    link_s: float
    seconds: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens of the prompt that are read in a second."""
        return None if self.seconds is None else self.n_tokens / self.seconds


def estimate_prompt(
    trace: Trace, resident: npt.NDArray[np.bool_], n_tokens: int, slot_bytes: Sequence[int],
    machine: Machine, n_ubatch: int, held: npt.NDArray[np.bool_] | None = None,
    disk_rate: float = math.inf,
) -> PromptEstimate:  # fmt: skip
    """Predict a prompt from an empty context.

    trace: says how often experts are chosen. resident: numpy [n_layer, n_expert], the experts that
    have a slot. slot_bytes [n_layer]. machine: its times, scaled to this model. held: as resident,
    experts that need not be read from the file at disk_rate, in bytes a second; None: all.
    """
    parts = [min(SWEEP_ROWS, n_tokens - at) for at in range(0, n_tokens, SWEEP_ROWS)]
    sent, link, seconds = 0.0, 0.0, 0.0
    for n in parts:
        chosen, counts = _chosen(trace, n)
        n_sent = np.where(resident, 0.0, chosen).sum(axis=1)
        sent += float(n_sent @ np.array(slot_bytes, dtype=float))
        n_chosen = np.maximum(counts.sum(axis=1), 1.0)  # 0 in a dense layer
        missing = np.where(resident, 0.0, counts).sum(axis=1) / n_chosen
        links = np.array([machine.stream(x) for x in n_sent])
        if held is not None:  # the disk reads while the link sends
            n_read = np.where(held, 0.0, chosen).sum(axis=1)
            links = np.maximum(links, n_read * np.array(slot_bytes) / disk_rate)
        compute = _compute(machine, n, n_ubatch) / machine.n_layer
        link += float(links.sum())
        first = min(n_ubatch, n) / n
        seconds += float(sweep_seconds(compute, missing, links, first).sum())
    return PromptEstimate(
        n_tokens, len(parts), round(sent), link, seconds if machine.prompt else None,
    )  # fmt: skip


def sweep_seconds(compute: float, missing: Floats, link: Floats, first: float) -> Floats:
    """Return the seconds of layers, by the law.

    compute: of all rows of a layer. missing: share of the choices that miss. link: seconds of
    sending. first: share of the rows that the first chunk has.
    """
    pause = np.where(link > 0.0, _PAUSE * first * compute, 0.0)
    return np.maximum(compute * (1.0 + _MISSING_ROWS * missing), link + pause)


def compute_seconds(seconds: float, missing: float, link: float) -> float:
    """Return what a prompt in one chunk would take with all experts resident, by the same law.

    seconds: what it took. missing: the share of the choices that missed, 0 to 1. link: the seconds
    of sending the missing experts.
    """
    paused = (seconds - link) / _PAUSE if link > 0.0 else seconds
    return max(1e-9, min(seconds / (1.0 + _MISSING_ROWS * missing), paused))


def _compute(machine: Machine, n: int, n_ubatch: int) -> float:
    """Return the seconds of a prompt of n rows in chunks, all experts resident."""
    if machine.prompt is None:
        return 0.0
    n_full, rest = divmod(n, n_ubatch)
    return n_full * machine.prompt(n_ubatch) + machine.prompt(rest)


def _chosen(trace: Trace, n: int) -> tuple[Floats, Floats]:
    """Return the chance that n tokens choose each expert, and how often they do.

    Both numpy [n_layer, n_expert]. As in the trace, as far as it reaches; tokens beyond it choose
    independently, with the frequencies of the trace.
    """
    if n <= trace.n_tokens:
        counts = trace.part(0, n).counts().astype(float)
        return (counts > 0).astype(float), counts
    k = trace.shape.n_expert_used
    counts = trace.counts() + _UNSEEN
    shares = np.minimum(1.0, k * counts / counts.sum(axis=1, keepdims=True))
    return 1.0 - (1.0 - shares) ** n, shares * n
