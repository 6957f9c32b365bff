"""Which experts cross the link in a sweep, and in which order.

A sweep computes a prompt layer by layer. The experts of a layer that have no slot pass through a
ring of groups of slots. A group is filled with experts of one layer, read by all rows that chose
one of them, and then filled again. Bookkeeping only: no device, no bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from ..errors import InternalError

# Share of what is sent that may be sent in vain, and the rows from which it is the lower one.
_WASTE, _WASTE_LONG, _LONG = 0.08, 0.01, 2048
# Experts of a layer that are worth a risk: they cross while the layer before ends and the router of
# this one works, when nothing else would. Beyond those, the chance to be in vain must be lower.
_COVER, _SURE = 32, 0.01
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass
class Group:
    """Slots of the ring that are filled and given back together.

    index: its place in the ring. il, experts: the layer whose experts are in it, in the order of
    the slots.
    """

    index: int
    il: int = -1
    experts: list[int] = field(default_factory=list)


class Crossing:
    """The order in which experts enter the ring.

    n_groups groups of n_each slots. Experts are sent in the order in which they are asked for, each
    once for a layer, until the layer is left.
    """

    def __init__(self, n_groups: int, n_each: int) -> None:
        self.n_each = n_each
        self._free = deque(Group(at) for at in range(n_groups))
        self._held: deque[Group] = deque()  # oldest first
        self._queue: deque[tuple[int, int]] = deque()  # (layer, expert)
        self._asked: dict[int, set[int]] = {}

    def ask(self, il: int, experts: Iterable[int]) -> None:
        """Queue experts of layer il that were not asked for before."""
        asked = self._asked.setdefault(il, set())
        for expert in experts:
            if expert not in asked:
                asked.add(expert)
                self._queue.append((il, expert))

    def asked(self, il: int) -> frozenset[int]:
        """Return the experts of layer il that were asked for."""
        return frozenset(self._asked.get(il, ()))

    def waiting(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield up to n (layer, expert) that are asked for and not sent, in order."""
        return islice(self._queue, n)

    @property
    def n_room(self) -> int:
        """Slots of the groups that are free, if nothing is queued for them."""
        return 0 if self._queue else len(self._free) * self.n_each

    def sends(self) -> Iterator[tuple[Group, list[tuple[int, int]], bool]]:
        """Yield (group, experts and their slots in it, whether it was empty) to upload now."""
        while self._queue:
            il = self._queue[0][0]
            group, is_new = self._held[-1] if self._held else None, False
            if group is None or group.il != il or len(group.experts) == self.n_each:
                if not self._free:
                    return
                group, is_new = self._free.popleft(), True
                group.il = il
                group.experts.clear()
                self._held.append(group)
            pairs = []
            while self._queue and self._queue[0][0] == il and len(group.experts) < self.n_each:
                expert = self._queue.popleft()[1]
                pairs.append((expert, len(group.experts)))
                group.experts.append(expert)
            yield group, pairs, is_new

    def held(self, il: int) -> list[Group]:
        """Return the groups of layer il that are not given back, the first filled first."""
        return [group for group in self._held if group.il == il]

    def give_back(self, group: Group) -> None:
        """Note that all graphs which read the group have been launched."""
        self._held.remove(group)
        self._free.append(group)

    def leave(self, il: int) -> None:
        """Forget what was asked for of layer il; groups may still have its experts."""
        if any(queued == il for queued, _ in self._queue):
            raise InternalError(f"layer {il}: experts were asked for and not sent")
        self._asked.pop(il, None)


class Forecast:
    """Which experts a sweep may send before a router has chosen them, without sending too much.

    The share of experts that were sent and then not chosen stays near a limit, which is lower for
    long prompts: they hide more copies behind computing.
    """

    def __init__(self, n_rows: int) -> None:
        self._share = _WASTE if n_rows < _LONG else _WASTE_LONG
        self._n_rows = n_rows
        self._n_sent = 0
        self._n_wasted = 0.0
        self._order: list[int] = []  # experts of the layer, the surest first
        self._unused: list[float] = []  # the chance of each that it is not chosen

    def note(self, n_chosen: int, n_unused: int) -> None:
        """Note how many experts of a layer were sent and chosen, and sent and not chosen."""
        self._n_sent += n_chosen
        self._n_wasted += n_unused

    def begin(self, counts: npt.NDArray[np.float64], absent: Longs, n_used: int) -> None:
        """Begin a layer of which some experts are absent.

        counts [n_expert]: how often each was chosen so far. An expert that was chosen c times in m
        rows is not chosen in n further rows with a chance of about (1 + n / m) ** -c.
        """
        total, chosen = float(counts.sum()), counts[absent]
        order = np.argsort(-chosen, kind="stable") if total else np.zeros(0, dtype=np.int64)
        unused = (1.0 + self._n_rows * n_used / max(total, 1.0)) ** -chosen[order]
        n = max(_COVER, int(np.searchsorted(unused, _SURE)))
        self._order, self._unused = absent[order[:n]].tolist(), unused[:n].tolist()

    def likely(self, most: int) -> list[int]:
        """Return up to `most` further experts that the prompt will hardly miss, the surest first.

        None of them is returned again.
        """
        n, wasted = 0, 0.0
        for chance in self._unused[:most]:
            wasted += chance
            if wasted > self._share * (self._n_sent + n + 1) - self._n_wasted:
                break
            n += 1
        found, self._order, self._unused = self._order[:n], self._order[n:], self._unused[n:]
        return found


def padded(n: int) -> int:
    """Return the number of places of a graph for n: above n, and one of four of an octave."""
    step = max(16, 1 << max(0, n.bit_length() - 3))
    return max(32, (n // step + 1) * step)
