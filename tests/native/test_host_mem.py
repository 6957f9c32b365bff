"""Three tiers: host memory that holds some experts, the others only in the file (--host-mem)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faults import events_on_cpu
from helpers.interrupts import interrupted
from helpers.shared import prompt
from helpers.tiers import check_held, room

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ConfigError, ModelFileError
from moegraph.experts.machines import MACHINES
from moegraph.experts.policy import parse_policy
from moegraph.placement.identity import router_shape
from moegraph.placement.simulate import HostLimit, simulate
from moegraph.placement.trace import TraceRecorder
from moegraph.resident import layout
from moegraph.resident import store as stores
from moegraph.runner import misses

Open = Callable[..., Engine]
SLOTS = {"pin_layers": 0, "cache_slots": 40, "miss": "stream", "deterministic": True}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two experts move at a time: what passes takes most of so small a model else."""
    monkeypatch.setattr(layout, "n_at_once", lambda size: 2)
    monkeypatch.setattr(misses, "n_at_once", lambda size: 2)


def logits(engine: Engine, ids: np.ndarray) -> np.ndarray:
    """Return the logits of a prompt, of decoded rows, and of a few rows at once."""
    found = [engine.prefill(ids[:150], all_rows=True).require_logits().copy()]
    for at in range(150, 180):
        found.append(engine.forward(ids[at : at + 1]).require_logits().copy())
    found.append(engine.forward(ids[180:200], all_rows=True).require_logits().copy())
    engine.reset()
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("preset", "share", "more", "has_events"),
    [
        ("kquant40", 0.4, {}, True),  # experts of several sizes
        ("mini35b", 0.2, {"policy": "lru"}, False),
        ("mini35b", 0.6, {"cache_slots": 0}, True),
        ("gptoss", 0.3, {"cache_slots": 24}, False),  # with biases
        ("float32", 0.3, {}, False),
        ("iq64", 0.3, {"policy": "lru"}, False),  # gate and up in one matrix
    ],
)
def test_bits_are_those_of_enough_memory_and_host_memory_holds_what_it_says(
    open_engine: Open, preset: str, share: float, more: dict[str, Any], has_events: bool
) -> None:
    plain = open_engine(preset, **SLOTS)
    ids = prompt(plain, 200, seed=4)
    with events_on_cpu() if has_events else nullcontext():
        engine = open_engine(preset, **SLOTS | more, host_mem=room(plain, share))
        n_held = len(engine.stage.store.ring._held)
        n_all = plain.hparams.n_expert * len(plain.stage.store.layers)
        assert share - 0.1 < n_held / n_all < share + 0.1
        assert any("host memory" in line for line in engine.warnings)
        ring = engine.stage.store.ring
        for at in (at for each in ring._passing.values() for at in each):
            ring._blocks[at].array[:] = 0xA5
        before = engine.expert_stats()
        for _ in range(2):
            np.testing.assert_array_equal(logits(engine, ids), logits(plain, ids))
            check_held(engine)
        moved = engine.expert_stats().since(before)
        assert 0 < moved.n_file_bytes < moved.n_bytes_to_device
        assert len(engine.stage.store.ring._held) >= 0.9 * n_held


def test_where_both_levels_hold_everything_the_file_is_read_no_more(open_engine: Open) -> None:
    plain = open_engine(**SLOTS)
    engine = open_engine(**SLOTS, host_mem=room(plain, 0.95))
    ids = prompt(plain, 200, seed=4)
    before = engine.expert_stats()
    np.testing.assert_array_equal(logits(engine, ids), logits(plain, ids))
    assert engine.expert_stats().since(before).n_file_bytes == 0
    assert engine.expert_stats().cache.evicted.sum() > 10, "nothing moved"
    check_held(engine)


