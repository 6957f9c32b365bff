"""What a pass does about missing experts, as values: for the pass and for each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pairs = list[tuple[int, int]]  # (expert, slot)


class MissMode(NamedTuple):
    """How a pass deals with missing experts; decided once, by `Residency`. Graphs depend on it.

    fetch_layers: layers whose graph fetches them. short_layers: those of them whose slots may not
    suffice, so that the host sees to the rest. admits: other missing experts may get slots. cpu:
    the CPU may compute them.
    """

    fetch_layers: frozenset[int] = frozenset()
    short_layers: frozenset[int] = frozenset()
    admits: bool = False
    cpu: bool = False


# What the device must know of a layer from now on: il; its table I32 numpy [n_expert], expert ->
# slot or -1; its victims in order, (slot, its expert or -1), or None if no graph fetches there.
TableRow = tuple[int, npt.NDArray[np.int32], list[tuple[int, int]] | None]


@dataclass(slots=True)
class PassTerms:
    """What a pass of n_tokens rows does about missing experts, and what precedes it.

    waits: experts were promoted, and their uploads must end before this pass. rows: to be sent to
    the device.
    """

    n_tokens: int
    mode: MissMode
    waits: bool
    rows: list[TableRow]


class FetchedLayer(NamedTuple):
    """What the graph of a layer fetched: experts, in this order.

    row: the layer's table row if it changed. rest: what happens to the missing experts that got no
    slot, if there are any.
    """

    experts: list[int]
    row: TableRow | None
    rest: Remedy | None


@dataclass(slots=True)
class Remedy:
    """What happens to the missing experts of a layer.

    admitted: to be uploaded into slots of the layer. staged: to be uploaded into staging. on_cpu:
    for the CPU. promoted: those of them to be uploaded afterwards.
    """

    admitted: Pairs
    staged: list[int]
    on_cpu: list[int]
    promoted: Pairs
