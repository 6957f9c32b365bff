"""Find the file that a user means: a shipped model's name, or a path."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelFileError

_MODELS = Path(__file__).resolve().parent.parent / "models"
SHIPPED = {"tiny": "tiny.gguf"}


def resolve_target(target: str | os.PathLike[str]) -> Path:
    """Return the path of a model: a shipped name ('tiny') or a path to a GGUF file.

    A path with a folder in it ('./tiny') is never taken for a name.

    Raises:
        ModelFileError: a shipped model is not installed, or nothing has that name.
    """
    name = os.fspath(target)
    if name in SHIPPED:
        path = _MODELS / SHIPPED[name]
        if not path.is_file():
            raise ModelFileError(f"{path}: the shipped model {name!r} is missing; reinstall")
        return path
    if not name:
        raise ModelFileError("the model's name is empty; give a GGUF file or a shipped model")
    path = Path(name)
    if os.sep not in name and not path.suffix and not os.path.lexists(path):
        known = ", ".join(SHIPPED)
        raise ModelFileError(f"{name}: no such file, and no shipped model ({known}) has that name")
    return path


def is_shipped(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a shipped model; those write code and do not talk."""
    return Path(path).parent == _MODELS
