"""How often drafts were right in earlier runs, as a routing profile keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of each drafter by name: for the first, second, ... drafted token, how often the text came to it,
# and how often it was right.
Counts = tuple[tuple[int, ...], tuple[int, ...]]
DraftCounts = Mapping[str, Counts]

# Drafters and positions that a profile has, at most; numbers of it, and lists and objects.
MAX_DRAFTERS, MAX_DEPTH = 8, 32
MAX_NUMBERS, MAX_LISTS = 2 * MAX_DRAFTERS * MAX_DEPTH, 3 * MAX_DRAFTERS
# More drafts of a drafter than these are first halved, so that what it is now counts more.
_MAX_DRAFTS = 1 << 12


def added(known: DraftCounts, more: DraftCounts) -> dict[str, Counts]:
    """Return the counts of two together; of more drafters than there may be, the first ones."""
    found: dict[str, Counts] = {}
    for name in [*known, *(name for name in more if name not in known)][:MAX_DRAFTERS]:
        old, new = known.get(name, ((), ())), more.get(name, ((), ()))
        n_new, n_old = sum(new[0][:1]), sum(old[0][:1])
        while n_old and n_new + n_old > _MAX_DRAFTS and n_old > n_new:
            old, n_old = (_halved(old[0]), _halved(old[1])), n_old // 2
        depth = min(max(len(old[0]), len(new[0])), MAX_DEPTH)
        if depth:
            found[name] = _sum(old[0], new[0], depth), _sum(old[1], new[1], depth)
    return found


def less(counts: DraftCounts, earlier: DraftCounts) -> dict[str, Counts]:
    """Return what was counted since earlier."""
    found: dict[str, Counts] = {}
    for name, (seen, right) in counts.items():
        before = earlier.get(name, ((), ()))
        n = len(seen)
        parts = (
            _sum(a, tuple(-x for x in b), n) for a, b in ((seen, before[0]), (right, before[1]))
        )
        since = tuple(parts)
        if any(since[0]):
            found[name] = since[0], since[1]
    return found


def _halved(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // 2 for n in counts)


def _sum(a: tuple[int, ...], b: tuple[int, ...], n: int) -> tuple[int, ...]:
    padded = ((*counts, *[0] * n)[:n] for counts in (a, b))
    return tuple(x + y for x, y in zip(*padded))


def to_fields(counts: DraftCounts) -> dict[str, dict[str, list[int]]]:
    """Return plain values for a file."""
    return {name: {"seen": [*seen], "right": [*right]} for name, (seen, right) in counts.items()}


def from_fields(content: Any) -> dict[str, Counts] | None:
    """Return the counts of a file; None if these are none. A file may be without."""
    if content is None:
        return {}
    if not isinstance(content, dict) or len(content) > MAX_DRAFTERS:
        return None
    found: dict[str, Counts] = {}
    for name, entry in content.items():
        if not (name.isascii() and name.isalnum() and len(name) <= 16 and isinstance(entry, dict)):
            return None
        seen, right = _counts(entry.get("seen")), _counts(entry.get("right"))
        if not (seen and right and len(seen) == len(right)):
            return None
        if any(n > of for n, of in zip(right, seen)):
            return None
        found[name] = seen, right
    return found


def _counts(values: Any) -> tuple[int, ...]:
    """Return a list of counts that is not too long, () if it is none."""
    if not isinstance(values, list) or len(values) > MAX_DEPTH:
        return ()
    is_good = all(type(n) is int and 0 <= n < 1 << 31 for n in values)
    return tuple(values) if is_good else ()
