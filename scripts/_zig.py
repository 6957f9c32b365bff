"""zig's wheel as C and C++ compiler for an old glibc, or for its libraries; tools for wheels."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from _tools import BuildError, say

# The oldest glibc that wheels run with: that of RHEL 8 and Debian 10.
GLIBC = (2, 28)
# ccache would make paths relative to a folder, and they end up in libraries.
SAME_PATHS = {"CCACHE_BASEDIR": ""}
# Exact, so that the same sources give the same bytes.
TOOLS = ("ziglang==0.17.1", "scikit-build-core==1.1.2", "cffi==2.1.1", "auditwheel==6.8.2")
# What headers of newer systems take from a newer glibc, and GCC 13's <iostream> from its libstdc++.
# Without the first, libstdc++ locks more than it must.
_NEWER = """#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#define OURS __attribute__((visibility("hidden")))
OURS char __libc_single_threaded;
OURS unsigned arc4random(void) { unsigned n; while (getrandom(&n, sizeof n, 0) < 0) {} return n; }
OURS long __isoc23_strtol(const char * s, char ** e, int b) { return strtol(s, e, b); }
OURS unsigned long long __isoc23_strtoull(const char * s, char ** e, int b) {
    return strtoull(s, e, b);
}
OURS int __isoc23_sscanf(const char * s, const char * f, ...) {
    va_list a; va_start(a, f); int n = vsscanf(s, f, a); va_end(a); return n;
}
OURS __attribute__((weak)) void _ZSt21ios_base_library_initv(void) {}
"""
# zig has other words for Arm's -march=armv8.2-a+fp16.
_TRANSLATE = """#!/bin/sh
for one; do
    shift
    case $one in -march=armv*) one=$(echo "$one" | sed '
        s/+fp16/+fullfp16/; s/-march=armv\\(.\\)\\.*\\(.*\\)-a/-mcpu=generic+v\\1_\\2a/; s/_a/a/')
    esac
    set -- "$@" "$one"
done
"""


def make_tools(build: Path) -> Path:
    """Install TOOLS into an environment, unless it has them; return its Python."""
    venv, stamp = build / "tools", build / "tools" / "moegraph-tools"
    if not stamp.is_file() or stamp.read_text() != " ".join(TOOLS):
        say(f"installing {', '.join(TOOLS)} into {venv}")
        python = str(venv / "bin" / "python")
        for command in (
            [sys.executable, "-m", "venv", str(venv)],
            [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *TOOLS],
        ):
            if subprocess.run(command, check=False).returncode:
                raise BuildError(f"{' '.join(command[1:3])} failed (see above)")
        stamp.write_text(" ".join(TOOLS))
    return venv / "bin" / "python"


def with_tools(build: Path) -> None:
    """Go on in an environment with TOOLS; this process ends if it was not in it."""
    if Path(sys.prefix) != build / "tools":
        python = make_tools(build)
        os.execv(python, [str(python), *sys.argv])


def compilers(build: Path, machine: str = platform.machine()) -> dict[str, str]:
    """Write scripts that call zig for an old glibc; return the variables of a build."""
    zig = next(
        str(f.locate()) for f in importlib.metadata.files("ziglang") or () if f.name == "zig"
    )
    target = f"{machine}-linux-gnu.{'.'.join(map(str, GLIBC))}"
    folder = build / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cc", "c++"):
        text = f'{_TRANSLATE}exec {zig} {name} -target {target} "$@"\n'
        path = folder / f"zig-{machine}-{name}"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        path.chmod(0o755)
    paths = {name: str(folder / f"zig-{machine}-{name}") for name in ("cc", "c++")}
    return {"CC": paths["cc"], "CXX": paths["c++"], **SAME_PATHS}


def cmake_options(machine: str) -> list[str]:
    """Return CMake's options to compile for another machine than this one."""
    if machine == platform.machine():
        return []
    return ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={machine}"]


def linker_flags(build: Path) -> str:
    """Return options with which this machine's compiler links libraries for an old glibc.

    nvcc knows no zig, so CUDA's files are compiled with this machine's headers, and only linked
    with zig's libraries of the old glibc. libstdc++ is linked in, and hidden from other libraries.
    """
    folder, cache = build / "glibc", build / "glibc" / "zig"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "newer.c").write_text(_NEWER)
    zig = next((build / "tools" / "lib").glob("python3*/site-packages/ziglang/zig"))
    env = dict(os.environ, ZIG_GLOBAL_CACHE_DIR=str(cache), ZIG_LOCAL_CACHE_DIR=str(cache))
    command = [str(zig), "cc", "-target", f"x86_64-linux-gnu.{'.'.join(map(str, GLIBC))}"]
    command += ["-O2", "-fPIC", "newer.c", "-o"]
    for name in ("newer.o", "zig.so"):  # the second brings the libraries into the cache
        kind = "-shared" if name.endswith(".so") else "-c"
        subprocess.run([*command, name, kind], cwd=folder, env=env, check=True)
    for path in [*cache.rglob("lib*.so.*"), *cache.rglob("libc_nonshared.a")]:
        shutil.copy2(path, folder)
    for name in ("dl", "m", "pthread", "rt"):
        (folder / f"lib{name}.so").symlink_to(next(folder.glob(f"lib{name}.so.*")).name)
    (folder / "libc.so").write_text("GROUP(libc.so.6 libc_nonshared.a AS_NEEDED(libld.so.2))\n")
    shutil.rmtree(cache)
    flags = "-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,-z,defs"  # no symbol is left to be found
    return f"-L{folder} {folder / 'newer.o'} {flags}"
