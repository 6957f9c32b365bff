"""Texts depend on nothing but their prompts: in reference mode, and with prompts over pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.text_ways import all_ways, prompts_of, reference

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml.device import Device
from moegraph.gguf import resolve_target
from moegraph.graphs import chunk
from moegraph.runner import base

HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.py.txt"
SETTINGS: dict[str, Any] = {"device": "cpu", "cpu_reference": True, "n_threads": 1}
LENGTHS = (5, 33, 70, 130)


@pytest.fixture
def over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU read prompts as CUDA does with --deterministic: K and V through pages."""
    init = Device.__init__

    def invariant(self: Device, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        self.is_invariant = True

    monkeypatch.setattr(Device, "__init__", invariant)
    for module in (base, chunk):
        monkeypatch.setattr(module, "can_page", lambda stage: True)


def source() -> list[int]:
    with Engine.load("tiny", EngineConfig(device="cpu", n_ctx=256)) as engine:
        return engine.tokenizer.encode(HELD_OUT.read_text("utf-8")[:8000])


def check(place: str, name: str = "tiny") -> None:
    ids, path = source(), resolve_target(name)
    wanted = reference(path, SETTINGS, prompts_of(ids, LENGTHS), 8, 512, ids[:17])
    for found in all_ways(path, SETTINGS, wanted, 8, 512, [place], [64]):
        assert found.differ == [], found.name
        assert found.n == 5 * len(LENGTHS) and found.n_hits > 0


@pytest.mark.parametrize(
    ("name", "place"), [("tiny", "all"), ("tiny", "25 %"), ("tiny-oss", "25 %")]
)
def test_texts_depend_on_nothing_else_in_reference_mode(name: str, place: str) -> None:
    check(place, name)


@pytest.mark.parametrize(("name", "place"), [("tiny-oss", "all"), ("tiny", "25 %")])
def test_texts_depend_on_nothing_else_over_pages(name: str, place: str, over_pages: None) -> None:
    check(place, name)


def test_prompts_over_pages_have_the_logits_of_prompts_under_a_mask(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    ids = np.array(source()[:300], dtype=np.int32)
    config = EngineConfig(**SETTINGS, n_ctx=512, n_ubatch=64)
    found = []
    for _ in range(2):
        with Engine.load("tiny", config) as engine:
            found.append(engine.prefill(ids, 0, all_rows=True).require_logits().copy())
        request.getfixturevalue("over_pages")
    assert not np.array_equal(found[0], found[1]), "the second engine did not read pages"
    # ggml's operation rounds queries to F16, and an expert that is nearly as likely may take over
    error = ((found[0] - found[1]) ** 2).sum(axis=1) / (found[0] ** 2).sum(axis=1)
    print(f"NMSE of rows: median {np.median(error):.1e}, worst {error.max():.1e}")
    assert np.median(error) < 1e-3 and error.max() < 0.1
