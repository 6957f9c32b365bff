"""The op of candidates on CUDA, and the tokens that samplers choose from its lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.candidates_case import (
    CandidatesBench,
    check_any_row,
    check_not_finite,
    check_passes,
    check_rows_alone,
    rows_of_logits,
)
from helpers.reference_sampler import choose

from moegraph import Engine, EngineConfig
from moegraph.ggml.device import Device
from moegraph.loop.choice import RowSampler
from moegraph.sampling import Sampler, SamplingParams

N_VOCAB_LARGE = 248_320
SETTINGS = (
    {}, {"temperature": 1.0, "top_k": 0}, {"temperature": 1.0, "top_k": 0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0},
    {"temperature": 0.0, "repeat_penalty": 1.5},
    {"repeat_penalty": 1.2, "logit_bias": {3: 2.0, 4: -float("inf")}},
)  # fmt: skip


@pytest.mark.parametrize("n_vocab", [1, 2, 127, 384, 385, 513, 4096, 30_001, N_VOCAB_LARGE])
def test_any_row_gives_its_lists_and_sums(n_vocab: int, device: Device) -> None:
    check_any_row(device, n_vocab)


def test_a_logit_that_is_not_finite_shows_in_the_sum(device: Device) -> None:
    check_not_finite(device, 30_000)


def test_rows_have_inputs_and_results_of_their_own(device: Device) -> None:
    check_rows_alone(device, 32, 50_000, 4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_those_of_the_reference(settings: dict[str, object], device: Device) -> None:
    rng = np.random.default_rng(1)
    params = SamplingParams(**settings, seed=4)  # type: ignore[arg-type]
    rows, plain, n_vocab, tokens = RowSampler(params, 20_000), Sampler(params, 20_000), 20_000, []
    with CandidatesBench(device, n_vocab) as bench:
        for i in range(40):
            kinds = list(rows_of_logits(n_vocab, rng).values())
            logits = kinds[i % len(kinds)]
            token = rows.sample(bench.run(logits, rows.draw())[0], lambda row=logits: row)
            assert token == plain.sample(logits)
            if i < 5:
                assert token == choose(logits, params, len(tokens), tokens)
            for sampler in (rows, plain):
                sampler.accept(token)
            tokens.append(token)


@pytest.mark.parametrize("mode", ["whole", "layered"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_passes_list_what_their_logits_give(
    settings: dict[str, object], mode: str, model_file: Callable[[str], Path]
) -> None:
    params = SamplingParams(**settings, seed=11)  # type: ignore[arg-type]
    config = EngineConfig(device="cuda", n_ctx=512, mode=mode)
    with Engine.load(model_file("mini35b"), config) as engine:
        check_passes(engine, params, 30)
