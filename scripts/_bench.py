"""Shared parts of the bench scripts: workers, time limits, raw lines, tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from _tools import ROOT as ROOT
from _tools import BuildError
from _tools import Parser as Parser

WORKER = Path(__file__).with_name("_bench_worker.py")
Line = dict[str, Any]
# Settings of "sampled" rows.
SAMPLING = {"temperature": 0.8, "seed": 1}


class BenchError(Exception):
    """The measurement cannot continue; the message is one line."""

    exit_code = 2


def bench_parser(about: str | None, samples: int = 0) -> Parser:
    """Return a command line with the options of all bench scripts; samples: the default, if any."""
    p = Parser(description=about)
    p.add_argument("model", type=model_path, help="a GGUF file, or a shipped model's name")
    p.add_argument("--device", default="auto", help="of moegraph")
    p.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines here")
    if samples:
        p.add_argument("--samples", type=positive, default=samples, metavar="N",
                       help="of each test, after one that is not counted")  # fmt: skip
    return p


def positive(text: str) -> int:
    """Read a whole number of 1 or more, for argparse."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def existing(text: str) -> Path:
    """Read a path that must exist, for argparse."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return Path(text).resolve()


def model_path(text: str) -> Path:
    """Read the path of a model file or the name of a shipped model, for argparse."""
    shipped = ROOT / "moegraph" / "models" / f"{text}.gguf"
    return shipped if shipped.is_file() and not Path(text).exists() else existing(text)


def _output(command: Sequence[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> Line:
    """Return the machine's properties on which the numbers depend."""
    gpu = _output(
        ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    )
    cpu = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "gpu": gpu.splitlines() or ["none"], "cpu": cpu, "n_cpus": os.cpu_count(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
    }  # fmt: skip


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout: from its file COMMIT, or from git."""
    note = folder / "COMMIT"
    if note.is_file():
        return note.read_text(encoding="ascii").strip()
    return _output(["git", "describe", "--always", "--dirty", "--abbrev=40"], folder) or "unknown"


def plain_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments with every path cut to its last part, because raw lines are published."""
    return [re.sub(r"[^=,\s]*/(?=[^/=,\s])", "", text) for text in arguments]


class Raw:
    """Appends raw lines to a file as they come, and keeps them for the table.

    The first line of a run describes machine and arguments; the others refer to it by `run`.
    """

    def __init__(self, bench: str, args: argparse.Namespace, **about: object) -> None:
        self._path: Path | None = args.out
        self.lines: list[Line] = []
        self.run = f"{bench}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        model = Path(args.model)
        self.add(
            "run", bench=bench, argv=plain_paths(sys.argv[1:]), commit=commit_of(ROOT),
            model=model.name, model_bytes=model.stat().st_size, machine=machine(), **about,
        )  # fmt: skip

    def add(self, kind: str, **fields: object) -> None:
        """Append one line."""
        line: Line = {"kind": kind, "run": self.run, "t": round(time.time(), 3), **fields}
        self.lines.append(line)
        append_line(self._path, line)

    def sample(
        self, setting: str, test: str, system: str, at: int, value: float, unit: str = "tok/s",
        **more: object,
    ) -> None:  # fmt: skip
        """Append one sample and print it. at: its number; sample 0 is not counted."""
        self.add(
            "sample", setting=setting, test=test, system=system, at=at, value=value, unit=unit,
            **more,
        )  # fmt: skip
        note = "" if at else "  (first, not counted)"
        print(f"{setting:>12} {test:<20} {system:<24} {value:10.2f} {unit}{note}",
              file=sys.stderr, flush=True)  # fmt: skip


# More frequent queries to the driver would disturb the timing; every test takes longer than this.
_INTERVAL_S = 0.25


class MemoryWatch:
    """Watches the peak of device memory in use, above the amount in use when it opened.

    The driver's figure includes CUDA contexts. Without an NVIDIA driver it is 0.
    """

    def __enter__(self) -> MemoryWatch:
        self._before = self._most = used_device_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._most = max(self._most, used_device_bytes())

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def n_bytes(self) -> int:
        """Return the peak in bytes."""
        return self._most - self._before


def used_device_bytes() -> int:
    """Return the memory in use on all GPUs, as the driver counts it; 0 without a driver.

    BENCH_GPU, the PCI address of one, leaves out the others, on which something else may run.
    """
    from moegraph.ggml.nvml import gpu_used_bytes

    used, only = gpu_used_bytes(), os.environ.get("BENCH_GPU")
    return used.get(only, 0) if only else sum(used.values())


def with_path(variable: str, folder: Path) -> dict[str, str]:
    """Return the environment in which a process looks into a folder first: PYTHONPATH, or such."""
    parts = [str(folder), os.environ.get(variable)]
    return {**os.environ, variable: os.pathsep.join(filter(None, parts))}


def with_libraries(program: Path) -> dict[str, str]:
    """Return the environment in which a program finds the libraries beside it."""
    return with_path("LD_LIBRARY_PATH", program.resolve().parent)


