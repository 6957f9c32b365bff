"""The op of candidates on CUDA, and the tokens that samplers choose from its lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.candidates_case import (
    ROW,
    CandidatesBench,
    check_passes,
    check_row,
    draw_words,
    rows_of_logits,
)
from helpers.reference_sampler import choose

from moegraph import Engine, EngineConfig
from moegraph.ggml.device import Device
from moegraph.loop.rows import RowSampler
from moegraph.sampling import Sampler, SamplingParams, gumbel

N_VOCAB_LARGE = 248_320
SETTINGS = (
    {}, {"temperature": 1.0, "top_k": 0}, {"temperature": 1.0, "top_k": 0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0},
    {"temperature": 0.0, "repeat_penalty": 1.5},
    {"repeat_penalty": 1.2, "logit_bias": {3: 2.0, 4: -float("inf")}},
)  # fmt: skip


@pytest.mark.parametrize("n_vocab", [1, 2, 127, 384, 385, 513, 4096, 30_001, N_VOCAB_LARGE])
def test_any_row_gives_its_lists_and_sums(n_vocab: int, device: Device) -> None:
    rng = np.random.default_rng(n_vocab)
    with CandidatesBench(device, n_vocab) as bench:
        for name, logits in rows_of_logits(n_vocab, rng).items():
            for temperature in (0.0, 0.7, 1.0, 30.0):
                key = int(rng.integers(1 << 63))
                words = bench.run(logits, draw_words(temperature, key, (0, n_vocab)))
                scores = None
                if temperature:
                    scores = logits / temperature + gumbel(key, np.arange(n_vocab))
                row = words.view(ROW)[0, 0]
                try:
                    check_row(row, logits, scores)
                except AssertionError as error:
                    raise AssertionError(f"{name}, temperature {temperature}") from error
                assert row["wanted"][0] == logits[0] and np.isnan(row["wanted"][1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1700, 29_999])
def test_a_logit_that_is_not_finite_shows_in_the_sum(bad: float, at: int, device: Device) -> None:
    logits = np.random.default_rng(1).standard_normal(30_000).astype(np.float32)
    logits[at] = bad
    with CandidatesBench(device, 30_000) as bench:
        for temperature in (0.0, 1.0):
            row = bench.run(logits, draw_words(temperature)).view(ROW)[0, 0]
            assert np.isnan(row["total"])


def test_rows_have_inputs_and_results_of_their_own(device: Device) -> None:
    """Each row gives what it gives alone, bit for bit, and so does a graph that runs again."""
    rng = np.random.default_rng(5)
    n_rows, n_vocab = 32, 50_000
    logits = rng.standard_normal((n_rows, n_vocab)).astype(np.float32)
    draws = np.stack([draw_words(i % 3, i, (i,)) for i in range(n_rows)])
    with CandidatesBench(device, n_vocab, n_rows) as bench:
        runs = [bench.run(logits, draws).view(ROW)[:, 0] for _ in range(4)]
    with CandidatesBench(device, n_vocab) as bench:
        for i in range(n_rows):
            alone = bench.run(logits[i], draws[i]).view(ROW)[0, 0]
            n, n_early = alone["n_likely"], alone["n_early"]
            for together in runs:
                for name, end in (("ids", n), ("logits", n), ("early_ids", n_early)):
                    np.testing.assert_array_equal(together[i][name][:end], alone[name][:end])
                for name in ("total", "largest", "floor", "n_likely", "n_early"):
                    assert together[i][name] == alone[name]


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
