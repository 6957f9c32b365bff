"""Run llama-bench as the other side of a comparison and read its rows as they come."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from _bench import BenchError, Clock, Line, Raw, TimeUp, existing


def add_upstream(p: argparse.ArgumentParser) -> None:
    """Add the options that name llama-bench."""
    p.add_argument(
        "--llama-bench",
        type=existing,
        required=True,
        metavar="FILE",
        help="llama-bench of unpatched llama.cpp, built with the same options",
    )
    p.add_argument("--lib-path", default="", help="folders to add to its LD_LIBRARY_PATH")


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

    def block(self, raw: Raw, setting: str, options: Sequence[str], n_samples: int) -> None:
        """Run llama-bench with one sample more, which does not count; append samples and memory."""
        for row in self.rows(options, n_samples + 1):
            raw.add("upstream", setting=setting, system="upstream", flags=options,
                    row=settings_of(row))  # fmt: skip
            for at, tps in enumerate(row["samples_ts"]):
                raw.sample(setting, test_name(row), "upstream", at, tps)
        peak = self.device_bytes
        raw.add("memory", setting=setting, system="upstream", VmHWM=self.rss_bytes,
                device_peak_bytes=peak, device_driver_bytes=peak)  # fmt: skip

    def rows(self, options: Sequence[str], n_samples: int) -> Iterator[Line]:
        """Run llama-bench once with -r n_samples; yield its rows.

        Afterwards rss_bytes and device_bytes hold its peaks of host and device memory.

        Raises:
            BenchError: llama-bench failed.
            TimeUp: the time limit was reached; llama-bench is ended.
        """
        env = {**os.environ, "LD_LIBRARY_PATH": self._paths}
        command = [*self._command, "-r", str(n_samples), *options]
        with MemoryWatch() as watch, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors)
            try:
                for line in self._lines(process):
                    yield json.loads(line)
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
    """Return the settings in a row, without samples and times, for the raw lines."""
    left_out = {"model_filename", "test_time", "samples_ns", "samples_ts", "cpu_info", "gpu_info"}
    timed = ("avg_", "stddev_")
    return {k: v for k, v in row.items() if k not in left_out and not k.startswith(timed)}
