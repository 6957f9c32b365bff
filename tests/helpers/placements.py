"""Where the experts of a small model are, for tests of prompts that are computed in sweeps."""

from __future__ import annotations

from typing import Any

EVERYWHERE: list[dict[str, Any]] = [{"mode": "whole"}, {"mode": "layered"}]
# Some experts have no slot.
MISSING: list[dict[str, Any]] = [
    {"cache_slots": 0, "pin_layers": 0, "miss": "stream"},
    {"cache_slots": 60, "miss": "stream", "host_pin": "all"},
    {"cache_slots": 40, "pin_layers": 0, "miss": "cpu"},
]
PLACEMENTS = [*EVERYWHERE, *MISSING]
# Missing in some layers, while others are full.
SOME_FULL: dict[str, Any] = {"cache_slots": 30, "pin_layers": 2, "miss": "stream"}
