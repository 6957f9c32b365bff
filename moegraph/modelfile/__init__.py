"""GGUF model files: bounded scan, validation, mapping. Native code reads only checked files."""

from __future__ import annotations

from .file import GgufFile, ModelFile, open_gguf, open_model
from .resolve import resolve_target
from .scan import TensorInfo

__all__ = [
    "GgufFile", "ModelFile", "TensorInfo", "open_gguf", "open_model", "resolve_target"
]  # fmt: skip
