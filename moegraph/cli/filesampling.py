"""Sampling settings that a model file recommends; llama.cpp also uses them as defaults."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..errors import RequestError
from ..sampling import SamplingParams

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
    params: SamplingParams, kv: Mapping[str, object], chosen: Collection[str], n_vocab: int
) -> tuple[SamplingParams, dict[str, float]]:
    """Return params with the values that a file recommends, and those values by field.

    kv: metadata of the file. chosen: fields that the user has set; they stay as they are. A value
    out of range is ignored.
    """
    taken: dict[str, float] = {}
    for key, name in _FIELDS.items():
        value = kv.get(f"general.sampling.{key}")
        if name in chosen or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value) or (name in _WHOLE and value != int(value)):
            continue
        number: Any = int(value) if name in _WHOLE else round(float(value), _DECIMALS)
        try:
            params = replace(params, **{name: number}).validate(n_vocab)
        except RequestError:
            continue
        taken[name] = number
    return params, taken
