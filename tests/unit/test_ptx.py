"""The CUDA sources are compiled where nvcc is: what is compiled, when again, and what is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import _cuda
import _tools
import check_ptx
from _tools import BuildError, fetch

FOLDER = "ggml/src/ggml-cuda"
FILES = {
    "ours.cu": "__global__ void ours() {}",
    "other.cu": "",
    "tile.cu": '#include "tile.cuh"',
    "tile.cuh": "",
    "template-instances/tile-1.cu": '#include "../tile.cuh"',
    "template-instances/tile-2.cu": '#include "../tile.cuh"',
}
# Refuses sources with foo() in them, as the compiler would; notes what it was given.
NVCC = """#!/bin/sh
case "$1" in
--version) echo 'release 13.0, V13.0.88'; exit ;;
-v) echo '#$ TOP={top}/bin/..' >&2; exit ;;
esac
for last; do :; done
echo "$last" >> {top}/compiled
if grep -q 'foo()' "$last"; then echo "$last(3): error: foo is undefined"; exit 1; fi
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a toolkit, a tree and a patch; return the build folder."""
    top = tmp_path / "cuda"
    for name in ("bin/nvcc", "include/cublas_v2.h", "lib64/libcublas.so"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(NVCC.format(top=top) if name == "bin/nvcc" else "")
    (top / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setattr(_tools, "launcher", list)
    monkeypatch.setenv("CUDACXX", str(top / "bin" / "nvcc"))
    tree = tmp_path / "build" / "ptx" / "llama.cpp"
    for name, text in FILES.items():
        (tree / FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / FOLDER / name).write_text(text)
    touched = ("tile.cuh", "notes.md")
    patch = tmp_path / "0001-a.patch"
    patch.write_text("".join(f"+++ b/{FOLDER}/{name}\n" for name in touched))
    monkeypatch.setattr(fetch, "patch_files", lambda: [patch])
    monkeypatch.setattr(fetch, "native_files", lambda: {f"{FOLDER}/ours.cu": tmp_path / "ours.cu"})
    monkeypatch.setattr(fetch, "patchset", lambda: str(len(patch.read_text())))
    monkeypatch.setattr(fetch, "provide", lambda *args: None)
    return tmp_path / "build"


def compiled(build: Path) -> list[str]:
    """Return the names of what was compiled so far, and forget them."""
    log = build.parent / "cuda" / "compiled"
    names = sorted(Path(line).name for line in log.read_text().splitlines()) if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def test_sources_and_one_user_of_a_header_are_compiled_once_for_a_patch_set(
    build: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_ptx.check("90", build)
    assert compiled(build) == ["ours.cu", "tile-1.cu"]
    assert "2 files compiled to PTX for compute_90" in capsys.readouterr().out
    check_ptx.check("90", build)
    assert compiled(build) == []
    assert "not compiled again" in capsys.readouterr().out
    check_ptx.check("86", build)
    assert len(compiled(build)) == 2, "another architecture"
    fetch.patch_files()[0].write_text(f"+++ b/{FOLDER}/tile.cu\n")
    check_ptx.check("86", build)
    assert compiled(build) == ["ours.cu", "tile.cu"], "other patches"


def test_an_error_in_a_source_fails_now_and_next_time(build: Path) -> None:
    source = build / "ptx" / "llama.cpp" / FOLDER / "ours.cu"
    source.write_text(FILES["ours.cu"].replace("{}", "{ foo(); }"))
    for _ in range(2):
        with pytest.raises(BuildError, match=r"ours.cu does not compile:\n.*foo is undefined"):
            check_ptx.check("90", build)


def test_the_real_compiler_refuses_a_planted_error(tmp_path: Path) -> None:
    try:
        toolkit, version = _cuda.find_toolkit()
    except BuildError as error:
        pytest.skip(str(error).partition(";")[0])
    source = tmp_path / "tiny.cu"
    source.write_text("__global__ void f(float * x) { __syncthreads(); x[0] = 1; }\n")
    nvcc, options = toolkit / "bin" / "nvcc", check_ptx.options("90", version)
    check_ptx.compile_all(nvcc, [source], [], options)
    source.write_text(source.read_text().replace("__syncthreads", "foo"))
    with pytest.raises(BuildError, match='(?s)tiny.cu does not compile.*"foo" is undefined'):
        check_ptx.compile_all(nvcc, [source], [], options)
