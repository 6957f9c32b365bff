"""Which experts of the next layer to upload before its router has chosen.

The residual stream changes little from layer to layer, so a layer's router, applied to the input of
the router before it, predicts much of its choice. A correct prediction starts an upload early. A
wrong one costs an upload that a real miss may have to wait for, and every prediction takes time on
the device. The sum depends on the model, the placement and the machine, so it is measured at run
time: tokens with and without prefetching, in turns; the faster way is kept for a while.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

# Experts prefetched for a layer: about as many as are uploaded while one layer runs.
MAX_PREFETCH = 2
# Prefetching must save this share of a token's time.
_MIN_GAIN = 0.01
# A trial: turns of _N_TURN tokens, without and with prefetching alternately, so that other changes
# (context, a cache that fills) affect both alike. The first turn of each is not counted, because
# graphs may be captured in it.
_N_TURN, _N_TURNS = 8, 16
# Tokens until the next trial.
_N_KEPT = 2048


class PrefetchController:
    """Chooses which predicted experts to upload, and measures whether that makes tokens faster.

    n_predicted, n_right: sums of experts that were prefetched, and that were then missed. enabled:
    whether passes should predict and prefetch now.
    """

    def __init__(self, n_predictable: int) -> None:
        """Begin a trial; n_predictable: layers whose missing experts can be predicted."""
        self.n_predicted = 0
        self.n_right = 0
        self.enabled = False
        self._is_off = n_predictable == 0
        self._left = _N_TURN  # tokens until the turn ends, or until the next trial
        self._turn = 0  # _N_TURNS while no trial is under way
        self._times: tuple[list[float], list[float]] = [], []  # without, with
        self._open: tuple[int, Sequence[int]] | None = None

    def end_token(self, seconds: float) -> None:
        """Note the seconds of a token; end a turn or a trial if it is due."""
        if self._is_off:
            return
        if 2 <= self._turn < _N_TURNS:
            self._times[self.enabled].append(seconds)
        self._left -= 1
        if self._left:
            return
        self._turn = (self._turn + 1) % (_N_TURNS + 1)
        if self._turn < _N_TURNS:
            self.enabled, self._left = self._turn % 2 == 1, _N_TURN
            return
        without, prefetched = map(statistics.median, self._times)
        self.enabled, self._left = prefetched < (1.0 - _MIN_GAIN) * without, _N_KEPT
        for times in self._times:
            times.clear()

    def predicted(self, il: int, absent: Sequence[int]) -> Sequence[int]:
        """Take the predicted absent experts of layer il, best first; return those to upload."""
        self.discard()
        self._open = il, absent[:MAX_PREFETCH]
        return self._open[1]

    def score(self, il: int, missing: Collection[int]) -> None:
        """Compare the open prediction with the missing experts of layer il."""
        if self._open is None:
            return
        at, predicted = self._open
        self._open = None
        self.n_predicted += len(predicted)
        if at == il:
            self.n_right += sum(expert in missing for expert in predicted)

    def discard(self) -> None:
        """Count the open prediction as wrong; nothing used it."""
        self.score(-1, ())
