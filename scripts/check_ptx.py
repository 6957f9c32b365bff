#!/usr/bin/env python3
"""Compile our CUDA sources and those that patches touch to PTX: checks them without a GPU.

Machine code would take most of an hour; PTX for one architecture, not optimized, takes a minute and
finds the same compiler errors. Of cuBLAS only the headers are needed. A patch set is compiled once.
Without nvcc the script says that it compiled nothing.

  scripts/check_ptx.py 90
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _cuda
import _tools
from _tools import ROOT, BuildError, fetch, reported, say

# CMake's flags for ggml-cuda, without host compiler flags and the choice of attention types.
FLAGS = (
    "-ptx", "-std=c++17", "-use_fast_math", "-extended-lambda", "-DGGML_BACKEND_BUILD",
    "-DGGML_BACKEND_SHARED", "-DGGML_SHARED", "-DGGML_CUDA_USE_GRAPHS", "-DGGML_SCHED_MAX_COPIES=4",
    "-D_GNU_SOURCE", "-D_XOPEN_SOURCE=600",
)  # fmt: skip
STAMP = "ptx-stamp"


def touched_by(patches: Sequence[Path], native: Iterable[str]) -> list[str]:
    """Return the CUDA files that patches change or native files add, sorted, in the tree."""
    lines = [line for patch in patches for line in patch.read_text("utf-8").splitlines()]
    names = {line[len("+++ b/") :] for line in lines if line.startswith("+++ b/")} | set(native)
    return sorted(name for name in names if name.endswith((".cu", ".cuh")))


def units(tree: Path, touched: Sequence[str]) -> list[Path]:
    """Return the sources to compile: those touched, and for each header one that includes it.

    A source in template-instances/ is preferred, because it instantiates the header's templates.
    """
    found = {tree / name for name in touched if name.endswith(".cu")}
    for header in (tree / name for name in touched if name.endswith(".cuh")):
        instances = sorted((header.parent / "template-instances").glob("*.cu"))
        sources = (*instances, *sorted(header.parent.glob("*.cu")))
        users = (one for one in sources if f'{header.name}"' in one.read_text("utf-8"))
        found |= {*islice(users, 1)}
    return sorted(found)


def cublas_headers(toolkit: Path, major: int, cache: Path) -> Path:
    """Return a folder of cuBLAS headers: the toolkit's or a wheel's, fetched if need be."""
    folder = cache / f"cublas-{major}"
    try:
        return _cuda.find_cublas(toolkit, major).include
    except BuildError:
        wheel = ["--no-deps", "--target", str(folder), f"{_cuda.wheel_name(major)}=={major}.*"]
    if _cuda.wheel_cublas(folder, major) is None:
        _tools.pip_install(wheel, os.environ)
    found = _cuda.wheel_cublas(folder, major)
    assert found is not None, wheel
    return found.include


def options(arch: str, version: tuple[int, int]) -> list[str]:
    """Return an architecture's options for the nvcc of a version of CUDA."""
    fast = ["-Ofc", "max"] if version >= (13, 0) else []  # compiles soon, optimizes little
    return [f"-arch=compute_{arch}", *fast]


def compile_all(
    nvcc: Path, sources: Sequence[Path], includes: Sequence[Path], more: Sequence[str]
) -> None:
    """Compile the files, several at a time, and discard the results; more: see `options`."""
    # -c: without it, ccache takes the call for one that links; nvcc ends at PTX all the same
    command = [*_tools.launcher(), str(nvcc), "-c", *FLAGS, *more]
    command += [f"-I{path}" for path in includes]

    def one(source: Path) -> str:
        with tempfile.NamedTemporaryFile(suffix=".ptx") as out:
            done = subprocess.run(
                [*command, "-o", out.name, str(source)], cwd=ROOT, env=_tools.environment(),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        said = (done.stdout + done.stderr)[:2000]
        return f"{source.name} does not compile:\n{said}" if done.returncode else ""

    with ThreadPoolExecutor(_tools.default_jobs(cuda=True)) as pool:
        failures = [text for text in pool.map(one, sources) if text]
    if failures:
        raise BuildError("\n".join(failures))


def check(arch: str, build: Path) -> None:
    """Compile our CUDA sources and patched ones, unless this patch set already passed here.

    Prints one line: what was compiled, or why nothing was.
    """
    _cuda.check_architectures([arch])
    try:
        toolkit, (major, minor) = _cuda.find_toolkit()
        include = cublas_headers(toolkit, major, build / "cache")
    except BuildError as error:
        say(f"CUDA sources NOT compiled: {str(error).partition(';')[0]}")
        return
    work, own = build / "ptx", hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = work / STAMP
    wanted = f"{fetch.patchset()} {fetch.PIN['sha256']} CUDA {major}.{minor} compute_{arch} {own}"
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        say(f"CUDA sources not compiled again: patch set {fetch.patchset()} compiled here before")
        return
    begin, tree = time.monotonic(), work / "llama.cpp"
    fetch.provide(tree, build / "cache")
    sources = units(tree, touched_by(fetch.patch_files(), fetch.native_files()))
    # The wheels share one folder, which may hold another toolkit's headers: take cuBLAS's only.
    shutil.rmtree(work / "cublas", ignore_errors=True)
    (work / "cublas").mkdir(parents=True)
    for header in include.glob("cublas*.h"):
        (work / "cublas" / header.name).symlink_to(header.resolve())
    includes = [tree / "ggml" / "src", tree / "ggml" / "include", work / "cublas"]
    compile_all(toolkit / "bin" / "nvcc", sources, includes, options(arch, (major, minor)))
    stamp.write_text(wanted, "utf-8")
    spent = time.monotonic() - begin
    say(f"CUDA sources: {len(sources)} files compiled to PTX for compute_{arch} in {spent:.0f} s")


def main() -> int:
    """Run the command line and return the exit code."""
    p = _tools.Parser(description=__doc__)
    p.add_argument("arch", metavar="ARCH", help="an architecture, such as 90")
    args = p.parse_args()
    return reported(lambda: check(args.arch, ROOT / "build"))


if __name__ == "__main__":
    sys.exit(main())
