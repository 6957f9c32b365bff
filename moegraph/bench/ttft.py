"""Time to the first token of `moegraph run`, from the start of its process.

Each repetition is a process of its own, so it has nothing that an earlier one prepared, except that
the model file is in the page cache from the first one on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..config import EngineConfig, settings
from ..errors import MoegraphError, NativeError
from .measure import BenchSpec

# Parts of the time to the first token: the interpreter and our modules until the command line is
# read; the model; the tokenizer; the prompt and the first token. What is left is `other`.
PHASES = ("process", "load", "tokenizer", "prefill")


def run_ttft(
    model: Path, n_vocab: int, config: EngineConfig, spec: BenchSpec
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield each prompt length of a spec, and what each repetition printed with --json."""
    rng = np.random.default_rng(spec.seed)
    with tempfile.TemporaryDirectory(prefix="moegraph-") as folder:
        for n in spec.n_prompt:
            prompt = Path(folder) / "prompt"
            rng.integers(0, n_vocab, n, dtype=np.int32).astype("<i4").tofile(prompt)
            command = _command(model, config, prompt)
            if spec.warm_up:
                _first_token(command)
            yield n, [_first_token(command) for _ in range(spec.repetitions)]


def _command(model: Path, config: EngineConfig, prompt: Path) -> list[str]:
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
