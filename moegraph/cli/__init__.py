"""The command line: one file for each command; each error is one line."""

from __future__ import annotations

from .program import main as main
