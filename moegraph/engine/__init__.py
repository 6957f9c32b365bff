"""The engine: a model loaded on a device, its passes, and the loop that generates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> object:
    """Import `Engine` on first use: other modules of this package need no native library."""
    if name != "Engine":
        raise AttributeError(f"module 'moegraph.engine' has no attribute {name!r}")
    from .engine import Engine

    return Engine
