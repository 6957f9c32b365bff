"""Resolve a model argument: the name of a shipped model, a name on a hub, or a path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelFileError
from .hub import Room, Say, get_model
from .hubnames import PREFIX, is_hub_name, name_in, parse_hub_name

if TYPE_CHECKING:
    from ..events import Progress

_MODELS = Path(__file__).resolve().parent.parent / "models"
SHIPPED = {"tiny": "tiny.gguf", "tiny-oss": "tiny-oss.gguf"}
_DRAFTERS = {"tiny.gguf": "tiny-dflash.gguf"}


def resolve_target(
    target: str | os.PathLike[str], progress: Progress | None = None, say: Say | None = None,
    room: Room | None = None,
) -> Path:  # fmt: skip
    """Return the path of a model: a shipped name ('tiny'), hf:OWNER/REPO[:QUANT], or a GGUF file.

    A model of a hub is downloaded unless the cache has it; progress, say, room: as in
    `get_model`. A path that contains a folder ('./tiny') is never read as a shipped name.
    """
    name = os.fspath(target)
    if isinstance(target, str) and is_hub_name(name):
        return get_model(parse_hub_name(name), progress, say, room)
    if name in SHIPPED:
        path = _MODELS / SHIPPED[name]
        if not path.is_file():
            raise ModelFileError(f"{path}: the shipped model {name!r} is missing; reinstall")
        return path
    if not name:
        raise ModelFileError("the model's name is empty; give a GGUF file or a shipped model")
    path = Path(name)
    if (meant := name_in(name)) and not os.path.lexists(path.parent):
        raise ModelFileError(f"{name}: no such file; a model of Hugging Face is {PREFIX}{meant}")
    if os.sep not in name and not path.suffix and not os.path.lexists(path):
        known = ", ".join(SHIPPED)
        raise ModelFileError(f"{name}: no such file, and no shipped model ({known}) has that name")
    return path


def resolve_draft(name: str) -> Path:
    """Return the path of a drafter: hf:OWNER/REPO[:QUANT], or a file or folder."""
    return get_model(parse_hub_name(name)) if is_hub_name(name) else Path(name)


def is_shipped(path: str | os.PathLike[str]) -> bool:
    """Return whether path is a shipped model; shipped models complete code and cannot chat."""
    return Path(path).parent == _MODELS


def shipped_drafter(path: str | os.PathLike[str]) -> Path | None:
    """Return the DFlash file shipped for a shipped model, None if path has none."""
    if not is_shipped(path) or Path(path).name not in _DRAFTERS:
        return None
    drafter = _MODELS / _DRAFTERS[Path(path).name]
    return drafter if drafter.is_file() else None
