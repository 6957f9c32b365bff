"""What saved KV rows and states depend on: two engines may share them if this is equal."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from ..config import EngineConfig
from ..ggml.lib import C, ffi
from ..passes.prefixdisk import PrefixDisk
from ..passes.prefixfile import Widths
from ..placement.identity import file_hash
from .loader import LoadedModel

# Of the format of what is saved; it changes with what computes it.
_VERSION = 2
_SETTINGS = ("type_k", "type_v", "cpu_reference", "deterministic")


def prefix_identity(loaded: LoadedModel) -> str:
    """Return a hash of a loaded model, its settings, the kinds of its devices, and what drafts.

    How many sequences there are, and of what length, does not matter.
    """
    config: EngineConfig = loaded.config
    parts = {
        "version": _VERSION,
        "patches": ffi.string(C.mg_patchset_built()).decode(),
        "model": file_hash(loaded.file),
        "devices": [device.name.partition(":")[0] for device in loaded.devices],
        "settings": {name: getattr(config, name) for name in _SETTINGS},
        "widths": asdict(_widths(loaded)),
        "drafters": [one.name for one in loaded.drafters],
        "draft": loaded.draft_stamps,
        "stages": [stage.layers.stop for stage in loaded.stages],  # copies have them in order
    }
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def open_disk(loaded: LoadedModel, folder: str | os.PathLike[str], max_bytes: int) -> PrefixDisk:
    """Open a folder for beginnings of prompts of a loaded model.

    Files of other models or settings there are not used.

    Raises:
        ConfigError: the folder cannot be used.
        ModelFileError: the model file cannot be read.
    """
    return PrefixDisk(Path(folder), prefix_identity(loaded), _widths(loaded), max_bytes)


def _widths(loaded: LoadedModel) -> Widths:
    copies, drafters = loaded.sequences.copies, loaded.drafters
    drafted = {one.name: one.row_widths for one in drafters if one.row_widths}
    return Widths(copies.row_widths, drafted, copies.states_bytes)
