"""A worker's CPU threads: what other programs take is left to them."""

from __future__ import annotations

from contextlib import closing

import pytest

from moegraph.cpuload import LOAD
from moegraph.ggml.device import Device
from moegraph.threads import Threads
from moegraph.worker.child import leave_busy_cpus


@pytest.mark.parametrize(("free", "n"), [(1, 1), (2, 2), (3, 3), (8, 3), (None, 3)])
def test_a_worker_uses_the_cpus_that_others_leave(
    monkeypatch: pytest.MonkeyPatch, free: int | None, n: int
) -> None:
    monkeypatch.setattr(LOAD, "free", lambda: free)
    with closing(Device("cpu", 3)) as device:
        leave_busy_cpus([device])
        used: Threads = next(reversed(device._pools))
        assert used.n == n
