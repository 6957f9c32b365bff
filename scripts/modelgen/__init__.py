"""Write synthetic GGUF files of any shape with numpy alone."""

from __future__ import annotations
