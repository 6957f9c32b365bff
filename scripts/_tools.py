"""Find compilers, CMake and instruction sets, or say what to install."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "vendor"))
import fetch as fetch
import unified

AVX2 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "avx2": AVX2,
    "avx512": (*AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
}
MIN_CMAKE = (3, 21)
DEVICE_OPTIONS = ROOT / "build" / "device-options.json"


class Parser(argparse.ArgumentParser):
    """A command line whose help keeps its line breaks and whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


class BuildError(Exception):
    """The build cannot continue; the message is the one line that the user sees."""


class Told(Exception):
    """A script that this one ran has failed or was interrupted, and has said so.

    code: the exit status.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


# Errors that a script reports as one line.
FAILURES = (BuildError, fetch.FetchError, unified.PatchError, OSError)


def reported(work: Callable[[], int | None]) -> int:
    """Return the exit code of a script's work; an expected failure is one line."""
    try:
        return work() or 0
    except FAILURES as error:
        print(f"moegraph: {error}", file=sys.stderr)
        return 1
    except Told as error:
        return error.code
    except KeyboardInterrupt:
        print("\nmoegraph: interrupted; run it again to continue", file=sys.stderr)
        return 130


def remember_device(options: list[str]) -> None:
    """Keep the options of scripts/build that say for which device the checkout was built."""
    DEVICE_OPTIONS.parent.mkdir(exist_ok=True)  # a build may be elsewhere
    DEVICE_OPTIONS.write_text(json.dumps(options))


def built_device() -> list[str]:
    """Return the options that `remember_device` kept; none before the first build."""
    try:
        return [str(option) for option in json.loads(DEVICE_OPTIONS.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def say(text: str) -> None:
    print(f"moegraph: {text}", flush=True)


def cpu_options(portable: str | None) -> list[str]:
    """Return CMake's CPU options: this machine's instructions, or the set named by `portable`."""
    if portable is None:
        return ["-DGGML_NATIVE=ON"]
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["-DGGML_NATIVE=OFF"]
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in INSTRUCTION_SETS[portable])]


def check_compilers(headers: bool = True) -> None:
    """Raise BuildError unless a C compiler, a C++ compiler and Python's C headers are installed.

    headers: whether those of Python are needed.
    """
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        wanted = os.environ.get(variable)
        if not any(shutil.which(name.split()[0]) for name in ([wanted] if wanted else names)):
            raise BuildError(
                f"no {'C' if variable == 'CC' else 'C++'} compiler (looked for"
                f" {wanted or ', '.join(names)}); install gcc and g++, or set {variable}"
            )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if headers and not header.is_file():
        raise BuildError(f"{header} is missing; install Python's C headers (python3-dev)")


def find_cmake() -> str:
    """Return a CMake that is new enough."""
    path = shutil.which("cmake", path=search_path())
    if path is None:
        raise BuildError(f"no cmake; install it with: {sys.executable} -m pip install cmake ninja")
    if cmake_version(path) < MIN_CMAKE:
        raise BuildError(
            f"{path} is version {'.'.join(map(str, cmake_version(path)))}, too old; the build needs"
            f" {'.'.join(map(str, MIN_CMAKE))};"
            f" install a newer one with: {sys.executable} -m pip install cmake"
        )
    return path


def cmake_version(path: str) -> tuple[int, int]:
    """Return the version of a CMake."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def search_path() -> str:
    """Return PATH with this Python's scripts first, because cmake and ninja may come from pip."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def generator() -> list[str]:
    ninja = shutil.which("ninja", path=search_path())
    if ninja is None:
        return ["-G", "Unix Makefiles"]
    return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]


def environment() -> dict[str, str]:
    """Return the environment of a build; with ccache, checkouts share results."""
    env = dict(os.environ, PATH=search_path())
    env.setdefault("CCACHE_BASEDIR", str(ROOT.parent))
    env.setdefault("CCACHE_NOHASHDIR", "1")
    return env


def launcher() -> list[str]:
    """Return what goes before a compiler: ccache, if it is installed."""
    return ["ccache"] if shutil.which("ccache") else []


def install_python_packages(sdist: Path) -> None:
    """Install the packages that build and program need.

    llama-cpp-python is installed without its own llama.cpp, which would take minutes to compile:
    it uses the patched libraries.
    """
    missing = [name for name in ("cffi",) if importlib.util.find_spec(name) is None]
    if missing:
        pip_install(missing, os.environ)
    if importlib.util.find_spec("llama_cpp") is None:
        say("installing llama-cpp-python without its own build")
        if sdist.is_dir() and not (sdist / "pyproject.toml").is_file():
            raise BuildError(
                f"{sdist} has only llama.cpp, and this Python no llama_cpp; name"
                f" {fetch.PIN['file']} or its whole folder with --sdist"
            )
        pip_install([str(sdist)], dict(os.environ, CMAKE_ARGS="-DLLAMA_BUILD=OFF"))


def pip_install(arguments: list[str], env: os._Environ[str] | dict[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    if subprocess.run(command, env=dict(env), check=False).returncode != 0:
        raise BuildError(
            f"pip could not install {' '.join(arguments)} into {sys.prefix} (see above);"
            " scripts/quickstart makes a virtual environment for it"
        )


def default_jobs(cuda: bool) -> int:
    """Return the number of compilers to run at a time: one for each processor.

    For CUDA at most one for each 3 GiB of memory, because nvcc can need that much.
    """
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not cuda:
        return jobs
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(jobs, total // (3 << 30)))


def write_or_check(about: str | None, path: Path, make: Callable[[], str]) -> int:
    """Write what `make` returns; with --check, only compare it. Return the exit code.

    about: what the script is for, in its help.
    """
    p = Parser(description=about)
    p.add_argument("--check", action="store_true", help="write nothing; fail if it would change")
    is_check = p.parse_args().check
    text = make()
    if not is_check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path.name} is not up to date; run scripts/{p.prog}", file=sys.stderr)
    return 1
