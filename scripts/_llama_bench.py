"""llama-bench as the other side of a comparison: run as one block, its rows as they come."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from _bench import BenchError, Clock, Line, TimeUp, existing


def add_upstream(p: argparse.ArgumentParser) -> None:
    """Add the options that name llama-bench."""
    p.add_argument(
        "--llama-bench",
        type=existing,
        required=True,
        metavar="FILE",
        help="llama-bench of the unpatched llama.cpp, built with the same options",
    )
    p.add_argument("--lib-path", default="", help="more folders for its LD_LIBRARY_PATH")


# Asking the driver more often would disturb what is timed; every test takes longer than this.
_INTERVAL_S = 0.25


class MemoryWatch:
    """The most device memory in use while it is open, above what was in use when it opened.

    As the driver counts it, CUDA contexts included; 0 where there is no NVIDIA driver.
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
        """Bytes taken meanwhile."""
        return self._most - self._before


def used_device_bytes() -> int:
    """Return the memory in use on all GPUs, as the driver counts it; 0 without a driver."""
    from moegraph.ggml.nvml import used_bytes

    return sum(used_bytes().values())


class LlamaBench:
    """One way to call llama-bench."""

    def __init__(self, args: argparse.Namespace, clock: Clock) -> None:
        self._program: Path = args.llama_bench
        self._clock = clock
        place = ["-ngl", "0"] if args.device == "cpu" else ["-ngl", "99"]
        self._command = [str(self._program), "-m", str(args.model), "-fa", "1", "-o", "jsonl"]
        self._command += place
        known = os.environ.get("LD_LIBRARY_PATH", "")
        folders = (str(self._program.parent), args.lib_path, known)
        self._paths = os.pathsep.join(folder for folder in folders if folder)
        self.rss_bytes = self.device_bytes = 0

    def rows(
        self, options: Sequence[str], n_samples: int, **variables: str
    ) -> Iterator[tuple[float, Line]]:
        """Run it once with -r n_samples; yield (seconds since its start, row) as rows come.

        Afterwards rss_bytes and device_bytes hold its peaks of host and device memory.

        Raises:
            BenchError: it failed.
            TimeUp: the time limit came first; it is ended.
        """
        env = {**os.environ, "LD_LIBRARY_PATH": self._paths, **variables}
        command = [*self._command, "-r", str(n_samples), *options]
        with MemoryWatch() as watch, tempfile.TemporaryFile() as errors:
            begin = time.perf_counter()
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors)
            try:
                for line in self._lines(process):
                    yield time.perf_counter() - begin, json.loads(line)
            except BaseException:
                process.kill()
                raise
            finally:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                process.stdout.close()  # type: ignore[union-attr]
            self.rss_bytes = usage.ru_maxrss * 1024
            if process.returncode:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                raise BenchError(
                    f"llama-bench ended with exit code {process.returncode}: "
                    f"{said[-1] if said else 'it said nothing'}"
                )
        self.device_bytes = watch.n_bytes

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        out = process.stdout
        assert out is not None
        while True:
            if not select.select([out], [], [], self._clock.left())[0]:
                raise TimeUp
            line = out.readline()
            if not line:
                return
            if line.startswith(b"{"):
                yield line


def test_name(row: Line) -> str:
    """Return the name of a row's test: pp512, tg128 @ d8192, pp512+tg1."""
    parts = [("pp", row["n_prompt"]), ("tg", row["n_gen"])]
    name = "+".join(f"{kind}{n}" for kind, n in parts if n)
    return name + (f" @ d{row['n_depth']}" if row.get("n_depth") else "")


def settings_of(row: Line) -> Line:
    """Return what a row says of its settings, for the raw lines; samples and times left out."""
    left_out = {"model_filename", "test_time", "samples_ns", "samples_ts", "cpu_info", "gpu_info"}
    timed = ("avg_", "stddev_")
    return {k: v for k, v in row.items() if k not in left_out and not k.startswith(timed)}
