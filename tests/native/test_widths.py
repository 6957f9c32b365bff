"""Decode passes that are padded, so that a few graphs serve all numbers of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.clients import Client, alone, serving
from helpers.shared import prompt

from moegraph.engine import Engine

Open = Callable[..., Engine]
PLACEMENTS: list[dict[str, Any]] = [
    {"mode": "whole"},
    {"cache_slots": 40, "pin_layers": 0, "miss": "stream", "host_pin": "all"},
    {"cache_slots": 40, "pin_layers": 0, "miss": "cpu"},
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_padding_changes_no_result(open_engine: Open, placement: dict[str, Any]) -> None:
    found: list[list[Any]] = []
    n_built: list[int] = []
    for widths in ((), (2, 4, 8)):
        engine = open_engine(n_seq=8, n_ctx=1024, cpu_reference=True, **placement)
        engine.runner.shapes.widths = widths
        rng, results = np.random.default_rng(0), []
        for seq in range(8):
            engine.prefill(prompt(engine, 10 + seq, seed=seq), seq)
        before = engine.runner.n_built
        for n in (3, 5, 7, 2, 8, 6, 4):
            slots = rng.permutation(8)[:n].tolist()
            rows = rng.integers(0, engine.hparams.n_vocab, (n, 1))
            results.append(engine.forward(rows, slots).require_logits())
            assert results[-1].shape == (n, engine.hparams.n_vocab)
        results += [engine.forward([7], seq).require_logits() for seq in range(8)]
        results.append(engine.forward(rows, slots, greedy=True).argmax)
        n_built.append(engine.runner.n_built - before)
        found.append(results)
        check_pool(engine.state.pool)
    for padded, plain in zip(*found):
        np.testing.assert_array_equal(padded, plain)
    assert n_built[1] < n_built[0]


def test_a_service_whose_passes_are_padded(open_engine: Open) -> None:
    engine = open_engine(n_seq=6, n_ctx=1024, cpu_reference=True)
    engine.runner.shapes.widths = (2, 4, 6)
    with serving(engine) as service:
        clients = [
            Client(service, prompt(engine, 5 + 7 * i, seed=i), max_tokens=4 + 5 * i)
            for i in range(9)
        ]
        for client in clients:
            client.wait()
    single = open_engine(cpu_reference=True)
    for client in clients:
        assert client.tokens == alone(single, client.request)[0]
