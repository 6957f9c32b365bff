"""Predicted times of prompts: the law, its ends, and what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegraph.experts.cost import Curve, Machine
from moegraph.experts.machines import MACHINES
from moegraph.placement.generator import generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.prompttime import (
    PromptEstimate,
    estimate_prompt,
)
from moegraph.placement.simulate import even_slots
from moegraph.placement.trace import Trace

SHAPE = RouterShape(40, 256, 8)
H200 = MACHINES["h200"]
# Before the kernels of few rows computed the experts of prompts: the measurements are of then.
BEFORE = replace(H200, prompt=Curve(((32, 9e-3), (512, 72e-3), (2048, 188e-3))))
SIZES = [1_900_000] * 40


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate_trace(SHAPE, 1024)


def estimate(
    trace: Trace, share: float, n: int, machine: Machine | None = H200, n_ubatch: int = 2048
) -> PromptEstimate:
    """Predict a prompt with a share of the experts resident, those of the lowest ids."""
    slots = np.array(even_slots(40, 256, share))
    return estimate_prompt(trace, np.arange(256) < slots[:, None], n, SIZES, machine, n_ubatch)


# Measured on an H200 at commit ab5096b: tokens a second and GB sent.
MEASURED = [
    (0.60, 512, 4850, 4.9), (0.60, 2048, 9480, 6.0), (0.60, 8192, 10_340, 6.7),
    (0.25, 512, 2735, 9.3), (0.25, 2048, 8500, 11.3), (0.25, 8192, 10_050, 12.6),
    (1.00, 512, 7080, 0.0), (1.00, 2048, 10_750, 0.0), (1.00, 8192, 11_010, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("share", "n", "speed", "sent"), MEASURED)
def test_measured_prompts_follow_from_the_built_in_machine(
    trace: Trace, share: float, n: int, speed: float, sent: float
) -> None:
    found = estimate(trace, share, n, BEFORE)
    assert found.tokens_per_s == pytest.approx(speed, rel=0.12)
    # the routing of the measured file is a little more skewed than the trace
    assert found.sent_bytes / 1e9 == pytest.approx(sent, rel=0.18)


def test_a_prompt_beyond_one_sweep_sends_experts_again(trace: Trace) -> None:
    one, two = estimate(trace, 0.6, 8192), estimate(trace, 0.6, 16_384)
    assert (one.n_sweeps, two.n_sweeps) == (1, 2)
    assert two.sent_bytes == 2 * one.sent_bytes
    assert two.seconds == pytest.approx(2 * one.seconds)


def test_a_machine_that_knows_nothing_of_prompts_tells_bytes_only(trace: Trace) -> None:
    found = estimate(trace, 0.6, 512, replace(H200, prompt=None))
    assert found.seconds is None and found.tokens_per_s is None and found.link_s is not None
    found = estimate(trace, 0.6, 512, None)
    assert (found.seconds, found.link_s) == (None, None) and found.sent_bytes > 0
