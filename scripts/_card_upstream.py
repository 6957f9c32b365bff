"""Build unpatched llama.cpp: programs for a comparison, and the library that tests load."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import _cuda
import _progress
import _tools
from _tools import ROOT, BuildError, fetch, say

# What is compared with: rows, sequences together, a server, the time to the first token.
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-server", "llama-completion")
# llama_cpp/lib: libraries and programs; llama_cpp: the Python bindings that tests/oracle loads.
UPSTREAM = ROOT / "build" / "upstream"
# The programs of the newest llama.cpp, vendor/rival.json.
RIVAL = ROOT / "build" / "rival"
# The libraries and the bindings alone, for the CPU. mtmd: reads pictures.
ORACLE = ROOT / ".oracle"
ORACLE_TARGETS = ("llama", "mtmd")
ORACLE_OPTIONS = f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={ROOT / 'tests' / 'oracle' / 'quick.cmake'}"
# Python bindings that a pack holds.
BINDINGS = ROOT / "build" / "card" / "bindings"
# The name by which a library asks for another: libggml.so.0 of libggml.so.0.9.4.
_SONAME = re.compile(r"\.so(\.\d+)?$")


def programs(folder: Path = UPSTREAM) -> Path:
    """Return the folder of the programs and their libraries."""
    return folder / "llama_cpp" / "lib"


def pin_of(folder: Path) -> fetch.Pin:
    """Return which source a folder is built of."""
    return fetch.RIVAL if folder == RIVAL else fetch.PIN


def is_built(options: list[str], folder: Path = UPSTREAM) -> bool:
    """Return whether a folder has its source built with these options."""
    note = folder / "built"
    return note.is_file() and note.read_text() == _note(options, folder)


def _note(options: list[str], folder: Path) -> str:
    """Return what a folder says about its build; the oracle's has its targets too."""
    targets = ORACLE_TARGETS if folder == ORACLE else ()
    return " ".join([pin_of(folder)["sha256"], *options, *targets])


def build(
    options: list[str], portable: str | None = None, sdist: str | None = None,
    jobs: int | None = None, folder: Path = UPSTREAM, targets: Iterable[str] = PROGRAMS,
) -> None:  # fmt: skip
    """Build programs, or a library, and what they need, unless they are there.

    options: --cpu, or --cuda-arch and what follows it in scripts/build.

    Only the downloaded source and the links to the toolkit are shared with our build: the patches
    change headers that every CUDA file includes. ccache, if there is one, shares what is equal.
    """
    pin = pin_of(folder)
    title = f"unpatched llama.cpp {pin['llama_cpp_commit']}"
    if is_built(options, folder):
        say(f"{title} is built: {programs(folder)}")
        return
    build_dir, cache = ROOT / "build", ROOT / "build" / "cache"
    source = build_dir / ("rival-source" if folder == RIVAL else "upstream-source")
    work = build_dir / f"{folder.name.strip('.')}-work"
    archive = fetch.find_sdist(sdist, cache, pin)
    if archive.is_dir():
        find_package(archive)  # now, and not after minutes of compiling
    fetch.provide(source, cache, str(archive), pristine=True, pin=pin)
    cuda = options[0] == "--cuda-arch"
    given = _cuda.options(options[1:], build_dir) if cuda else ["-DGGML_CUDA=OFF"]
    settings = [*_tools.cpu_options(portable), *_settings(given, pin["llama_cpp_commit"])]
    # git would answer with the state of this repository
    more = {"GIT_CEILING_DIRECTORIES": str(build_dir)}
    if folder == ORACLE:
        settings.append(ORACLE_OPTIONS)
        more |= _without_amx()
    n_jobs = jobs or _tools.default_jobs(cuda)
    _progress.cmake(title, source, work, settings, targets, n_jobs, **more)
    collect(work / "bin", folder)
    if folder != RIVAL:
        bindings(archive, folder)
    (folder / "built").write_text(_note(options, folder))


