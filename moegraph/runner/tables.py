"""The slot tables of the device: their host copy, and its upload."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..experts.residency import TableRow
from ..ggml.device import Device
from ..ggml.handles import Owner
from ..resident.stage import Stage


class HostRows(Owner):
    """Pinned host rows to upload; array: I32, numpy shape [n_rows, n]. addresses: of the rows."""

    def __init__(self, device: Device, n_rows: int, n: int) -> None:
        self.host = self.own(device.host_buffer(4 * n_rows * n))
        self.array: npt.NDArray[np.int32] = self.host.array[: 4 * n_rows * n].view(np.int32)
        self.array = self.array.reshape(n_rows, n)
        self.addresses: list[Any] = [self.host.address(4 * row * n) for row in range(n_rows)]


class SlotTables(Owner):
    """Host copy of the cache's tables, and its upload to the device.

    A row holds a layer's slot table and, if the layer's graph fetches, its victim list, a zero, and
    how many victims may be taken for what is fetched ahead. The host writes a row as soon as it
    knows of a change, mostly while the device computes. rows: I32 numpy [n_layer, stride].
    """

    def __init__(self, stage: Stage) -> None:
        self._first = stage.layers.start
        self._device, self._banks = stage.device, stage.banks
        stride = stage.banks.table_stride
        self._rows = self.own(HostRows(stage.device, len(stage.layers), stride))
        self._n_expert, self._n_victims = stage.hp.n_expert, stage.banks.n_victims
        self.rows = self._rows.array
        # as on the device: the rows of full layers never change
        self.rows[:, : self._n_expert] = np.arange(self._n_expert)
        self.rows[:, self._n_expert :] = -1
        self.rows[:, self._n_expert + 2 * self._n_victims :] = 0
        self._is_due = False

    def write(self, changed: TableRow) -> None:
        """Copy a layer's new row."""
        il, table, victims, n_landing = changed
        row, n = self.rows[il - self._first], self._n_expert
        row[:n] = table
        if victims is not None:
            n_listed = n + 2 * len(victims)
            # several times faster than to assign the list
            row[n:n_listed] = np.fromiter(chain.from_iterable(victims), np.int32, 2 * len(victims))
            row[n_listed : n + 2 * self._n_victims] = -1  # a graph may read more than there are
        row[n + 2 * self._n_victims + 1] = n_landing
        self._is_due = True

    def changed(self) -> None:
        """Note that others have changed rows."""
        self._is_due = True

    def send(self) -> None:
        """Enqueue the upload of all rows, if any changed, after passes that read the old ones."""
        if self._is_due:
            # one copy for all rows: a small copy takes about 2 us, whatever its size
            self._device.send(self._banks.all_tables, self._rows.host, 0, self._rows.array.nbytes)
            self._is_due = False
