"""Resolve a model argument: the name of a shipped model, or a path."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelFileError

_MODELS = Path(__file__).resolve().parent.parent / "models"
SHIPPED = {"tiny": "tiny.gguf"}
_DRAFTERS = {"tiny.gguf": "tiny-dflash.gguf"}


def resolve_target(target: str | os.PathLike[str]) -> Path:
    """Return the path of a model: a shipped name ('tiny') or a path to a GGUF file.

    A path that contains a folder ('./tiny') is never read as a name.

    Raises:
        ModelFileError: the shipped model is not installed, or no file has that name.
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
    """Return whether path is a shipped model; shipped models complete code and cannot chat."""
    return Path(path).parent == _MODELS


def shipped_drafter(path: str | os.PathLike[str]) -> Path | None:
    """Return the DFlash file shipped for a shipped model, None if path has none."""
    if not is_shipped(path) or Path(path).name not in _DRAFTERS:
        return None
    drafter = _MODELS / _DRAFTERS[Path(path).name]
    return drafter if drafter.is_file() else None
