"""How many CPUs there are to use, and which threads a pass has beside other programs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moegraph.config import EngineConfig
from moegraph.cpuload import LOAD
from moegraph.passes.cputhreads import CpuThreads
from moegraph.threads import SLEEP, SPIN, Threads, usable_cpus, waiting


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2), ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 64), ({}, 64), ({"cpu.max": ""}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)  # fmt: skip
def test_the_quota_of_a_control_group_limits_the_cpus(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cpus(tmp_path) == expected


def test_more_threads_than_cpus_sleep_while_they_wait() -> None:
    assert waiting(usable_cpus()) == SPIN
    assert waiting(usable_cpus() + 1) == SLEEP


@pytest.mark.parametrize(
    ("given", "free", "expected"),
    [
        ({}, 4, {1: (4, SPIN), 8: (4, SPIN), 9: (4, SPIN)}),
        ({}, None, {1: (4, SPIN), 9: (4, SPIN)}),
        ({}, 3, {1: (3, SPIN), 8: (3, SPIN), 9: (4, SLEEP)}),
        ({"n_threads": 4}, 3, {1: (4, SLEEP), 9: (4, SLEEP)}),
        ({"n_threads_batch": 2}, 3, {1: (3, SPIN), 2: (2, SPIN)}),
        ({"poll": 10}, 1, {1: (4, 10), 9: (4, 10)}),
    ],
)
def test_no_thread_waits_for_another_program(
    given: dict[str, int], free: int | None, expected: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    used: list[Threads] = []
    can = SimpleNamespace(cpu_threads=True)
    device: Any = SimpleNamespace(n_threads=4, can=can, use_threads=used.append)
    monkeypatch.setattr(LOAD, "free", lambda: free)
    monkeypatch.setattr("moegraph.passes.cputhreads.waiting", lambda n: SPIN)
    threads = CpuThreads([device], EngineConfig(**given))
    for n_rows, found in expected.items():
        threads.begin(n_rows)
        assert used.pop() == found
