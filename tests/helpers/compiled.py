"""Compiling in tests: through ccache, if there is one, as scripts/build does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import _tools


def compile_object(command: list[str], folder: Path) -> None:
    """Run a compiler in a folder of the checkout's file system.

    ccache knows a source again, wherever the folder is, if it is named as from there.
    """
    env = _tools.environment()
    done = subprocess.run(
        [*_tools.launcher(), *command], cwd=folder, env=env, check=False, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
