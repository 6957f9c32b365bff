"""The command line: one file a command, every option declared once, every error one line."""

from __future__ import annotations

from .program import main

__all__ = ["main"]
