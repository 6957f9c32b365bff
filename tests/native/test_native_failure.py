"""What fails inside ggml cannot be caught: the process ends with status 4 and one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SETUP = """
import numpy as np
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, I64, Builder
from moegraph.graphs.cache import GraphCache
from moegraph.ggml.memory import place
device = Device("cpu", n_threads={n_threads})
"""
# A shape that our own checks would refuse: ggml asserts while the graph is built.
_BUILDING = """
def build(b):
    return C.ggml_get_rows(b.ctx, b.leaf(F32, (4, 4), "a"), b.leaf(F32, (2,), "ids"))
GraphCache(device).get("bad", 8, build)
"""
# A row that is not there: ggml asserts while it computes.
_COMPUTING = """
memory = device.buffer(4096, "operands", "free memory")
C.ggml_backend_buffer_clear(memory.ptr, 0x7F)
def build(b):
    leaves = b.leaf(F32, (4, 4), "dst"), b.leaf(F32, (4, 2), "rows"), b.leaf(I64, (2,), "ids")
    for at, leaf in enumerate(leaves):
        place(memory, leaf, 1024 * at)
    return b.expand(b.set_rows(*leaves))
graph = GraphCache(device).get("bad", 8, build).graph
C.mg_launch(device.compute.ptr, graph, ffi.NULL, 0)
"""


@pytest.mark.parametrize(
    ("failure", "n_threads"), [(_BUILDING, 1), (_COMPUTING, 3)], ids=["building", "computing"]
)
def test_a_failure_inside_ggml_ends_with_status_4_and_one_line(failure: str, n_threads: int):
    script = _SETUP.format(n_threads=n_threads) + failure + "print('went on')\n"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (4, ""), run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("moegraph: native failure: ")
    assert "GGML_ASSERT" in lines[0]