def last_words(errors: IO[bytes], n_lines: int = 1) -> str:
    """Return the last lines of a file that took what a process said."""
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-n_lines:])[-400:] or "it said nothing"


@dataclass
class Worker:
    """A process of _bench_worker.py; requests and replies go through pipes."""

    name: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def tell(self, do: str, **arguments: object) -> None:
        """Send a request; `hear` returns its reply."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def ask(self, do: str, **arguments: object) -> Line:
        """Send a request and return its reply."""
        self.tell(do, **arguments)
        return self.hear()

    def hear(self) -> Line:
        """Return the reply to the last request."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        reply: Line = json.loads(line)
        if not reply.pop("ok"):
            raise BenchError(f"{self.name}: {reply['error']}")
        return reply

    def end(self) -> None:
        """Have the process end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ended(self) -> BenchError:
        why = f"exit code {self.process.wait()}: {last_words(self.errors)}"
        return BenchError(f"{self.name}: the worker ended: {why}")


@dataclass(frozen=True)
class System:
    """A checkout, and variables of its environment."""

    name: str
    folder: Path
    env: dict[str, str]

    @classmethod
    def of(cls, text: str) -> System:
        """Read NAME=FOLDER[,VAR=VALUE...], for argparse."""
        name, _, rest = text.partition("=")
        folder, *settings = rest.split(",")
        if not (name and folder and Path(folder).is_dir() and all("=" in x for x in settings)):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not NAME=FOLDER[,VAR=VALUE...] of a folder that exists"
            )
        return cls(name, Path(folder).resolve(), dict(one.split("=", 1) for one in settings))


@contextmanager
def started(raw: Raw, system: System, under: Sequence[str] = ()) -> Iterator[Worker]:
    """Run a worker of a system; a raw line says what it is. under: a command that starts it."""
    name, folder = system.name, system.folder
    if not (folder / "moegraph" / "__init__.py").is_file():
        raise BenchError(f"{folder} has no folder moegraph; name a built checkout")
    env = {**with_path("PYTHONPATH", folder), **system.env}
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
        [*under, sys.executable, str(WORKER)], env=env, cwd="/", stderr=errors,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            worker = Worker(name, process, errors)
            about = worker.hear()  # first of all, it says what it is
            package = about.pop("package")
            if Path(package).parent != folder:
                raise BenchError(f"{name}: {package} was imported, not the package in {folder}")
            about["commit"] = about.get("commit") or commit_of(folder)
            left_out = ("libraries", "defaults")
            kept = {key: value for key, value in about.items() if key not in left_out}
            raw.add("system", system=name, folder=folder.name, **kept)
            yield worker
        finally:
            process.kill()


def json_line(line: Line) -> str:
    """Return a raw line as text."""
    return json.dumps(line) + "\n"


def append_line(path: Path | None, line: Line) -> None:
    """Append a raw line to a file; None: nowhere."""
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json_line(line))


def note(path: Path | None, line: Line) -> None:
    """Print a raw line, and append it to a file."""
    print(json_line(line), end="", flush=True)
    append_line(path, line)


def samples_by_key(lines: Iterable[Line]) -> dict[tuple[str, str, str], list[float]]:
    """Return the counted samples by (setting, test, system), in the order of the lines."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for line in lines:
        if line["kind"] == "sample" and line["at"]:
            key = line["setting"], line["test"], line["system"]
            found.setdefault(key, []).append(line["value"])
    return found


def times_better(values: Sequence[float], base: Sequence[float], unit: str) -> list[float]:
    """Return, for each sample, how many times faster than the base it is."""
    pairs = list(zip(values, base))
    return [b / a if unit in ("ms", "s") else a / b for a, b in pairs]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return 'median (least .. most)'."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def comparison(lines: Sequence[Line], base: str) -> str:
    """Return a table of all tests and systems, with speed relative to system `base`."""
    found, rows = samples_by_key(lines), []
    units = {(x["setting"], x["test"]): x["unit"] for x in lines if x["kind"] == "sample"}
    for (setting, test, system), values in found.items():
        unit, against = units[setting, test], found.get((setting, test, base))
        ratio = "-"
        if against and system != base:
            ratio = spread(times_better(values, against, unit), 3)
        shown = f"{spread(values, 3 if unit in ('ms', 's') else 1)} {unit}"
        rows.append([setting, test, system, str(len(values)), shown, ratio])
    head = ["setting", "test", "system", "samples", "median (least .. most)", f"times {base}"]
    return table(head, rows) if rows else ""


def finish(raw: Raw, base: str, measure: Callable[[], None]) -> None:
    """Measure, and print the table also if that fails."""
    try:
        measure()
    finally:
        print(comparison(raw.lines, base), end="", flush=True)


def main(parser: Parser, work: Callable[[argparse.Namespace], int | None]) -> int:
    """Do a script's work; an expected failure becomes one line and an exit code.

    work: returns the exit code; None is 0.
    """
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from moegraph.errors import MoegraphError

    try:
        return work(args) or 0
    except (BenchError, MoegraphError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    except BuildError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
