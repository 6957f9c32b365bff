"""Copies to host memory that are under way: what a device with streams has, with the CPU's bits.

The device is the CPU, which claims streams and events, so the ring and its thread are the real
ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from helpers.clients import GREEDY, Client, alone, serving
from helpers.faults import events_on_cpu
from helpers.interrupts import interrupted
from helpers.shared import prompt

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import NativeError
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Event, live_handles
from moegraph.loop.requests import Request
from moegraph.passes import prefixes
from moegraph.resident import tohost
from moegraph.resident.hostcopies import HostCopies
from moegraph.resident.kvpool import KVPool
from moegraph.resident.state import State

BASE = EngineConfig(
    device="cpu", n_threads=1, cpu_reference=True, n_ctx=1024, n_ubatch=256, n_seq=3, mode="whole"
)


@pytest.fixture
def engine(model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Return an engine with streams; all copies go several times through a few small blocks."""
    monkeypatch.setattr(prefixes, "_WORTH", 1)
    monkeypatch.setattr(tohost, "_BLOCK", (20 << 10) + 4)
    monkeypatch.setattr(tohost, "_BLOCKS", 3)
    with events_on_cpu(), Engine.load(model_path("mini35b"), BASE) as engine:
        yield engine


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return what the thread waits for before it copies; there is room for all meanwhile."""
    monkeypatch.setattr(tohost, "_BLOCKS", 1000)
    gate, real = threading.Event(), tohost.ToHost._bring

    def bring(*args: Any) -> None:
        gate.wait()
        real(*args)

    monkeypatch.setattr(tohost.ToHost, "_bring", bring)
    yield gate
    gate.set()


def saved(engine: Engine, seq: int, ids: np.ndarray) -> np.ndarray:
    """Have a sequence hold ids, save them and empty it; return the logits."""
    logits = engine.prefill(ids, seq).require_logits()[-1]
    assert engine.prefixes.save(seq)
    engine.reset(seq)
    return logits


def goes_on(engine: Engine, seq: int, ids: np.ndarray, n: int) -> np.ndarray:
    """Return the logits after ids of a sequence that goes on from the first n."""
    assert engine.prefixes.resume(seq, ids) == n
    return engine.prefill(ids[n:], seq).require_logits()[-1]


def cold(engine: Engine, seq: int, ids: np.ndarray) -> np.ndarray:
    engine.reset(seq)
    return engine.prefill(ids, seq).require_logits()[-1]


def test_requests_in_company_go_on_from_what_was_copied_beside_them(
    model_path: Callable[[str], Path], engine: Engine
) -> None:
    asked = [prompt(engine, 200 + 30 * i, seed=i) for i in range(4)]
    asked += [np.append(ids, (5, 6, 7)) for ids in asked]
    with Engine.load(model_path("mini35b"), replace(BASE, n_seq=1)) as single:
        requests = [Request(ids.tolist(), GREEDY, 20, text=False, ignore_eos=True) for ids in asked]
        expected = [alone(single, request)[0] for request in requests]
    with serving(engine) as service:
        for part in (slice(0, 4), slice(4, 8)):
            clients = [
                Client(service, ids.tolist(), max_tokens=20, marks=(len(ids) - 1,))
                for ids in asked[part]
            ]
            assert [client.wait().tokens for client in clients] == expected[part]
        assert all(client.last.usage.n_cached >= 199 for client in clients)


def test_passes_go_on_and_what_is_evicted_under_way_harms_nobody(
    engine: Engine, gate: threading.Event
) -> None:
    one, two = prompt(engine, 300), prompt(engine, 280, seed=1)
    saved(engine, 0, one)
    engine.prefixes.store.clear()
    saved(engine, 1, two)
    saved(engine, 0, one)  # nothing waits for the thread
    longer = [np.append(ids, (5, 6)) for ids in (one, two)]
    expected = [cold(engine, 2, ids) for ids in longer]
    gate.set()
    for ids, wanted in zip(longer, expected):
        np.testing.assert_array_equal(goes_on(engine, 0, ids, len(ids) - 2), wanted)
        engine.reset(0)


def test_an_engine_that_is_closed_meanwhile_waits(engine: Engine, gate: threading.Event) -> None:
    before = live_handles()
    saved(engine, 0, prompt(engine, 300))
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    engine.close()
    assert gate.is_set() and sum(live_handles().values()) < sum(before.values())
    timer.join()


def test_what_cannot_be_copied_is_dropped_and_said_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, other = prompt(engine, 300), prompt(engine, 290, seed=1)

    def fail(_: Event) -> None:
        if threading.current_thread().name.startswith("copies"):
            raise NativeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Event, "wait", fail)
        saved(engine, 0, ids)
        (node,) = engine.prefixes.store.tree.nodes()
        assert node.rows and node.states and not (node.rows.has_arrived or node.states.has_arrived)
        assert not node.states.is_finite
    assert engine.prefixes.resume(1, np.append(ids, 5)) == 0
    line = "a prompt is not kept, as copying it failed: the device is lost"
    assert [engine.drain_messages() for _ in range(2)] == [[line], []]
    saved(engine, 0, other)
    longer = np.append(other, 5)
    np.testing.assert_array_equal(goes_on(engine, 1, longer, 290), cold(engine, 0, longer))


def test_memory_is_pinned_when_copies_need_it_and_counts(engine: Engine) -> None:
    copies, store, ids = engine.copies.memory, engine.prefixes.store, prompt(engine, 300)
    list(engine.generate(ids, max_tokens=2, text=False, reuse=True))  # nothing is to be copied
    assert copies.pinned_bytes == engine.memory()["host_pinned_bytes"] == store.n_bytes == 0
    limit = store.limit()
    engine.reset(0)
    saved(engine, 0, ids)
    n_bytes = copies.pinned_bytes
    assert 0 < n_bytes <= 3 * tohost._BLOCK and n_bytes == engine.memory()["host_pinned_bytes"]
    assert store.n_bytes == store.tree.n_bytes + n_bytes and store.limit() <= limit - n_bytes


def test_blocks_keep_a_limit_and_one_is_enough(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, block = prompt(engine, 300), tohost._Block
    longer = np.append(ids, 5)
    wanted = cold(engine, 2, longer)
    monkeypatch.setattr(tohost, "_BLOCKS", 100)

    def refuse(_: Device) -> None:
        raise NativeError("no memory")

    for most, made in ((2 * tohost._BLOCK, block), (100 * tohost._BLOCK, refuse)):
        monkeypatch.setattr(tohost, "_Block", made)
        engine.copies.memory.limit_pinned(most)
        saved(engine, 0, ids)
        assert tohost._BLOCK <= engine.copies.memory.pinned_bytes <= 2 * tohost._BLOCK
        np.testing.assert_array_equal(goes_on(engine, 1, longer, 300), wanted)
        engine.reset(1)
        engine.prefixes.store.clear()


def test_without_memory_for_a_block_a_prompt_is_read_and_not_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(engine, 300)

    def refuse(_: Device) -> None:
        raise NativeError("no memory")

    monkeypatch.setattr(tohost, "_Block", refuse)
    list(engine.generate(ids, max_tokens=2, text=False, reuse=True, marks=(200,)))
    assert engine.held(0)[:300] == ids.tolist() and engine.prefixes.store.n_places == 0


class _Part:
    """A stage's state, of a device that is fine or lost; it has nothing to copy."""

    recurrent, caches, rings = (), (), {}

    def __init__(self, is_lost: bool) -> None:
        def synchronize() -> None:
            if is_lost:
                raise NativeError("the device is lost")

        can = SimpleNamespace(streams=True)
        self.device = SimpleNamespace(can=can, link=None, synchronize=synchronize)


