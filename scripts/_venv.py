"""The checkout's Python environment: .venv, libraries built in place, the package linked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import _tools
from _tools import MIN_CMAKE, ROOT, BuildError, Told, built_device, say

VENV = ROOT / ".venv"
STAMP = ".moegraph-stamp"
# Bytes of .venv and of a build for the CPU, together.
BUILD_BYTES = 600_000_000
# Seconds that an interrupted build has to end.
_END_S = 10
# Folders of tests that compare with nothing but themselves.
WITHOUT_ORACLE = ("unit", "native", "fuzz")


def check_python() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - an older one must be told so
        raise BuildError(f"Python {sys.version.split()[0]} is too old; 3.10 or newer is needed")


def check_machine() -> None:
    """Check what a first build needs, before anything is downloaded."""
    check_python()
    _tools.check_compilers()
    free = shutil.disk_usage(ROOT).free
    if not built_device() and free < BUILD_BYTES:
        raise BuildError(f"{ROOT} has {free / 1e9:.1f} GB of free space; a build needs"
                         f" {BUILD_BYTES / 1e9:.1f} GB")  # fmt: skip


def python() -> Path:
    return VENV / "bin" / "python"


def run_step(what: str, command: list[str | Path], env: dict[str, str] | None = None) -> None:
    """Run one command with its output on the terminal; raise BuildError when it fails."""
    if subprocess.run([str(c) for c in command], env=env, cwd=ROOT, check=False).returncode != 0:
        raise BuildError(f"{what} failed (see above)")


def run_build(arguments: list[str]) -> None:
    """Run scripts/build with the Python of .venv."""
    command = [str(python()), str(ROOT / "scripts" / "build"), *arguments]
    with subprocess.Popen(command, cwd=ROOT) as build:
        try:
            code = build.wait()
        except KeyboardInterrupt:  # which a terminal sends to both
            try:
                build.wait(_END_S)
            except subprocess.TimeoutExpired:
                build.kill()
            code = 130
    if code != 0:
        raise Told(code)


def pip(*arguments: str) -> list[str | Path]:
    return [python(), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]


def make_venv() -> None:
    """Create .venv with the build tools, unless it exists."""
    check_python()
    if python().exists() and (VENV / STAMP).exists():
        return
    say(f"making a virtual environment in {VENV}")
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False)
    if made.returncode != 0:
        raise BuildError(
            f"{sys.executable} -m venv failed (see above); on Debian install python3-venv"
        )
    tools = ["scikit-build-core>=0.10", "cffi>=1.17"]
    tools += [] if shutil.which("ninja") else ["ninja"]
    cmake = shutil.which("cmake")
    tools += [] if cmake and _tools.cmake_version(cmake) >= MIN_CMAKE else ["cmake"]
    run_step("installing build tools with pip", pip(*tools))
    (VENV / STAMP).write_text("")


def prepare(build_arguments: list[str] | None, extras: str) -> None:
    """Bring .venv, the native libraries and the installed package up to date.

    Takes little time if they already are. build_arguments: of scripts/build; without any, the
    libraries are built again for the device for which they were built last. None: keep them.
    """
    make_venv()
    if build_arguments is not None:
        run_build(build_arguments or built_device())
    if _install(extras, VENV / STAMP):
        for packages in VENV.glob("lib/python3*/site-packages"):
            (packages / "moegraph-checkout.pth").write_text(f"{ROOT}\n")


def add_tools(extra: str) -> None:
    """Install the packages of an extra into .venv, unless they are installed.

    Does not build the native libraries.
    """
    make_venv()
    _install(extra, VENV / f"{STAMP}-{extra}")


def _install(extras: str, stamp: Path) -> bool:
    """Install the package with extras, unless a stamp says that it is; return whether."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + extras.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    say(f"installing the package and what it needs, with the extras {extras}")
    # llama-cpp-python must not build llama.cpp
    env = dict(os.environ, MOEGRAPH_LINKED="1", CMAKE_ARGS="-DLLAMA_BUILD=OFF")
    run_step(f"installing [{extras}]", pip("--no-build-isolation", f"{ROOT}[{extras}]"), env)
    stamp.write_text(wanted)
    return True


def needs_oracle(arguments: list[str]) -> bool:
    """Return whether tests that arguments of pytest choose may compare with unpatched llama.cpp.

    They do not if the arguments name only files or folders of tests that never do.
    """
    paths = [a.partition("::")[0] for a in arguments if not a.startswith("-")]
    chosen = [(ROOT / path).resolve() for path in paths if (ROOT / path).exists()]
    without = [ROOT / "tests" / name for name in WITHOUT_ORACLE]
    return not chosen or not all(any(p.is_relative_to(w) for w in without) for p in chosen)