def make_oracle() -> None:
    """Build what the tests compare with.

    It gets our CPU options, because another instruction set would round differently.
    """
    build(["--cpu"], folder=ORACLE, targets=ORACLE_TARGETS)


def _without_amx() -> dict[str, str]:
    """Return variables with which compilers leave AMX out.

    llama.cpp's kernels for it crash where a system lists the instructions and does not allow them.
    Ours never use them, so they are no part of what the tests compare.
    """
    flags = ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"]
    probe = [os.environ.get("CC", "cc"), *flags, "-fsyntax-only", "-x", "c", os.devnull]
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        return {}
    return {
        name: " ".join([*os.environ.get(name, "").split(), *flags])
        for name in ("CFLAGS", "CXXFLAGS")
    }


def _settings(given: Iterable[str], commit: str) -> list[str]:
    """Return CMake's options; given: of the CUDA build, in which our folders become the rpath."""
    found, rpath = [], ["$ORIGIN"]
    for option in given:
        name, _, value = option.partition("=")
        if name == "-DMOEGRAPH_CUDA_RPATH":
            rpath += value.split(";")
        else:
            found.append(option)
    found += ["-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON"]
    found += [f"-DCMAKE_INSTALL_RPATH={';'.join(rpath)}", "-DGGML_CUDA_NCCL=OFF"]
    # without a driver here, only the machine that runs the programs has what libggml-cuda needs
    found.append("-DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined")
    # some compilers have only the static libstdc++: its parts in one library must not serve another
    found.append("-DCMAKE_SHARED_LINKER_FLAGS=-Wl,--exclude-libs,libstdc++.a")
    # the source has no history to ask for the commit
    found += [f"-D{name}_BUILD_COMMIT={commit}" for name in ("LLAMA", "GGML")]
    found.append("-DGIT_EXE=")
    parts = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI", "OPENSSL")
    return [*found, *(f"-DLLAMA_{part}=OFF" for part in parts)]


def collect(bin_dir: Path, folder: Path) -> None:
    """Copy programs and libraries, without symbolic links, into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    target = programs(folder)
    target.mkdir(parents=True)
    names = [*libraries(path.name for path in bin_dir.glob("lib*.so*"))]
    names += [name for name in PROGRAMS if (bin_dir / name).exists()]
    for name in names:
        shutil.copy2(bin_dir / name, target / name)  # what a link leads to
    if strip := shutil.which("strip"):
        subprocess.run([strip, *(str(target / name) for name in names)], check=False)
    for name in ("libllama.so", "libggml-base.so"):  # as the bindings spell them
        if not (target / name).exists():
            os.link(target / f"{name}.0", target / name)


def libraries(names: Iterable[str]) -> list[str]:
    """Return of each library the name by which others ask for it."""
    asked = sorted(name for name in names if _SONAME.search(name))
    return [name for name in asked if not any(other.startswith(f"{name}.") for other in asked)]


def find_package(sdist: Path) -> Path:
    """Return the folder llama_cpp of an unpacked source distribution.

    Of one that has only llama.cpp, it is that of a pack, or of the Python that runs this.
    """
    for folder in (sdist, BINDINGS):
        if (folder / "llama_cpp").is_dir():
            return folder / "llama_cpp"
    spec = importlib.util.find_spec("llama_cpp")
    if not spec or not spec.origin:
        raise BuildError(f"{sdist} has no folder llama_cpp; unpack all of {fetch.PIN['file']}")
    return Path(spec.origin).parent


def bindings(sdist: Path, folder: Path) -> None:
    """Take the Python files of llama_cpp from the source distribution into folder/llama_cpp.

    sdist: packed or not; see `find_package`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if sdist.is_file():
            shutil.unpack_archive(sdist, scratch)
            (sdist,) = Path(scratch).iterdir()
        left_out = shutil.ignore_patterns("lib", "__pycache__")
        target = folder / "llama_cpp"
        shutil.copytree(find_package(sdist), target, ignore=left_out, dirs_exist_ok=True)
