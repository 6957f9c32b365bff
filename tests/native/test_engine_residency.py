"""Experts that do not fit, on the CPU device: whatever is resident, the results are bit-equal."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cache_rules import check_cache
from helpers.fetching_engines import fetch_layers
from helpers.shared import greedy_tokens, prompt

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ConfigError, NativeError

# One row, a few, more than admission allows, a chunk of many: then single rows again.
CUTS = [0, 1, 2, 3, 5, 9, 40, 104, 105, 106, 107, 108, 112, 120]

PLACEMENTS = [
    {"pin_layers": 1, "cache_slots": 60, "miss": "stream"},
    {"pin_layers": 0, "cache_slots": 0, "miss": "stream"},
    {"cache_slots": 0, "miss": "cpu"},
    {"cache_slots": 24, "policy": "lru", "miss": "cpu"},
    {"cache_slots": 24, "policy": "lru", "miss": "stream"},
    {"cache_slots": 120, "policy": "lru", "miss": "auto"},
    {"pin_layers": 2, "cache_slots": 9, "policy": "lfu", "miss": "auto"},
]
# Graphs of one row fetch by themselves; a layer has little more slots than a row chooses.
FETCHING = [
    {"pin_layers": 0, "policy": policy, "miss": "stream", "host_pin": "all"}
    for policy in ("lfu", "lru")
]


def run(engine: Engine) -> np.ndarray:
    """Return the logits of 120 tokens in passes of many widths."""
    ids = prompt(engine, CUTS[-1], seed=3)
    parts = [engine.forward_logits(ids[a:b], a) for a, b in zip(CUTS, CUTS[1:])]
    return np.concatenate(parts)


@pytest.mark.parametrize("preset", ["legacy32", "kquant40", "iq64", "mxfp256", "float32"])
def test_results_do_not_depend_on_what_is_resident(open_engine, preset):
    expected = run(open_engine(preset))
    for placement in PLACEMENTS:
        engine = open_engine(preset, **placement)
        got = run(engine)
        np.testing.assert_array_equal(got, expected, err_msg=str(placement))
        check_cache(engine.runner.cache)
        stats = engine.runner.cache.stats
        assert stats.misses.sum() > 0, "a placement that never misses tests nothing"
        engine.close()


@pytest.mark.parametrize(("preset", "miss"), [("legacy32", "cpu"), ("mini35b", "stream")])
def test_reference_mode_is_bit_equal_with_misses_too(open_engine, preset, miss):
    expected = run(open_engine(preset, cpu_reference=True))
    engine = open_engine(preset, cpu_reference=True, cache_slots=30, miss=miss, n_threads=2)
    np.testing.assert_array_equal(run(engine), expected)


def test_a_recorded_routing_replaces_the_router_for_single_rows(open_engine, model_path):
    hp = open_engine("mini35b").hparams
    rng = np.random.default_rng(0)
    trace = np.stack([
        [rng.permutation(hp.n_expert)[: hp.n_expert_used] for _ in range(hp.n_layer)]
        for _ in range(6)
    ]).astype(np.int32)  # fmt: skip
    logits = []
    for placement in ({"mode": "layered"}, {"cache_slots": 40}):
        config = EngineConfig(device="cpu", n_threads=1, n_ctx=256, n_ubatch=32, **placement)
        with Engine.load(model_path("mini35b"), config, routing=trace) as engine:
            seen: list[np.ndarray] = []
            engine.runner.observers.append(lambda il, ids, seen=seen: seen.append(ids.copy()))
            rows = [engine.forward_logits([i], i) for i in range(6)]
            np.testing.assert_array_equal(np.stack(seen).reshape(trace.shape), trace)
            logits.append(np.concatenate(rows))
    np.testing.assert_array_equal(*logits)


def test_a_recording_with_an_expert_that_is_not_there_is_refused(open_engine, model_path):
    """Ids from the host are checked before any launch."""
    hp = open_engine("mini35b").hparams
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=256)
    trace = np.tile(np.arange(hp.n_expert_used, dtype=np.int32), (3, hp.n_layer, 1))
    for bad in (-1, hp.n_expert, 2**31 - 1):
        trace[2, -1, -1] = bad
        with pytest.raises(ConfigError, match=f"this model has experts 0 to {hp.n_expert - 1}"):
            Engine.load(model_path("mini35b"), config, routing=trace)


def test_more_experts_than_the_ring_has_blocks_arrive_intact(open_engine):
    # eight sequences of eight experts: up to 64 admitted at once, 16 blocks in the ring
    settings = {"cache_slots": 320, "pin_layers": 0, "miss": "stream", "policy": "lru"}
    engines = [open_engine("mxfp256", n_seq=8, **more) for more in (settings, {})]
    ids = prompt(engines[0], 64, seed=5)
    for at in range(0, 64, 8):
        rows = [engine.forward(ids[at : at + 8, None]).logits for engine in engines]
        np.testing.assert_array_equal(*rows)
        if at == 0:
            assert max(engines[0].runner.cache.stats.admitted) > 16


def test_nan_in_one_request_does_not_reach_the_next(tmp_path, model_path):
    source = model_path("legacy32")
    with open_model(source) as model:
        info = model.tensors["token_embd.weight"]
    raw = bytearray(source.read_bytes())
    row = info.nbytes // info.ne[1]
    raw[info.offset + 7 * row : info.offset + 7 * row + 2] = b"\xff\x7f"  # token 7 is NaN
    path = tmp_path / "nan.gguf"
    path.write_bytes(raw)
    for miss in ("stream", "cpu"):
        config = EngineConfig(
            device="cpu",
            n_threads=1,
            n_ctx=512,
            n_ubatch=64,
            pin_layers=0,
            cache_slots=0,
            miss=miss,
        )
        with Engine.load(path, config) as engine:
            good = greedy_tokens(engine, [1, 2, 3], 4)
            with pytest.raises(NativeError, match="not finite after 300 positions"):
                list(engine.generate([1] * 299 + [7], max_tokens=3, text=False))
            assert engine.state.n_past == [0]
            assert greedy_tokens(engine, [1, 2, 3], 4) == good


def test_a_whole_pass_needs_all_experts(model_path):
    with pytest.raises(ConfigError, match="mode 'whole' needs every expert on the device"):
        Engine.load(model_path("legacy32"), EngineConfig(device="cpu", mode="whole", cache_slots=8))


@pytest.mark.parametrize("preset", ["legacy32", "mxfp256"])
def test_graphs_that_fetch_by_themselves_change_no_result(open_engine, preset):
    expected_engine = open_engine(preset)
    expected, hp = run(expected_engine), expected_engine.hparams
    for placement in FETCHING:
        # one slot more than a row chooses: most rows miss something, and nearly all is at risk
        slots = hp.n_layer * (hp.n_expert_used + 1)
        engine = open_engine(preset, cache_slots=slots, **placement)
        got = run(engine)
        assert fetch_layers(engine) == set(range(hp.n_layer))
        np.testing.assert_array_equal(got, expected, err_msg=str(placement))
        check_cache(engine.runner.cache)
        engine.close()
