"""How often drafts were right in earlier runs, as a routing profile keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
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
        if old[0] or new[0]:
            seen, right = summed(old[0], new[0]), summed(old[1], new[1])
            found[name] = seen[:MAX_DEPTH], right[:MAX_DEPTH]
    return found


def less(counts: DraftCounts, earlier: DraftCounts) -> dict[str, Counts]:
    """Return what was counted since earlier."""
    found: dict[str, Counts] = {}
    for name, (seen, right) in counts.items():
        before = earlier.get(name, ((), ()))
        since = summed(seen, [-n for n in before[0]])
        if any(since):
            found[name] = since, summed(right, [-n for n in before[1]])
    return found


def _halved(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // 2 for n in counts)


def summed(counts: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    """Return the sums of counts by position; the shorter one ends with zeros."""
    return tuple(map(sum, zip_longest(counts, more, fillvalue=0)))


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
