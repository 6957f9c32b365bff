"""Free memory of the host, as the system counts it (no native library)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..units import GiB

# Control groups, versions 2 and 1: the controller in a line of /proc/self/cgroup, the folder of all
# groups, the files of a group (limit, use, statistics), and the statistic that counts cached files.
_VERSIONS = (
    ("", "sys/fs/cgroup", ("memory.max", "memory.current", "memory.stat", "file")),
    (
        "memory", "sys/fs/cgroup/memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "cache"),
    ),
)  # fmt: skip


# The system cannot reclaim pinned memory. This much is left to other processes and the page cache
# of the model file, or an eighth of the memory of the machine or container if that is less.
_RESERVE = 2 * GiB
_RESERVE_SHARE = 8


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory; None if the system does not report them.

    available: memory that can be taken without swapping, within the limits of control groups.
    limit: the tightest limit of the process's control groups, None without a limit.
    """

    total: int | None
    available: int | None
    limit: int | None

    @property
    def reserve(self) -> int:
        """Bytes that copies of experts, and of beginnings of prompts, leave to others."""
        known = [n for n in (self.total, self.limit) if n is not None]
        return min([_RESERVE, *(n // _RESERVE_SHARE for n in known)])

    @property
    def spare(self) -> int | None:
        """Bytes that copies of experts may take, None if unknown."""
        return None if self.available is None else max(0, self.available - self.reserve)


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the memory of this machine from the files below root."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", system_text(root / "proc/meminfo"), re.M))
    total, available = (
        int(info[name]) * 1024 if name in info else None for name in ("MemTotal", "MemAvailable")
    )
    tightest = None
    for group, names in _groups(root):
        limit = _number(group / names[0])
        # version 1 reports "no limit" as a number larger than any machine's memory
        if limit is None or (total is not None and limit >= total):
            continue
        left = _left(group, limit, names)
        if left is None:
            continue
        tightest = limit if tightest is None else min(tightest, limit)
        available = left if available is None else min(left, available)
    return HostMemory(total, available, tightest)


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folders of this process's control groups, from its own to the outermost.

    In a container, the path is often that of the host and does not exist here; the outermost folder
    is then the container's group.
    """
    lines = re.findall(r"^\d+:([^:\n]*):/(.*)$", system_text(root / "proc/self/cgroup"), re.M)
    paths = {name: path for names, path in lines for name in names.split(",")}
    for controller, folder, names in _VERSIONS:
        own = Path(paths.get(controller, ""))
        for path in (own, *own.parents):
            yield root / folder / path, names


def _left(group: Path, limit: int, names: tuple[str, ...]) -> int | None:
    """Return the bytes that a control group may still take, None if unknown."""
    _, used_name, stat_name, cached_name = names
    used = _number(group / used_name)
    if used is None:
        return None
    stat = dict(re.findall(r"^(\w+) (\d+)$", system_text(group / stat_name), re.M))
    # cached files can be dropped, but not shared memory and tmpfs, which count as cached too
    cached = max(0, int(stat.get(cached_name, 0)) - int(stat.get("shmem", 0)))
    return max(0, limit - used + cached)


def _number(path: Path) -> int | None:
    text = system_text(path).strip()
    return int(text) if text.isdecimal() else None


def system_text(path: Path) -> str:
    """Return the text of one of the system's files; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
