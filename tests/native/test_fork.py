"""How processes end that hold engines: forked ones, and those that close nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ENGINE = """
import os, sys
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml import device
from moegraph.ggml.handles import live_handles

class Dead:
    def __getattr__(self, name):
        raise AssertionError("the child asked the device: " + name)

config = EngineConfig(device="cpu", n_threads=2, n_ctx=256, cache_slots=30, miss="cpu")
with Engine.load(sys.argv[1], config) as engine:
    def tokens():
        return [e.token for e in engine.generate([1, 2, 3], max_tokens=4, text=False)]
    expected = tokens()
    if os.fork() == 0:
        device.C = Dead()
        engine.close()
        assert live_handles() == {}, live_handles()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert tokens() == expected
"""

CHILD_COMPUTES = """
import os, sys
from moegraph import Engine, EngineConfig
from moegraph.errors import RequestError

engine = Engine.load(sys.argv[1], EngineConfig(device="cpu", n_threads=2, n_ctx=256))
if os.fork() == 0:
    for call in (lambda: engine.forward([1]), lambda: list(engine.generate([1], text=False))):
        try:
            call()
        except RequestError as error:
            assert "fork" in str(error)
        else:
            sys.exit(1)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
engine.forward([1])
engine.close()
"""

UNFINISHED = """
import os, sys
from moegraph.config import EngineConfig
from moegraph.engine import Engine

config = EngineConfig(device="cpu", n_threads=2, n_ctx=256)
engine = Engine.load(sys.argv[1], config)
stream = engine.generate([1, 2, 3], max_tokens=40, text=False)
first = next(stream).token
if os.fork() == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
next(stream)
"""


def run(script: str, argument: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", script, argument]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_engine_is_closed_in_the_child_and_goes_on_in_the_parent(model_path) -> None:
    run(ENGINE, str(model_path("legacy32")))


def test_a_process_may_end_in_the_middle_of_an_answer(model_path) -> None:
    run(UNFINISHED, str(model_path("legacy32")))


def test_a_forked_child_is_refused_and_does_not_wait_for_threads_it_lacks(model_path) -> None:
    run(CHILD_COMPUTES, str(model_path("legacy32")))
