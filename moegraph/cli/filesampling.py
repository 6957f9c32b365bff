"""Sampling settings that a model file recommends; llama.cpp also uses them as defaults."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..errors import RequestError
from ..sampling import SamplingParams
from . import ui

# Keys of general.sampling and the fields of SamplingParams they fill.
_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
}
_WHOLE = ("top_k", "repeat_last_n")
# Files hold F32; llama.cpp reads them as text with this number of decimals.
_DECIMALS = 6


def recommended(
    params: SamplingParams, kv: Mapping[str, object], chosen: Collection[str], n_vocab: int,
    warned: set[str] | None = None,
) -> tuple[SamplingParams, dict[str, float]]:  # fmt: skip
    """Return params with the values that a file recommends, and those values by field.

    kv: metadata of the file. chosen: fields that the user has set; they stay as they are. Values
    out of range are left out, with one warning. warned: as in `options.load_engine`.
    """
    taken: dict[str, float] = {}
    wrong = []
    for key, name in _FIELDS.items():
        value = kv.get(f"general.sampling.{key}")
        if name in chosen or value is None:
            continue
        try:
            number = _number(value, name in _WHOLE)
            params = replace(params, **{name: number}).validate(n_vocab)
        except (RequestError, ValueError):
            wrong.append(f"general.sampling.{key} {reprlib.repr(value)}")
            continue
        taken[name] = number
    line = f"warning: out of range in the model file, and ignored: {', '.join(wrong)}"
    if wrong and line not in (warned or ()):
        ui.note(line)
        if warned is not None:
            warned.add(line)
    return params, taken


def _number(value: object, is_whole: bool) -> Any:
    """Return the value of a key; a ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError
    if not is_whole:
        return round(float(value), _DECIMALS)
    if value != int(value):
        raise ValueError
    return int(value)