def test_a_lost_device_does_not_keep_the_threads_of_others() -> None:
    copies = HostCopies(cast(KVPool, None))
    for is_lost in (False, True, False):
        copies.add(cast(State, _Part(is_lost)))
    threads = [to_host._thread for to_host in copies._to_host.values()]
    with pytest.raises(NativeError, match="lost"):
        copies.close()
    for pool in threads:
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(len, ())


def test_a_lost_device_keeps_no_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Device) -> None:
        raise NativeError("the device is lost")

    saved(engine, 0, prompt(engine, 300))
    with monkeypatch.context() as patch:
        patch.setattr(Device, "synchronize", fail)
        with pytest.raises(NativeError, match="lost"):
            engine.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("copies")]


def test_an_interrupt_at_any_line_loses_no_bits(engine: Engine) -> None:
    one, two = prompt(engine, 90), prompt(engine, 80, seed=1)
    longer = np.append(two, (5, 6))
    wanted, line, n_came = cold(engine, 2, longer), 0, 0

    def both() -> None:
        list(engine.generate(one, max_tokens=1, text=False, reuse=True, marks=(20, 70)))
        engine.reset(1)
        saved(engine, 1, two)

    while interrupted(line, both, "resident/tohost.py", "resident/hostcopies.py"):
        n_came += 1
        line += 5 + line // 8
        engine.reset(1)
        n = engine.prefixes.resume(0, longer)
        assert n in (0, 80)
        np.testing.assert_array_equal(engine.prefill(longer[n:], 0).require_logits()[-1], wanted)
        for seq in range(2):
            engine.reset(seq)
        engine.prefixes.store.clear()
    assert n_came > 15
