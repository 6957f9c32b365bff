"""How far a token goes: the files and calls of a step, traced, and the page that follows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.walk import Walk, walking

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.engine.generation import Events
from moegraph.loop.loop import Loop
from moegraph.sampling import SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "docs/token.md"
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci("


def walks(until: Callable[..., Any], n_tokens: int, **settings: object) -> list[Walk]:
    """Return the walks of an answer whose threads are given, so that none are tried."""
    chosen = {"device": "cpu", "n_threads": 1, "poll": 0, "n_ctx": 512, **settings}
    with Engine.load("tiny", EngineConfig(**chosen)) as engine:
        events = engine.generate(PROMPT, SamplingParams(temperature=0.0), n_tokens, ignore_eos=True)
        with walking(until) as found:
            assert sum(1 for _ in events) == n_tokens
    return found.all


def median(found: list[Walk]) -> Walk:
    """Return the walk in the middle by its calls: some steps build a graph or begin a text."""
    return sorted(found, key=lambda walk: len(walk.calls))[len(found) // 2]


def test_a_greedy_token_passes_few_files_and_the_page_lists_them() -> None:
    walk = median(walks(Events.__next__, 12))
    assert len(walk.files) <= 22 and len(walk.calls) <= 90
    listed = re.search(r"passes these files, in this order:\n(.*?)\.\n\n", PAGE.read_text(), re.S)
    assert listed and re.findall(r"`([\w/.]+)`", listed[1]) == walk.files


def test_a_chat_request_passes_few_files_of_all_threads_and_the_page_says_how_many() -> None:
    program = [sys.executable, PAGE.parents[1] / "tests/helpers/walked_server.py"]
    env = {**os.environ, "PYTHONPATH": f"{PAGE.parents[1]}:{PAGE.parents[1] / 'tests'}"}
    files = json.loads(subprocess.run(program, env=env, capture_output=True, check=True).stdout)
    assert "loop/loop.py" in files and "server/openai_chat.py" in files
    most = re.search(r"chat request of `moegraph serve`, .*? at most (\d+) files", PAGE.read_text())
    assert most and len(files) <= int(most[1]) <= 60


def test_a_drafted_step_passes_few_files() -> None:
    """The controller plans anew in each of these steps; later, in every fourth."""
    walk = median(walks(Loop.step, 24, spec="dflash", draft_max=4))
    assert ("loop/decoding.py", "Decoding._verify") in walk.calls
    assert ("draft/controller.py", "Controller._plan") in walk.calls
    assert len(walk.files) <= 40 and len(walk.calls) <= 400
