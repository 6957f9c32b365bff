"""For which machine `moegraph plan` predicts: the one that was named, this one, or a usual one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..units import format_bytes

if TYPE_CHECKING:
    from ..experts.cost import Machine
    from ..ggml.nvml import Card

AUTO = "auto"


@dataclass(frozen=True)
class Assumption:
    """What speeds are predicted for: a machine that was named, or else this one's card, if any."""

    named: Machine | None
    card: Card | None

    @classmethod
    def of(cls, asked: str) -> Assumption:
        """Return what --machine asks for; `auto` takes the card that the engine would."""
        from ..experts.machines import find_machine
        from ..ggml.nvml import gpu_card

        if asked != AUTO:
            return cls(find_machine(asked), None)
        return cls(None, gpu_card())

    def machine(self, cards: Sequence[int]) -> Machine:
        """Return the machine for a budget: the bytes of one card, or of several.

        Unless one was named, it is this machine's if its card has so much memory, or else one with
        a usual card of that size; of several cards, the smallest decides.
        """
        from ..experts.machines import CARD_SHARE, usual_card

        if self.named:
            return self.named
        if self.card and max(cards) * CARD_SHARE <= self.card.n_bytes:
            return _machine(self.card)
        return usual_card(min(cards))

    def whatever_size(self) -> Machine:
        """Return the machine for cards of any size: this one's, or `desktop` if it has no card."""
        from ..experts.machines import MACHINES

        if self.named:
            return self.named
        return _machine(self.card) if self.card else MACHINES["desktop"]


def _machine(card: Card) -> Machine:
    """Return the times of a card of this machine: measured for its kind, or computed."""
    from ..experts.machines import MACHINES, card_machine

    if card.name.startswith("NVIDIA H200"):  # a GH200 has another host
        return MACHINES["h200"]
    about = (
        f"this machine's card: {format_bytes(card.n_bytes)} with {card.memory_rate / 1e9:.0f} "
        f"GB/s, {card.link}; computed, with DDR5 assumed"
    )
    return card_machine(card.name, about, card.memory_rate, card.link_rate, card.arithmetic)


def assumed_text(machines: Sequence[Machine]) -> str:
    """Return in a line for which machines the speeds of budgets are predicted."""
    if len({machine.name for machine in machines}) == 1:
        return machines[0].title
    return "by size, the one in the last column; all but h200 are computed from data sheets"
