"""GGUF model files: bounded scan, validation, mapping. Native code reads only checked files."""

from __future__ import annotations

from ..lazypackage import import_lazily

import_lazily("gguf")  # of which only the tables of types are needed, not YAML or its writers

# ruff: noqa: E402 - what follows imports gguf
# ruff: isort: split
from .file import GgufFile, ModelFile, open_gguf, open_model
from .resolve import resolve_target
from .scan import TensorInfo

__all__ = [
    "GgufFile", "ModelFile", "TensorInfo", "open_gguf", "open_model", "resolve_target"
]  # fmt: skip
