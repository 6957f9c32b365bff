"""How rows go from a device to the next: which way, and the order of what is enqueued."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moegraph.runner import boundary
from moegraph.runner.boundary import Boundary, is_direct

MIB = 1 << 20


class Fake:
    """A device that stands for a stream of its own; calls are recorded by the library."""

    def __init__(self, name: str, has_streams: bool = True) -> None:
        self.name = name
        self.can = SimpleNamespace(own_memory=has_streams, streams=has_streams)
        self.compute = SimpleNamespace(ptr=name)

    def can_wait_for(self, other: Fake) -> bool:
        return bool(self.can.streams and other.can.streams)

    def event(self) -> Any:
        return SimpleNamespace(ptr=f"event of {self.name}", close=bool, wait=bool)

    def host_buffer(self, size: int) -> Any:
        return SimpleNamespace(address=lambda at=0: f"host + {at // MIB}", close=bool)

    def buffer(self, size: int, what: str, remedy: str) -> Any:
        return SimpleNamespace(close=bool)

    def synchronize(self) -> None:
        pass


class Recorder:
    """A native library that notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name.removeprefix("ggml_backend_"), *args))

    def ggml_new_tensor_1d(self, *args: Any) -> str:
        return "between"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(boundary, "C", found)
    monkeypatch.setattr(boundary, "place", lambda *args: None)
    monkeypatch.delenv(boundary.PEERS, raising=False)
    return found


def test_rows_go_through_host_memory_unless_devices_may_read_each_other(
    library: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, cpu = Fake("cuda:0"), Fake("cuda:1"), Fake("cpu", False)
    pairs: list[tuple[Any, Any]] = [(a, b), (a, a), (a, cpu), (cpu, cpu)]
    assert [is_direct(*pair) for pair in pairs] == [False, True, False, False]
    lines = [Boundary(*pair).line() for pair in pairs]
    assert "pinned host memory; GGML_CUDA_P2P=1 avoids that" in lines[0]
    assert lines[1] == "cuda:0 to cuda:0: rows are copied directly"
    assert lines[2] == "cuda:0 to cpu: rows are copied through host memory"
    monkeypatch.setenv(boundary.PEERS, "1")
    assert [is_direct(*pair) for pair in pairs] == [True, True, False, False]


def test_the_order_of_a_copy_through_host_memory(library: Recorder) -> None:
    a, b, rows, to = Fake("cuda:0"), Fake("cuda:1"), "rows", "its rows"
    Boundary(a, b).copy(rows, to, 5 * MIB, 8)  # type: ignore[arg-type]
    first = [
        ("event_wait", "cuda:0", "event of cuda:1"),
        ("tensor_get_async", "cuda:0", "rows", "host + 0", 8, 4 * MIB),
        ("event_record", "event of cuda:0", "cuda:0"),
        ("event_wait", "cuda:1", "event of cuda:0"),
        ("tensor_set_async", "cuda:1", "its rows", "host + 0", 0, 4 * MIB),
        ("event_record", "event of cuda:1", "cuda:1"),
    ]
    assert library.calls[:6] == first
    assert library.calls[7] == ("tensor_get_async", "cuda:0", "rows", "host + 4", 8 + 4 * MIB, MIB)


def test_the_order_of_a_direct_copy(library: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device may still read its rows: so they are overwritten on its own stream."""
    monkeypatch.setenv(boundary.PEERS, "1")
    a, b, rows, to = Fake("cuda:0"), Fake("cuda:1"), "rows", "its rows"
    Boundary(a, b).copy(rows, to, 5 * MIB, 0, 16)  # type: ignore[arg-type]
    assert library.calls[:4] == [
        ("event_wait", "cuda:0", "event of cuda:1"),
        ("mg_copy_across", "cuda:0", "cuda:1", "rows", 0, "between", 0, 4 * MIB),
        ("mg_copy_bytes", "cuda:1", "between", 0, "its rows", 16, 4 * MIB),
        ("event_record", "event of cuda:1", "cuda:1"),
    ]
    assert library.calls[5][-3:] == ("between", 4 * MIB, MIB)
