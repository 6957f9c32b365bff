"""Write synthetic GGUF files of any shape of random weights."""

from __future__ import annotations
