"""Drafts and requests over several devices: text and acceptance are those of one device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.shared import prompt

from moegraph.config import EngineConfig
from moegraph.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
Open = Callable[..., Engine]
TWO, THREE = "cpu,cpu", "cpu,cpu,cpu"
PARTIAL = {"cache_slots": 60, "pin_layers": 0, "deterministic": True, "miss": "stream"}
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n" * 8


def drafted(device: str, **settings: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens of two answers of the shipped model, and what was drafted."""
    config = EngineConfig(device=device, n_threads=1, n_ctx=512, n_ubatch=64, **settings)
    with Engine.load("tiny", config) as engine:
        ids, tokens = engine.tokenizer.encode(PROMPT), list[int]()
        for n in (len(ids), 9):
            tokens += [e.token for e in engine.generate(ids[:n], max_tokens=20, reuse=True)]
        stats = engine.spec_stats()
        assert stats
        report = stats.report()
        return tokens, {k: report[k] for k in ("steps", "drafted", "accepted")}


@pytest.mark.parametrize(
    ("device", "settings"),
    [(TWO, {}), (THREE, {"ddtree": True}), (THREE, PARTIAL), (TWO, {**PARTIAL, "host_pin": "all"})],
    ids=["chain", "tree", "stream", "fetch"],
)
def test_a_drafter_reads_hidden_states_of_all_stages(device: str, settings: dict[str, Any]) -> None:
    settings = {"spec": "dflash", "cpu_reference": True, "deterministic": True, **settings}
    # so many rows in each pass; otherwise it goes by measured times
    settings = {"budget": 6, **settings}
    got, wanted = drafted(device, **settings), drafted("cpu", **settings)
    assert got == wanted and wanted[1]["accepted"] > 5
    plain = {k: v for k, v in settings.items() if k not in ("spec", "ddtree", "budget")}
    config = EngineConfig(device=device, n_threads=1, n_ctx=512, n_ubatch=64, **plain)
    with Engine.load("tiny", config) as engine:
        ids = engine.tokenizer.encode(PROMPT)
        assert [e.token for e in engine.generate(ids, max_tokens=20)] == got[0][:20]


@pytest.mark.parametrize("settings", [{}, PARTIAL], ids=["whole", "stream"])
def test_the_mtp_block_drafts_where_the_last_layer_is(
    open_engine: Open, settings: dict[str, Any]
) -> None:
    found = []
    for device in ("cpu", TWO):
        chosen = {"spec": "mtp", "budget": 4, "cpu_reference": True, **settings}
        engine = open_engine("mini35b", device=device, **chosen)
        ids = prompt(engine, 130)
        tokens = [
            e.token
            for n in (130, 7)
            for e in engine.generate(ids[:n], max_tokens=12, text=False, ignore_eos=True)
        ]
        stats = engine.spec_stats()
        assert stats
        found.append((tokens, stats.report()["drafted"], stats.report()["accepted"]))
    assert found[0] == found[1] and found[0][1] > 0


def test_the_program_runs_on_two_devices() -> None:
    def run(device: str, *more: str) -> dict[str, Any]:
        line = [sys.executable, "-m", "moegraph", "run", "tiny", "-p", "def f(x):", "-n", "8"]
        line += ["--temp", "0", "-t", "1", "--json", "--device", device, *more]
        done = subprocess.run(line, capture_output=True, check=True, cwd=ROOT, timeout=120)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    one, two = run("cpu"), run(TWO, "-ts", "3,1")
    assert one["tokens"] == two["tokens"]
    assert two["config"]["device"] == TWO
    done = subprocess.run(
        [sys.executable, "-m", "moegraph", "run", "tiny", "-p", "x", "--device", "cpu,cuda:77"],
        capture_output=True, check=False, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and b"no device 'cuda:77'" in done.stderr
    assert done.stderr.count(b"\n") == 1
