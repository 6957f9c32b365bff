"""Known models, and in which quantization each fits.

scripts/gen_known.py computes known.json: published shapes, in about the types of published files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .planner import Footprint

_TABLE = Path(__file__).with_name("known.json")


@dataclass(frozen=True)
class KnownModel:
    """A model in one quantization.

    repo: on Hugging Face. n_bytes: of the file. need: with a context of 4,096. token: as of
    `Machine.scaled`.
    """

    name: str
    repo: str
    quant: str
    n_bytes: int
    need: Footprint
    token: tuple[int, int, int]


def known_models(room: int) -> Iterator[KnownModel]:
    """Yield each model in its largest quantization for so many bytes of memory, or the smallest.

    The most used models come first.
    """
    best: dict[str, KnownModel] = {}
    for row in json.loads(_TABLE.read_text("utf-8")):  # larger quantizations come first
        if row["name"] not in best or best[row["name"]].n_bytes > room:
            need = row.pop("need")
            sizes = tuple(size for n, size in need.pop("slot_bytes") for _ in range(n))
            token, need = tuple(row.pop("token")), Footprint(slot_bytes=sizes, **need)
            best[row["name"]] = KnownModel(**row, need=need, token=token)
    yield from best.values()
