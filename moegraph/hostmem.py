"""How much memory this process can still take on the host: of the machine and of its container."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Limit, use and statistics of a control group as a container sees its own: version 2, then 1.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "cache"),
)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of memory; None where the system does not tell.

    available: what can be taken without swapping, the control group's limit included.
    limit: of the control group, None without one.
    """

    total: int | None
    available: int | None
    limit: int | None


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the memory of the machine below a root folder."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.M))
    total, available = (
        int(info[name]) * 1024 if name in info else None for name in ("MemTotal", "MemAvailable")
    )
    for limit_name, used_name, stat_name, cached_name in _GROUPS:
        folder = root / "sys/fs/cgroup"
        limit, used = (_number(folder / name) for name in (limit_name, used_name))
        # version 1 writes "no limit" as a number larger than any machine's memory
        if limit is None or used is None or (total is not None and limit >= total):
            continue
        stat = dict(re.findall(r"^(\w+) (\d+)$", _read(folder / stat_name), re.M))
        # shared memory, of tmpfs too, counts as cached, but there is no file to read it again from
        cached = max(0, int(stat.get(cached_name, 0)) - int(stat.get("shmem", 0)))
        left = max(0, limit - used + cached)
        return HostMemory(total, left if available is None else min(left, available), limit)
    return HostMemory(total, available, None)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
