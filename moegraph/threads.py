"""CPU threads: how many may run, and how they wait.

ggml's threads wait for each other after every node of a graph. A thread that arrives early spins
for a while and then sleeps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_THREADS = 512
# llama.cpp's default for --poll.
SPIN = 50
SLEEP = 0


class Threads(NamedTuple):
    """A way to compute: n threads with a poll level (0 to 100, as llama.cpp's --poll)."""

    n: int
    poll: int


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use, by its affinity and its control group."""
    allowed = len(affinity())
    quota = _cpu_quota(root / "sys/fs/cgroup")
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def default_threads() -> int:
    """Return the number of physical cores that this process may use, counted as llama.cpp does.

    Two threads on one core would share its vector units and make matrix products slower.
    """
    usable = usable_cpus()
    cores = _physical_cores()
    if not cores:
        cores = usable if usable <= 4 else usable // 2
    return max(1, min(cores, usable, MAX_THREADS))


def waiting(n_threads: int) -> int:
    """Return the poll level without measurement: SLEEP if there are more threads than CPUs."""
    return SPIN if n_threads <= usable_cpus() else SLEEP


def affinity() -> Sequence[int]:
    """Return the numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 4)


def _physical_cores() -> int:
    """Count the sets of thread siblings among the allowed CPUs; 0 without sysfs."""
    siblings = set()
    for cpu in affinity():
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings") as file:
                siblings.add(file.readline())
        except OSError:
            continue
    return len(siblings)


def _cpu_quota(folder: Path) -> float | None:
    """Return the CPUs that the control group (version 2 or 1) allows; None without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
        except OSError:
            continue
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            return int(words[0]) / int(words[1])
    return None
