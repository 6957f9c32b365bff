"""GGUF files: where they come from, a bounded scan, checks, and their mapping."""

from __future__ import annotations

from ..lazypackage import import_lazily

import_lazily("gguf")  # of which only the tables of types are needed, not YAML or its writers

# ruff: noqa: E402 - what follows imports gguf
# ruff: isort: split
from .file import GgufFile, open_gguf
from .resolve import resolve_target
from .tensorfile import TensorInfo

__all__ = ["GgufFile", "TensorInfo", "open_gguf", "resolve_target"]
