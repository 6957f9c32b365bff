"""Typed, range-checked access to the key-value pairs of a GGUF header."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ModelFileError
from .reader import StringArray


class Metadata:
    """Key-value pairs of one header, with the byte offset of each key for messages.

    A key that begins with a point is one of the architecture that the file names. A getter without
    a default raises ModelFileError if its key is missing.
    """

    def __init__(
        self, path: os.PathLike[str] | str, values: dict[str, Any], offsets: dict[str, int],
        spelled: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """values: Python scalars, numpy arrays or StringArray. offsets: byte of each key.

        spelled: what the file calls a key, if it is no GGUF file.
        """
        self.path = path
        self.values = values
        self._offsets, self._spelled = offsets, spelled or {}

    def __contains__(self, key: str) -> bool:
        return self.full(key) in self.values

    def full(self, key: str) -> str:
        """Return a key as it is in `values`."""
        return f"{self.values['general.architecture']}{key}" if key.startswith(".") else key

    def error(
        self, key: str, what: str, kind: type[ModelFileError] = ModelFileError
    ) -> ModelFileError:
        """Return an error that names file, key and byte offset."""
        key = self.full(key)
        at = f" (at byte {self._offsets[key]})" if key in self._offsets else ""
        return kind(f"{self.path}: key {self._spelled.get(key, key)} {what}{at}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer of any width, in [low, high]."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {_kind(value)}; expected an integer")
        if not low <= value <= high:
            raise self.error(key, f"is {value}; allowed are {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite float in [low, high]."""
        value = self._value(key, default)
        if not isinstance(value, float):
            raise self.error(key, f"is {_kind(value)}; expected a floating-point number")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.error(key, f"is {value:g}; allowed are {low:g} to {high:g}")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {_kind(value)}; expected a string")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_kind(value)}; expected a boolean")
        return value

    def strings(self, key: str) -> StringArray:
        """Return an array of strings."""
        value = self._value(key, None)
        if not isinstance(value, StringArray):
            raise self.error(key, f"is {_kind(value)}; expected an array of strings")
        return value

    def integers(self, key: str, n: int, low: int, high: int) -> tuple[int, ...]:
        """Return n integers in [low, high]; a single integer stands for n equal ones."""
        value = self._value(key, None)
        if not isinstance(value, np.ndarray):
            return (self.integer(key, low, high),) * n
        if value.dtype.kind not in "iub":
            raise self.error(key, f"is {_kind(value)}; expected integers")
        if len(value) != n:
            raise self.error(key, f"has {len(value)} elements; expected {n}")
        wrong = [int(v) for v in value if not low <= int(v) <= high]
        if wrong:
            raise self.error(key, f"contains {wrong[0]}; allowed are {low} to {high}")
        return tuple(int(v) for v in value)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(self.full(key), default)
        if value is None:
            raise self.error(key, "is missing, and required")
        return value


def _kind(value: object) -> str:
    """Describe a value's type."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name}"
    if isinstance(value, (StringArray, list)):
        return "an array"
    names = {bool: "a boolean", int: "an integer", float: "a floating-point number"}
    return names.get(type(value), "a string")
