"""Libraries of another build beside ours: refused by name, before any of them is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moegraph.errors import NativeError
from moegraph.ggml.lib import library_dir, patchset
from moegraph.ggml.patchset import LIBRARIES, patchset_of

PACKAGE = library_dir().parent
OTHER = "0123456789abcdef"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the package with its libraries, models left out; return the folder of the libraries."""
    shutil.copytree(
        PACKAGE, tmp_path / "moegraph", ignore=shutil.ignore_patterns("models", "__pycache__")
    )
    return tmp_path / "moegraph" / "lib"


def load(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor of a copy, which loads the libraries."""
    return subprocess.run(
        [sys.executable, "-m", "moegraph", "doctor", *args], cwd=folder.parent.parent,
        text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(folder.parent.parent), **env}, capture_output=True,
    )  # fmt: skip


def test_every_library_carries_the_hash() -> None:
    found = {path.name: patchset_of(path) for path in library_dir().glob("*.so")}
    assert found.keys() >= {f"lib{name}.so" for name in LIBRARIES if name != "ggml-cuda"}
    assert set(found.values()) == {patchset_of(PACKAGE / "ggml/_native.abi3.so")} == {patchset()}


@pytest.mark.parametrize(("name", "other"), [("llama", OTHER), ("ggml-cuda", "none")])
def test_a_library_of_another_build_is_named(copy: Path, name: str, other: str) -> None:
    path, ours = copy / f"lib{name}.so", patchset()
    data = (path if path.exists() else copy / "libggml.so").read_bytes()
    if other == OTHER:
        data = data.replace(ours.encode(), other.encode())
    else:
        data = data.replace(b"moegraph\0\0\0\0" + ours.encode(), bytes(12) + ours.encode())
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    done = load(copy)
    assert done.returncode == NativeError.exit_code
    expected = f"{path} carries patch set {other}, _native.abi3.so needs {ours}; a mixture"
    assert expected in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02\x01" + b"\xff" * 100])
def test_what_is_no_library_is_refused_as_one_without_a_hash(copy: Path, data: bytes) -> None:
    (copy / "libllama.so").write_bytes(data)
    done = load(copy)
    assert done.returncode == NativeError.exit_code
    assert "libllama.so carries patch set none" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_search_path_leads_to_no_other_llama_cpp(copy: Path, tmp_path: Path) -> None:
    """A build folder of llama.cpp has libraries of the same names."""
    (tmp_path / "build").mkdir()
    for name in LIBRARIES:
        (tmp_path / "build" / f"lib{name}.so").write_bytes(b"")
    done = load(copy, LD_LIBRARY_PATH=str(tmp_path / "build"))
    assert (done.returncode, done.stderr) == (0, "")
