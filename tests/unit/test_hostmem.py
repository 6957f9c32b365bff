"""Memory of machine and container, from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.ggml.free_memory import HostMemory, host_memory
from moegraph.units import GiB

MEMINFO = f"MemTotal: {16 * GiB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GiB // 1024} kB\n"
V2, V1 = "sys/fs/cgroup/memory.", "sys/fs/cgroup/memory/memory."


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, HostMemory(16 * GiB, 12 * GiB, None)),
        ({V2 + "max": "max\n", V2 + "current": "5"}, HostMemory(16 * GiB, 12 * GiB, None)),
        (
            {V2 + "max": 4 * GiB, V2 + "current": 3 * GiB, V2 + "stat": f"anon 1\nfile {GiB}\n"},
            HostMemory(16 * GiB, 2 * GiB, 4 * GiB),
        ),
        (
            {V1 + "limit_in_bytes": 4 * GiB, V1 + "usage_in_bytes": 3 * GiB,
             V1 + "stat": f"cache {2 * GiB}\n"},
            HostMemory(16 * GiB, 3 * GiB, 4 * GiB),
        ),
        (
            {V2 + "max": 4 * GiB, V2 + "current": 3 * GiB,
             V2 + "stat": f"file {2 * GiB}\nshmem {GiB}\nshmem_thp 7\n"},
            HostMemory(16 * GiB, 2 * GiB, 4 * GiB),
        ),
        (
            {V1 + "limit_in_bytes": 4 * GiB, V1 + "usage_in_bytes": 3 * GiB,
             V1 + "stat": f"cache {2 * GiB}\nshmem {2 * GiB}\ntotal_shmem 7\n"},
            HostMemory(16 * GiB, GiB, 4 * GiB),
        ),
        (
            {V1 + "limit_in_bytes": 2**63 - 4096, V1 + "usage_in_bytes": GiB},
            HostMemory(16 * GiB, 12 * GiB, None),
        ),
        (  # systemd-run -p MemoryMax=4G: a group inside others, of which another is tighter
            {"proc/self/cgroup": "0::/system.slice/run.scope\n",
             V2[:-7] + "system.slice/run.scope/memory.max": 4 * GiB,
             V2[:-7] + "system.slice/run.scope/memory.current": GiB,
             V2[:-7] + "system.slice/memory.max": 8 * GiB,
             V2[:-7] + "system.slice/memory.current": 6 * GiB},
            HostMemory(16 * GiB, 2 * GiB, 4 * GiB),
        ),
        (  # a container that sees the host's name of its group, but not the host's folders
            {"proc/self/cgroup": "4:cpu,memory:/docker/abc\n0::/docker/abc\n",
             V1 + "limit_in_bytes": 4 * GiB, V1 + "usage_in_bytes": 3 * GiB},
            HostMemory(16 * GiB, GiB, 4 * GiB),
        ),
        (
            {"proc/self/cgroup": "4:cpu,memory:/a\n0::/\n",
             V1[:-7] + "a/memory.limit_in_bytes": 2 * GiB,
             V1[:-7] + "a/memory.usage_in_bytes": GiB},
            HostMemory(16 * GiB, GiB, 2 * GiB),
        ),
        ({V2 + "max": 15 * GiB, V2 + "current": 0}, HostMemory(16 * GiB, 12 * GiB, 15 * GiB)),
    ],
)  # fmt: skip
def test_the_tighter_limit_counts(
    tmp_path: Path, files: dict[str, object], expected: HostMemory
) -> None:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(text))
    assert host_memory(tmp_path) == expected


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == HostMemory(None, None, None)
