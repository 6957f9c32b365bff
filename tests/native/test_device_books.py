"""Device memory in use at any time, by the books of what is allocated: never above the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from helpers.shared import prompt

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer
from moegraph.passes import prefixes
from moegraph.placement.footprint import needed_bytes


class Books:
    """Counts the bytes of device buffers that are open; peak: the most at any time."""

    def __init__(self) -> None:
        self._open: WeakSet[Buffer] = WeakSet()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def add(self, buffer: Buffer, size: int) -> Buffer:
        """Note a new buffer."""
        self._open.add(buffer)
        self._sizes[id(buffer)] = size
        self.peak = max(self.peak, self.n_bytes)
        return buffer

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the open buffers."""
        return sum(self._sizes[id(buffer)] for buffer in self._open if not buffer.is_closed)


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    """Keep books of all device buffers; the shared block of graphs is not one of them."""
    found, real = Books(), Device.buffer

    def buffer(self: Device, size: int, what: str, remedy: str) -> Buffer:
        return found.add(real(self, size, what, remedy), size)

    monkeypatch.setattr(Device, "buffer", buffer)
    return found


def planned(engine: Engine) -> int:
    """Return what the plan grants to buffers: on the CPU, weights stay where the file is mapped."""
    plan = engine.plan.bytes
    return engine.plan.total - plan["weights"] - plan["other"] - plan["pinned"]


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
