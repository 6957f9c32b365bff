"""GGUF model files: bounded scan, validation, mapping; nothing native reads a file before this."""

from __future__ import annotations

from .file import GgufFile, ModelFile, open_gguf, open_model
from .resolve import resolve_target
from .scan import TensorInfo

__all__ = [
    "GgufFile", "ModelFile", "TensorInfo", "open_gguf", "open_model", "resolve_target"
]  # fmt: skip
