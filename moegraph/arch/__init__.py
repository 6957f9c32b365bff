"""Model architectures: hyper-parameters, tensors and graphs."""

from __future__ import annotations

from .model import ModelFile, open_model

__all__ = ["ModelFile", "open_model"]
