"""Brings to the last stage, where drafters are, what they want of an earlier one."""

from __future__ import annotations

from ..errors import InternalError
from ..ggml.ops import Tensor
from ..graphs.hidden import HiddenRows
from ..resident.stage import Stage
from .boundary import Boundary
from .sweep_batch import Tap


class Relay:
    """Copies taps of a stage to the last one: of passes to its `TapRows`, of prompts to memory."""

    def __init__(self, stage: Stage, last: Stage) -> None:
        """Allocate host memory; `reserve` allocates that for prompts.

        Raises:
            NativeError: there is no host memory.
        """
        self._stage, self._last = stage, last
        self._boundary = Boundary(stage.device, last.device)
        self._rows: HiddenRows | None = None

    def bring(self, n_rows: int) -> None:
        """Enqueue the copy of the taps of a pass that was launched in the stage."""
        mine, its = self._stage.taps, self._last.taps
        if n_rows > mine.n_rows:
            return  # the pass keeps none
        for il in mine.layers:
            size = 4 * self._stage.hp.n_embd * n_rows
            self._boundary.copy(mine.words, its.words, size, mine.offset(il), its.offset(il))

    def relayed(self, tap: Tap) -> Tap:
        """Return what calls a tap of a prompt with a copy of its rows."""

        def call(rows: Tensor, row: int, n: int, first: int) -> None:
            if self._rows is None:
                raise InternalError("there is no memory for the taps of a prompt")
            size = 4 * self._stage.hp.n_embd
            self._boundary.copy(rows, self._rows.all, size * n, size * row, size * row)
            tap(self._rows.all, row, n, first)

        return call

    def reserve(self, n_rows: int) -> None:
        """Make room for the taps of parts of prompts of up to n_rows rows.

        Raises:
            OutOfDeviceMemory: they do not fit.
        """
        self._rows = HiddenRows(self._last, n_rows)

    def close(self) -> None:
        """Free the memory."""
        self._boundary.close()
        if self._rows:
            self._rows.close()
