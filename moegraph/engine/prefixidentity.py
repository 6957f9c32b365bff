"""What saved KV rows and states depend on: two engines may share them if this is equal."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ..config import EngineConfig
from ..ggml.lib import C, ffi
from ..placement.identity import content_hash
from .loader import LoadedModel
from .prefixdisk import PrefixDisk

# Of the format of what is saved; it changes with what computes it.
_VERSION = 1
_SETTINGS = ("type_k", "type_v", "cpu_reference")


def prefix_identity(loaded: LoadedModel) -> str:
    """Return a hash of a loaded model, its settings, its device's kind, and what drafts.

    How many sequences there are, and of what length, does not matter.
    """
    config: EngineConfig = loaded.config
    copies = loaded.sequences.copies
    parts = {
        "version": _VERSION,
        "patches": ffi.string(C.mg_patchset_built()).decode(),
        "model": content_hash(loaded.file),
        "device": loaded.stage.device.name.partition(":")[0],
        "settings": {name: getattr(config, name) for name in _SETTINGS},
        "bytes": [copies.states_bytes, copies.row_bytes],
        "drafters": {one.name: one.row_bytes for one in loaded.drafters},
        "draft": config.draft,
    }
    if len(loaded.stages) > 1:  # copies have their layers in order of stages
        parts["stages"] = [stage.layers.stop for stage in loaded.stages]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def open_disk(loaded: LoadedModel, folder: str | os.PathLike[str], max_bytes: int) -> PrefixDisk:
    """Open a folder for beginnings of prompts of a loaded model.

    Files of other models or settings there are not used.

    Raises:
        ConfigError: the folder cannot be used.
        ModelFileError: the model file cannot be read.
    """
    return PrefixDisk(Path(folder), prefix_identity(loaded), max_bytes)
