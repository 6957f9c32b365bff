"""A longer context needs no other graph on the CPU, and gives the bits of a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.runner.base import PassShapes

Open = Callable[..., Engine]
MODES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "layered": {"mode": "layered"},
    "missing": {"cache_slots": 48, "pin_layers": 0, "miss": "stream", "policy": "lru"},
    "quantized": {"mode": "whole", "type_k": "q8_0", "type_v": "q4_0"},
    "threads": {"mode": "whole", "n_threads": 3},
}


@pytest.mark.parametrize(
    ("settings", "n_seq"), list(zip(MODES.values(), (3, 1, 1, 3, 1))), ids=MODES
)
def test_lengths_change_no_bit(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], n_seq: int
) -> None:
    engine = open_engine(n_ctx=1024, n_seq=n_seq, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(PassShapes, "longest", lambda self, shape: shape)
        plain = open_engine(n_ctx=1024, n_seq=n_seq, **settings)
        expected = list(passes(plain))
    # one graph serves all lengths, in any order
    for found, logits in zip(passes(engine), expected, strict=True):
        np.testing.assert_array_equal(found, logits)


def passes(engine: Engine) -> Any:
    """Yield the logits of passes of some widths, over lengths that rise and fall."""
    n_seq = engine.state.n_seq
    for seq, n_held in ((0, 250), (n_seq - 1, 509), (0, 250), (n_seq // 2, 760)):
        engine.reset(seq)
        engine.prefill(prompt(engine, n_held, seed=seq), seq, greedy=True)
        for n in (1, 1, 5, 1, 2, 1):
            yield engine.forward(prompt(engine, n, seed=n), seq, all_rows=True).require_logits()
        if n_seq > 1:
            yield engine.forward(np.array([[1], [2]]), [seq, (seq + 1) % n_seq]).require_logits()


@pytest.mark.parametrize("settings", [MODES["whole"], MODES["missing"]], ids=["whole", "missing"])
def test_no_token_waits_for_a_graph(open_engine: Open, settings: dict[str, Any]) -> None:
    """At 256, 512 and 1024 positions, and everywhere between."""
    engine = open_engine("legacy32", n_ctx=1280, **settings)
    ids, built = prompt(engine, 240, seed=1), []
    for _ in engine.generate(ids, max_tokens=800, text=False, ignore_eos=True):
        built.append(engine.runner.graphs.n_built)
    assert len(built) == 800
    assert len(set(built[2:])) == 1, "a graph was built between two tokens"
