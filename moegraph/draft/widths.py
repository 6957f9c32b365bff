"""Which widths verify passes have: each has graphs of its own, so a few are used at first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# The first width, in rows; a draft of three tokens tells most about a drafter.
FIRST_WIDTH = 4


# Of the first passes of a width, in plain steps: above it, a pass has more rows than it needs
# rather than a width of its own.
_DEAR = 4.0


class Widths:
    """The widths of verify passes.

    every: all that there may be, in order. open: those that may be used, in order; another one is
    opened once it would have given as many more tokens as its first passes cost. are_dear: these
    cost several plain steps.
    """

    def __init__(self, every: Sequence[int], price: float) -> None:
        """price: what the first passes of a width cost, in plain steps; 0: all are open."""
        self.every = tuple(every)
        first = [w for w in every if w <= max(FIRST_WIDTH, self.every[0])][-1:] if every else []
        self.open = tuple(first) if price else self.every
        self._price = price
        self.are_dear = price > _DEAR
        self._missed: dict[int, float] = {}

    def have(self, widths: Iterable[int]) -> None:
        """Open widths whose graphs exist."""
        self.open = tuple(sorted({*self.open, *widths} & {*self.every}))

    def miss(self, width: int, tokens: float) -> None:
        """Note that a width would have given so many tokens more than those that are open."""
        if width in self.open or tokens <= 0.0:
            return
        self._missed[width] = self._missed.get(width, 0.0) + tokens
        if self._missed[width] >= self._price:
            self.open = tuple(sorted((*self.open, width)))
            self._missed.clear()
