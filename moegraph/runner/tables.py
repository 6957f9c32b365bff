"""Slot tables and victim lists of all layers, uploaded to the device in one copy."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..experts.passplan import TableRow
from ..ggml.device import Device
from ..resident.stage import Stage


class HostRows:
    """Pinned host rows to upload; array: I32, numpy shape [n_rows, n]. addresses: of the rows."""

    def __init__(self, device: Device, n_rows: int, n: int) -> None:
        self.host = device.host_buffer(4 * n_rows * n)
        self.array: npt.NDArray[np.int32] = self.host.array[: 4 * n_rows * n].view(np.int32)
        self.array = self.array.reshape(n_rows, n)
        self.addresses: list[Any] = [self.host.address(4 * row * n) for row in range(n_rows)]

    def close(self) -> None:
        """Free the memory."""
        self.host.close()


class SlotTables:
    """Host copy of the cache's tables, and its upload to the device.

    A row holds a layer's slot table and, if the layer's graph fetches, its victim list. The host
    writes a row as soon as it knows of a change, mostly while the device computes.
    """

    def __init__(self, stage: Stage) -> None:
        self._first = stage.layers.start
        self._device, self._banks = stage.device, stage.banks
        self._rows = HostRows(stage.device, len(stage.layers), stage.banks.table_stride)
        self._n_expert, self._n_victims = stage.hp.n_expert, stage.banks.n_victims
        # as on the device: the rows of full layers never change
        self._rows.array[:, : self._n_expert] = np.arange(self._n_expert)
        self._is_due = False

    def write(self, changed: TableRow) -> None:
        """Copy a layer's new row."""
        il, table, victims = changed
        row, n = self._rows.array[il - self._first], self._n_expert
        row[:n] = table
        if victims is not None:
            n_listed = n + 2 * len(victims)
            # several times faster than to assign the list
            row[n:n_listed] = np.fromiter(chain.from_iterable(victims), np.int32, 2 * len(victims))
            row[n_listed : n + 2 * self._n_victims] = -1  # a graph may read more than there are
        self._is_due = True

    def send(self) -> None:
        """Enqueue the upload of all rows, if any changed, after passes that read the old ones."""
        if self._is_due:
            # one copy for all rows: a small copy takes about 2 us, whatever its size
            self._device.send(self._banks.all_tables, self._rows.host, 0, self._rows.array.nbytes)
            self._is_due = False

    def close(self) -> None:
        """Free the memory."""
        self._rows.close()
