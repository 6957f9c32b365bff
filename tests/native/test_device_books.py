"""Device memory in use at any time, by the books of what is allocated: never above the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.device_books import Books, keep_books, planned
from helpers.shared import prompt

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.passes import prefixes
from moegraph.placement.footprint import needed_bytes


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    """Keep books of all device buffers."""
    return keep_books(monkeypatch)


@pytest.mark.parametrize("share", [None, 0.3], ids=["whole", "missing"])
def test_marks_and_turns_take_no_device_memory(
    model_path: Callable[[str], Any], books: Books, monkeypatch: pytest.MonkeyPatch, share: Any
) -> None:
    monkeypatch.setattr(prefixes, "_WORTH", 1)
    settings: dict[str, Any] = {"device": "cpu", "n_threads": 1, "n_ctx": 1024, "n_ubatch": 64}
    path = model_path("mini35b")
    if share is not None:
        with open_model(path) as model:
            need = needed_bytes(model, EngineConfig(**settings), 1024, is_own=False)
        budget = need.fixed + need.staging + need.ring + int(share * need.experts)
        settings |= {"vram": f"{budget}B", "pin_layers": 0}
    with Engine.load(path, EngineConfig(**settings)) as engine:
        loaded, ids = books.n_bytes, prompt(engine, 900, seed=1)
        limit = planned(engine)
        for n in (200, 450, 700, 900):
            marks = tuple(range(n - 180, n, 20))
            for _ in engine.generate(ids[:n], max_tokens=3, text=False, reuse=True, marks=marks):
                taken = books.peak + engine.runner.graphs.n_bytes
                assert taken <= limit, f"{n} tokens"
        assert engine.prefixes.store.n_places >= 9
        assert books.n_bytes == loaded, "requests took memory of their own"


def test_a_prompt_of_32768_positions_stays_within_the_budget(
    model_path: Callable[[str], Any], books: Books
) -> None:
    n, n_held, path = 32_768, 31_200, model_path("legacy32")
    settings: dict[str, Any] = {
        "device": "cpu", "n_threads": 2, "n_ctx": n, "n_ubatch": 512, "pin_layers": 0,
        "miss": "stream",
    }  # fmt: skip
    with open_model(path) as model:
        need = needed_bytes(model, EngineConfig(**settings), n, is_own=False)
    settings["vram"] = f"{need.fixed + need.staging + need.ring + need.experts // 4}B"
    with Engine.load(path, EngineConfig(**settings)) as engine:
        graphs, loaded = engine.runner.graphs, books.n_bytes
        reserved = graphs.n_bytes
        assert loaded + reserved <= planned(engine)
        ids = np.resize(prompt(engine, 240, seed=2), n - 2)
        engine.prefill(ids[:240])
        copies = engine.state.copies
        rows, states = copies.take_rows(0, 0, 240), copies.take_states(0, 240)
        # the same rows again and again: computing so many would take a minute
        again = [(first, rows) for first in range(0, n_held, 240)]
        engine.copies.put_back(0, ids[:n_held].tolist(), 0, again, states)
        marks = (n_held + 100, n_held + 700, n - 80)
        list(engine.generate(ids, max_tokens=1, text=False, reuse=True, marks=marks))
        assert engine.prefixes.store.n_places == 3
        # what has been reserved is not exceeded, the snapshot to undo the prompt included
        assert (books.peak, graphs.n_bytes) == (loaded, reserved)
