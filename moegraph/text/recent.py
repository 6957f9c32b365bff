"""What was used last, within a size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Remembers values; what was not used for longest goes when their sizes are more than `most`.

    Any thread may call it.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._known: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Return a value if it is known."""
        with self._lock:
            if key not in self._known:
                return None
            self._known.move_to_end(key)
            return self._known[key][0]

    def put(self, key: K, value: V, size: int) -> None:
        """Remember a value."""
        with self._lock:
            if key in self._known:
                self._size -= self._known.pop(key)[1]
            self._known[key] = value, size
            self._size += size
            while self._size > self._most:
                self._size -= self._known.popitem(last=False)[1][1]
