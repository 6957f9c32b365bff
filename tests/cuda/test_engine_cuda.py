"""The engine on a CUDA device: its own ways of computing agree, requests repeat, memory is flat."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from helpers.cache_rules import check_cache
from helpers.fetching_engines import fetch_layers
from helpers.shared import greedy_tokens, prompt
from regression.harness import FAMILIES

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ConfigError, OutOfDeviceMemory
from moegraph.ggml.handles import live_handles
from moegraph.kinds import Kind

PRESETS = ["mini35b", "legacy32", "kquant40", "iq64", "mxfp256"]
# Squared error that a router's choices give which flip now and then; a wrong term gives above 0.1.
FLIPS = 1e-3
CUTS = [0, 1, 2, 3, 5, 8, 15, 16, 24, 64, 65, 97, 98, 99, 100]

PLACEMENTS = [
    {"pin_layers": 1, "cache_slots": 60, "miss": "stream"},
    {"cache_slots": 60, "miss": "stream", "host_pin": "none"},
    {"cache_slots": 60, "miss": "cpu"},
    {"cache_slots": 60, "miss": "auto"},
    {"cache_slots": 0, "miss": "stream"},
    {"cache_slots": 0, "miss": "auto"},
    {"cache_slots": 20, "policy": "lru", "miss": "auto"},
]


def run(engine: Engine) -> np.ndarray:
    """Return the logits of 100 tokens in passes of many widths."""
    ids = prompt(engine, CUTS[-1], seed=3)
    return np.concatenate([engine.forward_logits(ids[a:b], a) for a, b in zip(CUTS, CUTS[1:])])


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    """Return the squared error relative to b."""
    return float(((a - b).astype(np.float64) ** 2).sum() / (b.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("preset", [*PRESETS[1:], "float32", *FAMILIES])
def test_layered_equals_whole(open_cuda, preset):
    rows = [run(open_cuda(preset, mode=mode)) for mode in ("whole", "layered")]
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("preset", [*PRESETS, *FAMILIES])
def test_residency_changes_results_no_more_than_where_the_experts_run(open_cuda, preset):
    whole = open_cuda(preset)
    hp, expected = whole.hparams, run(whole)
    on_cpu = open_cuda(preset, device="cpu")
    # the same file on the CPU: how far apart two correct computations are for this model
    bound = max(2 * nmse(run(on_cpu), expected), FLIPS)
    most = len(hp.routed_layers) * hp.n_expert // 3
    for placement in [*PLACEMENTS, {"cache_slots": 0, "miss": "cpu"}]:
        settings = {**placement, "cache_slots": min(placement["cache_slots"], most)}
        if placement["miss"] == "cpu" and not hp.has_cpu_kernel:
            with pytest.raises(ConfigError, match="use --miss stream"):
                open_cuda(preset, **settings)
            continue
        engine = open_cuda(preset, **settings)
        got = run(engine)
        assert np.isfinite(got).all(), placement
        assert nmse(got, expected) <= bound, placement
        assert engine.runner.cache.stats.misses.sum() > 0
        check_cache(engine.runner.cache)
        engine.close()


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("preset", ["wide64", *PRESETS, *FAMILIES])
def test_graphs_that_fetch_by_themselves_equal_whole(open_cuda, preset, policy):
    """To the bit, with one slot more than a row chooses: most rows miss something.

    In slots, biases of gptoss are added by kernels of their own; in full layers by the products'.
    Of wide64, the launch of gate and up fetches.
    """
    whole = open_cuda(preset)
    hp = whole.hparams
    slots = len(hp.routed_layers) * (hp.n_expert_used + 1)
    engine = open_cuda(preset, cache_slots=slots, policy=policy, miss="stream")
    assert fetch_layers(engine) == set(hp.routed_layers)
    ids = prompt(whole, 300, seed=5)
    for at, token in enumerate(ids):
        rows = [e.forward_logits([token], at) for e in (engine, whole)]
        np.testing.assert_array_equal(*rows, err_msg=f"token {at}")
    check_cache(engine.runner.cache)
    stats = engine.runner.cache.stats
    assert stats.admitted.sum() == stats.missing.sum() > 300


@pytest.mark.parametrize(
    ("preset", "n"), [*product(PRESETS, [2, 4, 8, 16, 32]), *((name, 4) for name in FAMILIES)]
)
def test_rows_whose_graphs_fetch_equal_whole(open_cuda, preset, n):
    """To the bit where each id has a slot; else what the slots do not hold is added to a sum."""
    whole, on_cpu = open_cuda(preset, n_seq=n), open_cuda(preset, n_seq=n, device="cpu")
    hp = whole.hparams
    each = min(n * hp.n_expert_used, hp.n_expert - 2)
    slots = len(hp.routed_layers) * each
    engine = open_cuda(preset, n_seq=n, cache_slots=slots, policy="lru", miss="stream")
    mode = engine.runner.residency.miss_mode(Kind.DECODE, n)
    assert mode.fetch_layers == set(hp.routed_layers)
    rng = np.random.default_rng(n)
    passes = []
    for turn in range(24):
        ids, slots = rng.integers(0, 1000, (n, 1)).astype(np.int32), rng.permutation(n).tolist()
        rows = []
        for one in (engine, whole, on_cpu):
            if turn % 3 == 2:  # one drafted row of each sequence, which is taken
                one.passes.verify(ids, slots, greedy=False)
                rows.append(one.collect().require_logits())
                for slot in slots:
                    one.passes.commit({slot: [0]})
            else:
                rows.append(one.forward(ids, slots).logits)
        if not mode.short_layers:
            np.testing.assert_array_equal(rows[0], rows[1], err_msg=f"pass {turn}")
        passes.append(rows)
    got, expected, other = (np.concatenate(part) for part in zip(*passes))
    # the same file on the CPU: how far apart two correct computations are for this model
    assert nmse(got, expected) <= 2 * nmse(other, expected)
    check_cache(engine.runner.cache)
    assert engine.runner.cache.stats.admitted.sum() > 0


@pytest.mark.alone
@pytest.mark.parametrize("settings", [{"mode": "whole"}, {"mode": "layered"}, {"cache_slots": 60}])
def test_requests_repeat_and_memory_is_flat(open_cuda, settings):
    engine = open_cuda(**settings)
    ids = prompt(engine, 30, seed=1)
    first = greedy_tokens(engine, ids, 12)
    used, handles = [], []
    for i in range(200):
        greedy_tokens(engine, prompt(engine, 1 + i % 10, seed=i), 3)
        used.append(engine.device.memory()[0])
        handles.append(sum(live_handles().values()))
    if "mode" in settings:  # what is resident decides in which order CUDA sums experts
        assert greedy_tokens(engine, ids, 12) == first
    # captured graphs come and go with prompt lengths: hundreds of them, a tenth of a MiB each
    assert max(used[100:]) - min(used[100:]) <= 64 << 20
    assert max(used[150:]) >= max(used[100:150]) - (8 << 20), "less and less is free"
    # every prompt length has been seen after 40 requests; built graphs are kept up to a limit
    assert max(handles[120:]) <= max(handles[40:120])


def test_too_large_a_context_is_refused_with_numbers(model_file):
    before = live_handles()
    with pytest.raises(OutOfDeviceMemory, match=r"the model without its experts needs .* lower -c"):
        Engine.load(model_file("mini35b"), EngineConfig(device="cuda", n_ctx=1 << 22, n_seq=256))
    assert live_handles() == before


@pytest.mark.alone
def test_the_driver_never_sees_more_than_the_budget(open_cuda):
    """Captured graphs included: passes of many widths, then single tokens."""
    for slots in (20, 60, 120):
        planned = open_cuda(cache_slots=slots)
        budget = (planned.plan.total >> 20) + 1
        planned.close()
        engine = open_cuda(cache_slots=slots, vram=f"{budget}MiB")
        run(engine)
        greedy_tokens(engine, prompt(engine, 20), 60)
        assert engine.runner.cache.stats.misses.sum() > 0
        assert engine.memory()["device_peak_bytes"] <= budget << 20
        engine.close()
