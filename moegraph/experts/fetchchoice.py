"""Whether the graphs of passes of several rows fetch missing experts, or the host sees to them.

How much several rows miss cannot be told in advance: rows of one text mostly choose what is
resident already, sequences of different texts need each its own experts. So the choice for a number
of rows follows from what its last passes missed.
"""

from __future__ import annotations

from .cost import MissWays

# Weight of the last pass in the mean of what passes miss.
_WEIGHT = 0.25
# A change makes other graphs run and other lists due, so it must pay more than a little.
_SLACK = 1.2


class FetchChoice:
    """The choice for each number of rows.

    ways: `fetch_rows` decides until something was missed, and alone where the CPU cannot help.
    """

    def __init__(self, ways: MissWays, most_rows: int) -> None:
        """most_rows: whose ids a look-up takes."""
        self._fetch_rows, self._most_rows = min(ways.fetch_rows, most_rows), most_rows
        self._limits, self._expected = ways.fetch_limits, ways.expected
        self._mean: dict[int, float] = {}
        self._learned: dict[int, bool] = {}

    def fetches(self, n_rows: int) -> bool:
        """Return whether graphs of n_rows rows fetch."""
        return self._learned.get(n_rows, n_rows <= self._fetch_rows)

    def learns(self, n_rows: int) -> bool:
        """Return whether `observe` should be told of passes of n_rows rows."""
        return self._fetch_rows > 0 and 1 < n_rows <= min(self._most_rows, len(self._limits))

    def observe(self, n_rows: int, n_missing: float) -> None:
        """Note how many experts a pass missed, the mean of the layers that can fetch."""
        mean = self._mean.get(n_rows, self._expected[n_rows - 1])
        self._mean[n_rows] = mean = mean + _WEIGHT * (n_missing - mean)
        slack = _SLACK if self.fetches(n_rows) else 1.0 / _SLACK
        self._learned[n_rows] = mean <= slack * self._limits[n_rows - 1]
