"""Host memory that a loaded model takes, as the system counts it, against what was said.

The CPU device passes for one with memory of its own that pins what it is given. Its slots are host
memory here too, so few of the experts get one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moegraph.units import MiB

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from modelgen.build import write_model
from modelgen.presets import PRESETS

# What a process takes beside what it says: threads, graphs, Python's own.
SLACK = 16 * MiB
CHILD = """
import dataclasses, json, sys, threading
from pathlib import Path
import numpy as np
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml import device as device_module
from moegraph.ggml.free_memory import HostMemory
from moegraph.resident import store, weights

path, pin, spare = sys.argv[1], sys.argv[2], int(sys.argv[3])
real, host_buffer = device_module.Capabilities.of, device_module.Device.host_buffer
device_module.Capabilities.of = lambda dev: dataclasses.replace(real(dev), own_memory=True)
device_module.Device.pin = lambda self, memory: None
device_module.Device.host_buffer = lambda self, size, must_pin=False: host_buffer(self, size)
weights.PIECE_BYTES = 1 << 18


def taken():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


most, ended = 0, threading.Event()


def watch():
    global most
    while not ended.wait(0.001):
        most = max(most, taken())


def config(**settings):
    return EngineConfig(device="cpu", n_threads=1, n_ctx=512, n_ubatch=64, pin_layers=0,
                        cache_slots=32, miss="stream", profile="none", **settings)


with Engine.load(path, config(host_pin="none")) as engine:  # what the process needs once
    engine.prefill(np.arange(100, dtype=np.int32))
before = taken()
reserve = HostMemory(1 << 40, 1 << 40, None).reserve
given = []  # what may be taken, each time that it is looked at


def host_memory():
    given.append(max(0, before + spare - taken()))
    return HostMemory(1 << 40, given[-1] + reserve, None)


store.host_memory = host_memory
thread = threading.Thread(target=watch)
thread.start()
with Engine.load(path, config(host_pin=pin)) as engine:
    for n in (100, 1, 200, 30):
        engine.reset()
        engine.prefill(np.arange(n, dtype=np.int32))
        for token in range(8):
            engine.forward(token, greedy=True)
    ended.set()
    thread.join()
    most = max(most, taken())
    said = engine.memory()
    print(json.dumps({
        "grown": most - before, "given": given[0] if given else spare,
        "planned": engine.plan.host_bytes, "pinned": said["host_pinned_bytes"],
        "device": sum(said[f"{part}_bytes"] for part in ("weights", "kv", "state", "compute")),
    }))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose experts take most of its 210 MB."""
    shape = replace(PRESETS["legacy32"].shape, n_embd=512, n_ff_exp=1024, n_layer=4)
    return write_model(tmp_path_factory.mktemp("host") / "wide.gguf", shape, "all=Q8_0", seed=3)[0]


def measured(path: Path, pin: str, spare: int) -> dict[str, Any]:
    """Load the model in a process of its own, and send it requests."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), pin, str(spare)], cwd=ROOT, check=True,
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("pin", "spare", "share"),  # 236 MiB: not enough for all, so a cache
    [("auto", 1 << 30, (1.0, 1.0)), ("auto", 236 * MiB, (0.4, 0.8)), ("none", 1 << 30, (0.0, 0.3))],
)
def test_a_model_takes_the_host_memory_that_was_said(
    path: Path, pin: str, spare: int, share: tuple[float, float]
) -> None:
    found = measured(path, pin, spare)
    assert found["planned"] > 180 * MiB
    assert share[0] <= found["pinned"] / found["planned"] <= share[1]
    assert found["pinned"] <= found["given"], "less than the margin is left"
    taken = found["grown"] - found["device"]
    assert taken <= found["pinned"] + SLACK, "more was taken than was said"
    assert taken >= found["pinned"] - SLACK, "it is not there"
