"""The checkout's Python environment: .venv, libraries built in place, the package linked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import _progress
import _tools
from _tools import MIN_CMAKE, ROOT, BuildError, Told, built_device, fetch, say

VENV = ROOT / ".venv"
ORACLE = ROOT / ".oracle"
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
    if not built_device():
        _tools.check_space(ROOT, BUILD_BYTES)


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
    tools += [] if cmake_is_new_enough() else ["cmake"]
    run_step("installing build tools with pip", pip(*tools))
    (VENV / STAMP).write_text("")


def cmake_is_new_enough() -> bool:
    path = shutil.which("cmake")
    if path is None:
        return False
    words = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False
    ).stdout.split()
    version = words[2].split(".")[:2] if len(words) > 2 else ["0"]
    return tuple(int(part) for part in version if part.isdigit()) >= MIN_CMAKE


def prepare(build_arguments: list[str], extras: str = "") -> None:
    """Bring .venv, the native libraries and the installed package up to date.

    Takes little time if they already are. build_arguments: of scripts/build; without any, the
    libraries are built again for the device for which they were built last.
    """
    check_python()
    make_venv()
    run_build(build_arguments or built_device())
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + extras.encode()).hexdigest()
    if (VENV / STAMP).read_text() == wanted:
        return
    say("installing the package and what it needs")
    target = f"{ROOT}[{extras}]" if extras else str(ROOT)
    env = dict(os.environ, MOEGRAPH_LINKED="1")
    run_step("installing moegraph", pip("--no-build-isolation", target), env)
    for packages in VENV.glob("lib/python3*/site-packages"):
        (packages / "moegraph-checkout.pth").write_text(f"{ROOT}\n")
    (VENV / STAMP).write_text(wanted)


def add_tools(extra: str) -> None:
    """Install the packages of an extra into .venv, unless they are installed.

    Does not build the native libraries.
    """
    check_python()
    make_venv()
    stamp = VENV / f"{STAMP}-{extra}"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    say(f"installing the tools of the extra {extra!r}")
    # pip also installs the package's requirements; llama-cpp-python must not build llama.cpp
    env = dict(os.environ, MOEGRAPH_LINKED="1", CMAKE_ARGS="-DLLAMA_BUILD=OFF")
    run_step(f"installing [{extra}]", pip("--no-build-isolation", f"{ROOT}[{extra}]"), env)
    stamp.write_text(wanted)


def needs_oracle(arguments: list[str]) -> bool:
    """Return whether tests that arguments of pytest choose may compare with unpatched llama.cpp.

    They do not if the arguments name only files or folders of tests that never do.
    """
    paths = [a.partition("::")[0] for a in arguments if not a.startswith("-")]
    chosen = [(ROOT / path).resolve() for path in paths if (ROOT / path).exists()]
    without = [ROOT / "tests" / name for name in WITHOUT_ORACLE]
    return not chosen or not all(any(p.is_relative_to(w) for w in without) for p in chosen)


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


def make_oracle(cpu_options: list[str]) -> None:
    """Build llama-cpp-python with its own, unpatched llama.cpp into .oracle, unless it exists.

    It gets our CPU options, because another instruction set would round differently.
    """
    options = " ".join([*cpu_options, "-DLLAVA_BUILD=OFF"])
    wanted = f"{fetch.PIN['sha256']} {options} without AMX"
    if (ORACLE / STAMP).is_file() and (ORACLE / STAMP).read_text() == wanted:
        return
    fresh = ORACLE.with_name(".oracle-new")
    work = ROOT / "build" / "oracle"
    for folder in (fresh, ORACLE, work):
        shutil.rmtree(folder, ignore_errors=True)
    # ccache needs the same paths each time; pip would unpack and build in folders of random names
    source = fetch.find_sdist(None, ROOT / "build" / "cache")
    if source.is_file():
        shutil.unpack_archive(source, work)
        (source,) = work.iterdir()
    elif (source / "pyproject.toml").is_file():
        source = Path(shutil.copytree(source, work / source.name))
    else:
        raise BuildError(f"{source} has only llama.cpp; name {fetch.PIN['file']} with"
                         " MOEGRAPH_SDIST, to build the oracle")  # fmt: skip
    command = [str(c) for c in pip("--verbose", "--no-deps", "--no-build-isolation")]
    command.remove("--quiet")
    command += ["--target", str(fresh), f"--config-settings=build-dir={work / 'build'}"]
    command.append(str(source))
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = dict(_tools.environment(), CMAKE_ARGS=options, PATH=path) | _without_amx()
    _progress.run("unpatched llama.cpp, the oracle", command, ROOT / "build" / "oracle.log", env)
    shutil.rmtree(work)
    (fresh / STAMP).write_text(wanted)
    fresh.rename(ORACLE)
