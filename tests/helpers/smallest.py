"""The smallest budget that is enough: tests follow the planner's constants and repeat none."""

from __future__ import annotations

from collections.abc import Callable


def smallest(is_enough: Callable[[int], bool], limit: int = 1 << 13) -> int:
    """Return the smallest number up to a limit that is enough; larger ones are enough too."""
    low, high = 1, limit
    assert is_enough(limit)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low
