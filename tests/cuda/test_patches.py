"""Each patch of the CUDA side, seen from outside: patches/README.md names these tests."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moegraph.ggml import cuda as cuda_library
from moegraph.ggml import lib

CASES = Path(__file__).with_name("patch_cases.py")
Q2_K, Q3_K, MXFP4 = 10, 11, 39


def run_case(name: str, *prefix: str) -> str:
    """Run a case in a child process, under a tool if given; return what it wrote to stderr."""
    unset = ("GGML_CUDA_REGISTER_HOST", "GGML_CUDA_DISABLE_GRAPHS", "GGML_CUDA_DISABLE_FUSION")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*prefix, sys.executable, CASES, name], capture_output=True, text=True, env=env, check=False
    )
    said = (done.stdout + done.stderr)[-2000:]
    assert done.returncode == 0, f"{name}: exit {done.returncode}\n{said}"
    return done.stderr


def test_a_graph_may_end_with_the_routing_weights() -> None:
    run_case("graph_that_ends_with_the_weights")


def test_captured_graphs_survive_a_pause() -> None:
    log = run_case("graphs_after_a_pause")
    assert log.count("CUDA graph warmup complete") == 1, "captured once, not once more after it"


@pytest.mark.alone
def test_graphs_that_are_forgotten_take_no_memory() -> None:
    """The driver says only what the whole card has free, which other tests change."""
    run_case("graphs_that_are_forgotten")


def test_the_nodes_of_a_known_graph_are_not_looked_at() -> None:
    run_case("graphs_that_are_known")


def test_vector_kernels_do_not_read_behind_the_last_row() -> None:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("no compute-sanitizer")
    options = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")
    run_case("products_of_an_odd_number_of_rows", tool, *options)


def compiled_architectures(cuda: ctypes.CDLL) -> list[int]:
    """Return the architectures this build holds code for: 750, 860, ..."""

    class Feature(ctypes.Structure):
        _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))

    base = ctypes.CDLL(str(lib.library_dir() / "libggml-base.so"))
    cuda.ggml_backend_cuda_reg.restype = ctypes.c_void_p
    lookup = base.ggml_backend_reg_get_proc_address
    lookup.restype, lookup.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    address = lookup(cuda.ggml_backend_cuda_reg(), b"ggml_backend_get_features")
    feature = ctypes.CFUNCTYPE(ctypes.POINTER(Feature), ctypes.c_void_p)(address)(None)
    for i in range(64):
        if feature[i].name is None:
            break
        if feature[i].name == b"ARCHS":
            return [int(arch) for arch in feature[i].value.decode().split(",")]
    raise AssertionError("the CUDA backend does not say what it was compiled for")


@pytest.mark.parametrize(("kind", "limit"), [(Q2_K, 7), (Q3_K, 5), (MXFP4, 7)])
def test_the_row_limit_of_expert_products_follows_the_compiled_architecture(
    kind: int, limit: int
) -> None:
    own = lib.library_dir() / cuda_library.LIBRARY
    cuda = ctypes.CDLL(str(own if own.is_file() else next(iter(cuda_library.by_fit()))))
    newest = max(compiled_architectures(cuda))
    if not 750 <= newest < 890:
        pytest.skip(f"compiled for {newest}; only builds for 75 to 87 and no newer one differ")
    max_batch = cuda["_Z23get_mmvq_mmid_max_batch9ggml_typei"]
    assert max_batch(kind, newest) == limit
    assert max_batch(kind, 900) == limit, "the kernel's bound, not that of the newer card"
