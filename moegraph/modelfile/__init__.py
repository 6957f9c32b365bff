"""GGUF model files: bounded scan, validation, mapping; nothing native reads a file before this."""

from __future__ import annotations

from .file import ModelFile, open_model
from .resolve import resolve_target
from .scan import TensorInfo

__all__ = ["ModelFile", "TensorInfo", "open_model", "resolve_target"]
