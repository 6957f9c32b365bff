"""How much memory this process can still take on the host: of the machine and of its container."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Control groups, version 2 and 1: the controllers in a line of /proc/self/cgroup, the folder of all
# groups, and a group's limit, use, statistics and the statistic that counts cached files.
_VERSIONS = (
    ("", "sys/fs/cgroup", ("memory.max", "memory.current", "memory.stat", "file")),
    (
        "memory", "sys/fs/cgroup/memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "cache"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class HostMemory:
    """Bytes of memory; None where the system does not tell.

    available: what can be taken without swapping, the limits of control groups included.
    limit: the tightest of the process's control groups, None without one.
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
    tightest = None
    for group, names in _groups(root):
        limit, left = _room(group, names)
        # version 1 writes "no limit" as a number larger than any machine's memory
        if limit is None or left is None or (total is not None and limit >= total):
            continue
        tightest = limit if tightest is None else min(tightest, limit)
        available = left if available is None else min(left, available)
    return HostMemory(total, available, tightest)


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folders of this process's control groups, from its own to the outermost.

    In a container, the path of the group is often that of the host and not to be found here; the
    outermost folder is then the container's.
    """
    lines = re.findall(r"^\d+:([^:\n]*):/(.*)$", _read(root / "proc/self/cgroup"), re.M)
    paths = {name: path for names, path in lines for name in names.split(",")}
    for controller, folder, names in _VERSIONS:
        own = Path(paths.get(controller, ""))
        for path in (own, *own.parents):
            yield root / folder / path, names


def _room(group: Path, names: tuple[str, ...]) -> tuple[int | None, int | None]:
    """Return the limit of a control group and the bytes that it leaves; None where not known."""
    limit_name, used_name, stat_name, cached_name = names
    limit, used = _number(group / limit_name), _number(group / used_name)
    if limit is None or used is None:
        return limit, None
    stat = dict(re.findall(r"^(\w+) (\d+)$", _read(group / stat_name), re.M))
    # shared memory, of tmpfs too, counts as cached, but there is no file to read it again from
    cached = max(0, int(stat.get(cached_name, 0)) - int(stat.get("shmem", 0)))
    return limit, max(0, limit - used + cached)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
