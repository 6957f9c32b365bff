"""How many CPUs other programs take, from the kernel's counts; and that it is unknown elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moegraph.cpuload import CpuLoad, parse

# /proc/stat of a Linux 6.18 machine with two CPUs, and of a 2.4 kernel with one
MODERN = b"""\
cpu  399938 955234 160244 859567 1637 0 843 1348 70 0
cpu0 180963 475778 75383 456071 380 0 105 670 40 0
cpu1 218975 479455 84860 403495 1256 0 737 678 30 0
intr 18937814 0 0 0
ctxt 154465934
"""
OLD = b"cpu  10 20 30 40\ncpu0 10 20 30 40\n"


def test_the_ticks_of_each_cpu_are_read() -> None:
    assert parse(MODERN) == {0: (456451, 1189350), 1: (404751, 1189456)}
    assert parse(OLD) == {0: (40, 100)}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\n", b"ctxt 5\ncpu0 1 2 3 4\n", b"cpu 1 2 3 4 5\n", b"cpu0 1 2 3\n",
        b"cpu0 1 2 3 x 5\n", b"cpu0 1 2 -3 4 5\n", b"cpux 1 2 3 4 5\n", b"\xff\x00 1 2 3 4\n",
    ],
)  # fmt: skip
def test_an_odd_file_has_no_cpus(text: bytes) -> None:
    assert parse(text) == {}


class Host:
    """A machine whose /proc/stat counts idle ticks, and the clocks of a process on it."""

    def __init__(self, folder: Path, n_cpus: int = 4) -> None:
        self.stat = folder / "stat"
        self.now = self.own = 0.0
        self.idle = [0.0] * n_cpus
        self.write()
        self.load = CpuLoad(self.stat, self.clock, lambda: self.own)

    def clock(self) -> float:
        return self.now

    def write(self) -> None:
        rows = [f"cpu{at} {round((self.now - idle) * 100)} 0 0 {round(idle * 100)} 0 0 0 0 0 0"
                for at, idle in enumerate(self.idle)]  # fmt: skip
        self.stat.write_text("\n".join(["cpu  0 0 0 0", *rows, "intr 5"]) + "\n")

    def passes(self, seconds: float, busy: list[float], own: float) -> None:
        """Let time pass; busy: the busy share of each CPU; own: CPUs that this process used."""
        self.now += seconds
        self.own += own * seconds
        self.idle = [idle + (1 - b) * seconds for idle, b in zip(self.idle, busy, strict=True)]
        self.write()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2}, raising=False)
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("busy", "own", "taken", "free"),
    [
        ([1, 0, 0, 1], 0.0, 0.0, 2),  # the others' CPUs do not count
        ([0, 1, 1, 0], 2.0, 0.0, 2),  # all of it is this process
        ([0, 1, 1, 0], 1.0, 1.0, 1),
        ([0, 1, 1, 0], 1.5, 0.5, 1),  # it shares one of them
        ([0, 1, 1, 0], 0.67, 1.33, 1),
        ([0, 1, 1, 0], 0.0, 2.0, 1),
        ([0, 0.6, 0.6, 0], 1.0, 0.2, 2),
        ([0, 0.4, 0, 0], 1.0, 0.0, 2),  # the counts lag behind
    ],
)
def test_what_this_process_did_not_use_is_taken(
    host: Host, busy: list[float], own: float, taken: float, free: int
) -> None:
    assert (host.load.taken(), host.load.free()) == (None, None), "nobody has looked twice"
    host.passes(1.0, busy, own)
    assert host.load.taken() == pytest.approx(taken, abs=0.02)
    assert host.load.free() == free


@pytest.mark.parametrize("text", [None, "", "secret\n"])
def test_without_the_file_the_load_is_unknown(tmp_path: Path, text: str | None) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    now = 0.0
    load = CpuLoad(stat, lambda: now, lambda: 0.0)
    now = 5.0
    assert (load.taken(), load.free()) == (None, None)
