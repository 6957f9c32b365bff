"""One process, many engines and many requests: budgets are kept, results stay, nothing grows."""

from __future__ import annotations

import gc
import weakref

import pytest
from helpers.cache_rules import check_cache
from helpers.shared import greedy_tokens, prompt, resident_bytes
from helpers.shipped import TINY, TINY_DFLASH, merged_tiny

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml.handles import live_handles
from moegraph.placement.footprint import needed_bytes
from moegraph.sampling import SamplingParams

N_CTX, N_UBATCH = 512, 64


def config(**settings: object) -> EngineConfig:
    return EngineConfig(device="cpu", n_threads=1, n_ctx=N_CTX, n_ubatch=N_UBATCH, **settings)


# Share of the experts that the budget holds (None: no budget), and what else changes.
REQUESTS = [
    (0.6, {"pin_layers": 0}),
    (0.1, {"miss": "stream"}),
    (2.0, {}),
    (0.3, {"pin_layers": 0, "miss": "cpu", "policy": "lru"}),
    (0.9, {"pin_layers": 1}),
    (0.0, {"pin_layers": 0, "cache_slots": 0}),
    (0.5, {"cache_slots": 20}),
    (None, {"pin_layers": 2, "cache_slots": 9}),
    (0.25, {"policy": "lru"}),
    (0.75, {"pin_layers": 2, "miss": "stream"}),
]


def test_ten_engines_with_changed_budgets_keep_them_and_leave_nothing(model_path):
    path = model_path("mini35b")
    with open_model(path) as model:
        need = needed_bytes(model, config(), N_CTX, is_own=False)
    with Engine.load(path, config()) as engine:
        ids = prompt(engine, 70, seed=1)
        expected = greedy_tokens(engine, ids, 12)
    gc.collect()
    handles, sizes, slots = live_handles(), [], []
    for share, settings in REQUESTS:
        budget = None
        if share is not None:
            budget = need.fixed + need.staging + need.ring + int(share * need.experts)
            settings = {**settings, "vram": f"{budget}B"}
        with Engine.load(path, config(**settings)) as engine:
            assert greedy_tokens(engine, ids, 12) == expected, settings
            parts = engine.memory()
            taken = sum(parts[f"{part}_bytes"] for part in ("weights", "kv", "state", "compute"))
            assert budget is None or taken <= engine.plan.total <= budget, settings
            slots.append(sum(engine.stage.n_slots))
        gc.collect()
        assert live_handles() == handles, settings
        sizes.append(resident_bytes())
    assert len(set(slots)) >= 8, "the budgets made no difference"
    assert max(sizes[5:]) - max(sizes[:5]) < 8 << 20


@pytest.mark.parametrize("miss", ["cpu", "stream"])
def test_200_requests_with_misses_leave_memory_and_handles_flat(model_path, miss):
    settings = {"cache_slots": 40, "pin_layers": 0, "policy": "lru", "miss": miss}
    with Engine.load(model_path("legacy32"), config(**settings)) as engine:
        sizes, handles = [], []
        for i in range(200):
            # widths below and above admission, and no more of them than graphs are kept for:
            # beyond that, memory nears the bound of the graph cache in ever smaller steps
            n = (1, 2, 8, 9, 30, 70)[i % 6]
            assert len(greedy_tokens(engine, prompt(engine, n, seed=i), 3)) == 3
            sizes.append(resident_bytes())
            handles.append(sum(live_handles().values()) - len(engine.runner.graphs))
        stats = engine.expert_stats()
        assert stats.cache.misses.sum() > 10_000 and stats.n_bytes_to_device > 0
        check_cache(engine.runner.cache)
    assert len(set(handles[60:])) == 1
    assert max(sizes[150:]) - max(sizes[80:100]) < 2 << 20


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"device": "cpu,cpu"},
        {"spec": "dflash", "draft": str(TINY_DFLASH)},
        {"spec": "mtp"},
        {"pin_layers": 0, "cache_slots": 20, "miss": "stream"},
    ],
    ids=str,
)
def test_a_closed_engine_leaves_with_its_last_reference(settings, tmp_path) -> None:
    path = merged_tiny(tmp_path) if settings.get("spec") == "mtp" else TINY
    made = EngineConfig(**{"device": "cpu", "n_ctx": N_CTX, "cache_ram": 64, **settings})
    gc.collect()
    before = live_handles()
    gc.disable()
    try:
        engine = Engine.load(path, made)
        engine.keep_prefixes(tmp_path / "prefixes", 64 << 20)
        asked = [{"role": "user", "content": "def add(a, b):"}]
        said = engine.chat(asked, max_tokens=6, sampling=SamplingParams(temperature=0.0))
        assert "".join(getattr(part, "text", "") for part in said)
        for _ in zip(range(3), engine.generate("import os\n" * 60, reuse=True, marks=[100])):
            pass
        engine.close()
        assert live_handles() == before
        gone = weakref.ref(engine), weakref.ref(engine.file)
        del engine, said
        assert [reference() for reference in gone] == [None, None]
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = {type(one).__module__ for one in gc.garbage}
        assert [kind for kind in kinds if kind.startswith("moegraph")] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
