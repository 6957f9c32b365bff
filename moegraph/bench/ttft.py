"""Time to the first token of `moegraph run`, from the start of its process.

Each repetition is a process of its own, so it has nothing that an earlier one prepared, except that
the model file is in the page cache from the first one on.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import EngineConfig, settings
from ..errors import MoegraphError, NativeError

# Parts of the time to the first token: the interpreter and our modules until the command line is
# read; the model; the tokenizer; the prompt and the first token. What is left is `other`.
PHASES = ("process", "load", "tokenizer", "prefill")


@dataclass(frozen=True)
class TtftRow:
    """Times to the first token with a prompt of n_prompt random tokens.

    seconds: of each repetition. phases: the mean of each, in seconds. load: the same for the phases
    of loading. report: what the last process printed with --json.
    """

    n_prompt: int
    seconds: tuple[float, ...]
    phases: dict[str, float]
    load: dict[str, float]
    report: dict[str, Any]

    @property
    def test(self) -> str:
        """Name of the test, such as ttft512."""
        return f"ttft{self.n_prompt}"


def run_ttft(
    model: Path,
    n_vocab: int,
    config: EngineConfig,
    n_prompt: Sequence[int],
    repetitions: int,
    warm_up: bool = True,
    seed: int = 1,
) -> Iterator[TtftRow]:
    """Yield a row for each prompt length; arguments as in `BenchSpec`."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="moegraph-") as folder:
        for n in n_prompt:
            prompt = Path(folder) / "prompt"
            rng.integers(0, n_vocab, n, dtype=np.int32).astype("<i4").tofile(prompt)
            command = _command(model, config, prompt)
            if warm_up:
                _first_token(command)
            yield _row(n, [_first_token(command) for _ in range(repetitions)])


def _command(model: Path, config: EngineConfig, prompt: Path) -> list[str]:
    """Return the command line of a process with these settings."""
    command = [sys.executable, "-m", "moegraph", "run", str(model), str(prompt), "1"]
    command += [str(prompt.with_name("out")), "--json"]
    for setting in settings():
        value = getattr(config, setting.name)
        if not setting.flags or value == setting.default or setting.name == "cache_ram":
            continue
        # one word, because a value may begin with a dash
        command.append(setting.flags[-1] + ("" if setting.kind == "flag" else f"={value}"))
    return command


def _first_token(command: Sequence[str]) -> dict[str, Any]:
    """Run a process; return its report."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        error = MoegraphError(f"a process to be timed failed: {lines[-1].removeprefix('error: ')}")
        error.exit_code = done.returncode
        raise error
    report: dict[str, Any] = json.loads(done.stdout)
    if report["timings"]["first_token_s"] is None:
        raise NativeError("this system does not tell when a process started (/proc/self/stat)")
    return report


def _row(n_prompt: int, reports: Sequence[dict[str, Any]]) -> TtftRow:
    times = [report["timings"] for report in reports]
    seconds = tuple(found["first_token_s"] for found in times)
    phases = {name: statistics.fmean(found[f"{name}_s"] for found in times) for name in PHASES}
    phases["other"] = statistics.fmean(seconds) - sum(phases.values())
    load = {
        name: statistics.fmean(found["load"][name] for found in times) for name in times[0]["load"]
    }
    return TtftRow(n_prompt, seconds, phases, load, reports[-1])
