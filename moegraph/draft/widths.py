"""Which widths verify passes have: each has graphs of its own, so a few are used at first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# The first width, in rows; a draft of three tokens tells most about a drafter.
_FIRST = 4
# Another width is opened once it would have given so many more tokens than those that are open:
# about what its first passes cost, in plain steps.
_PRICE = 16.0


class Widths:
    """The widths of verify passes.

    every: all that there may be, in order. open: those that may be used, in order.
    """

    def __init__(self, every: Sequence[int], is_gradual: bool) -> None:
        """is_gradual: begin with one width; else all are open."""
        self.every = tuple(every)
        first = [w for w in every if w <= max(_FIRST, self.every[0])][-1:] if every else []
        self.open = tuple(first) if is_gradual else self.every
        self._missed: dict[int, float] = {}

    def miss(self, width: int, tokens: float) -> None:
        """Note that a width would have given so many tokens more than those that are open."""
        if width in self.open or tokens <= 0.0:
            return
        self._missed[width] = self._missed.get(width, 0.0) + tokens
        if self._missed[width] >= _PRICE:
            self.open = tuple(sorted((*self.open, width)))
            self._missed.clear()
