"""zig's wheel as C and C++ compiler for an old glibc, and the other tools that wheels need."""

from __future__ import annotations

import importlib.metadata
import os
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


def with_tools(build: Path) -> None:
    """Go on in an environment with TOOLS; this process ends if it was not in it."""
    venv, stamp = build / "tools", build / "tools" / "moegraph-tools"
    if Path(sys.prefix) == venv:
        return
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
    os.execv(venv / "bin" / "python", [str(venv / "bin" / "python"), *sys.argv])


def compilers(build: Path) -> dict[str, str]:
    """Write scripts that call zig for an old glibc; return the variables of a build."""
    zig = next(
        str(f.locate()) for f in importlib.metadata.files("ziglang") or () if f.name == "zig"
    )
    target = f"x86_64-linux-gnu.{'.'.join(map(str, GLIBC))}"
    folder = build / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cc", "c++"):
        text = f'#!/bin/sh\nexec {zig} {name} -target {target} "$@"\n'
        path = folder / f"zig-{name}"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        path.chmod(0o755)
    return {"CC": str(folder / "zig-cc"), "CXX": str(folder / "zig-c++"), **SAME_PATHS}