def test_an_interrupt_at_any_line_corrupts_nothing(open_engine: Open) -> None:
    plain = open_engine(**SLOTS)
    engine = open_engine(**SLOTS, host_mem=room(plain, 0.3))
    ids = prompt(engine, 70, seed=6)

    def both(one: Engine) -> np.ndarray:
        one.prefill(ids[:60])
        return one.forward(ids[60:61]).require_logits().copy()

    expected, line, n_came = both(plain), 0, 0
    folders = "resident/store.py", "runner/misses.py", "experts/hostlevel.py"
    while interrupted(line, lambda: both(engine), *folders):
        n_came += 1
        line += 23 + line // 5
        engine.reset()
        np.testing.assert_array_equal(both(engine), expected)
        engine.reset()
        engine.device.synchronize()
    assert n_came > 10
    engine.stage.store.ring.forget()
    for (il, expert), at in engine.stage.store.ring._held.items():
        assert at not in engine.stage.store.ring._passing[engine.stage.store.packing(il).stride]
        assert 0 <= expert < engine.hparams.n_expert


def test_a_file_that_fails_or_changes_is_one_error_and_the_engine_goes_on(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = open_engine(**SLOTS)
    engine = open_engine(**SLOTS, host_mem=room(plain, 0.3))
    ids = prompt(engine, 200, seed=6)
    expected, real = logits(plain, ids), os.preadv
    for fails_at in (1, 7, 90, 300):
        n = 0

        def fails(fd: int, views: list[memoryview], at: int) -> int:
            nonlocal n
            n += 1
            if n >= fails_at:
                raise OSError(5, "Input/output error")
            return real(fd, views, at)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fails)
            with pytest.raises(ModelFileError, match="Input/output error"):
                logits(engine, ids)
        check_held(engine)
        engine.reset()
    np.testing.assert_array_equal(logits(engine, ids), expected)

    def short(fd: int, views: list[memoryview], at: int) -> int:
        return real(fd, [views[0][: max(1, len(views[0]) // 3)]], at)

    monkeypatch.setattr(os, "preadv", short)  # reads that return less than was asked for
    np.testing.assert_array_equal(logits(engine, ids), expected)
    monkeypatch.undo()
    plain_fd = engine.file._part(0).fd

    def refuses(fd: int, views: list[memoryview], at: int) -> int:
        if fd != plain_fd:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", refuses)  # a file system that opens for direct reads only
    np.testing.assert_array_equal(logits(engine, ids), expected)
    check_held(engine)


def test_where_direct_reads_are_refused_the_page_cache_serves(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, real = open_engine(**SLOTS), os.open

    def opens(path: str, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", opens)
    engine = open_engine(**SLOTS, host_mem=room(plain, 0.3))
    assert any("read through the page cache" in line for line in engine.warnings)
    ids = prompt(engine, 200, seed=6)
    np.testing.assert_array_equal(logits(engine, ids), logits(plain, ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda path: os.truncate(path, 100_000), "shrank|could not be read"),
     (lambda path: os.utime(path, ns=(0, 0)), "written to while the model was in use")],
)  # fmt: skip
def test_a_file_that_changes_under_a_request_ends_it(
    open_engine: Open, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    plain = open_engine(**SLOTS)
    path = Path(shutil.copy(plain.file.path, tmp_path / "model.gguf"))
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=512, host_mem=room(plain, 0.1), **SLOTS)
    with Engine.load(path, config) as engine:
        ids = prompt(engine, 200, seed=6)
        engine.prefill(ids[:50])
        change(path)
        with pytest.raises(ModelFileError, match=message):
            for at in range(50, 200):
                engine.forward(ids[at : at + 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_mem": "1KiB"}, "the least for one of each layer"),
        ({"host_mem": "8MiB,8MiB"}, "give one size"),
        ({"host_mem": "8MiB", "host_pin": "none"}, "--host-pin none makes none"),
        ({"host_mem": "4MiB", "host_pin": "all"}, "and --host-mem allows 4.00 MiB"),
        ({"host_mem": "100TiB", "miss": "stream"}, None),
        ({"host_mem": "4MiB", "miss": "cpu"}, "--miss cpu needs every expert in host memory"),
    ],
)
def test_what_cannot_be_is_refused(
    open_engine: Open, settings: dict[str, Any], message: str | None
) -> None:
    if message is None:  # more than all experts need: all of them are copied, and graphs fetch
        engine = open_engine("mini35b", **SLOTS | settings)
        assert engine.expert_stats().n_fetching == len(engine.stage.store.layers)
        return
    with pytest.raises(ConfigError, match=message):
        open_engine("mini35b", **SLOTS | settings)


def test_two_devices_share_the_host_memory(open_engine: Open) -> None:
    plain = open_engine("mini35b", **SLOTS)
    size = int(room(plain, 0.4)[:-1])
    engine = open_engine("mini35b", **SLOTS, device="cpu,cpu", host_mem=f"{size}B")
    held = [sum(stage.store.n_held.values()) for stage in engine.stages]
    assert min(held) > 10 and engine.memory()["host_pinned_bytes"] <= size
    ids = prompt(plain, 200, seed=4)
    np.testing.assert_array_equal(logits(engine, ids), logits(plain, ids))


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_the_simulator_reads_from_the_file_what_a_run_reads(open_engine: Open, policy: str) -> None:
    plain = open_engine("mini35b", **SLOTS)
    size = int(room(plain, 0.35)[:-1])
    engine = open_engine("mini35b", **SLOTS, policy=policy, host_mem=f"{size}B")
    recorder, before = TraceRecorder(router_shape(engine.file)), engine.expert_stats()
    engine.runner.observers.append(recorder)
    for token in prompt(plain, 80, seed=4):
        engine.forward(np.array([token]))
    store, trace = engine.stage.store, recorder.trace(0, "")
    found = simulate(
        trace, engine.runner.cache.n_slots, parse_policy(policy), MACHINES["h200"],
        slot_bytes=[store.packing(il).stride for il in store.layers], limit=HostLimit(size, 1e9),
    )  # fmt: skip
    read = engine.expert_stats().since(before).n_file_bytes
    assert found.file_bytes == read > 0
    assert found.stats.missing.sum() > 100
    free = simulate(trace, engine.runner.cache.n_slots, parse_policy(policy), MACHINES["h200"],
                    slot_bytes=[store.packing(il).stride for il in store.layers])  # fmt: skip
    assert free.file_bytes == 0
    assert found.step_s.sum() > max(free.step_s.sum(), read / 1e9)


class Calls:
    """The native library of a module, which notes the names of some calls."""

    def __init__(self, real: Any) -> None:
        self._real, self.names = real, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("ggml_backend_event", "ggml_backend_tensor_")):
            self.names.append(name.removeprefix("ggml_backend_"))
        return getattr(self._real, name)


def test_uploads_wait_for_what_the_stream_of_graphs_saves(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = open_engine(**SLOTS)
    with events_on_cpu():
        engine = open_engine(**SLOTS, host_mem=room(plain, 0.3))
        ring, bank = engine.stage.store.ring, engine.stage.banks.layer(0)
        calls = Calls(stores.C)
        monkeypatch.setattr(stores, "C", calls)
        gone = min(ring.held(0))
        ring.drop(0, gone)
        assert not calls.names and ring._taken, "free before the uploads from it have ended"
        ring.save(0, gone, bank.to_fill, 0, 64, True)
        assert calls.names == ["tensor_get_async", "event_record"]
        ring.take(0, gone)
        ring.take(0, gone)
        assert calls.names[2:] == ["event_wait"], "or an upload could read what is not there yet"
        ring.drop(0, gone)
        ring.save(0, gone, bank.to_fill, 0, 64, True)
        ring.drop(0, gone)
        assert calls.names[-1] == "event_wait", "or a read could be overwritten"
