"""Which ggml type each tensor gets: by class, and by layer as dynamic quants do."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import TYPES

# The classes that a rule may name, and names for groups of them.
CLASSES = ("embd", "head", "attn", "ssm", "ssm_ab", "shexp", "gate_up", "down", "nextn")
GROUPS = {
    "dense": ("attn", "ssm", "ssm_ab", "shexp", "nextn"),
    "experts": ("gate_up", "down"),
    "all": CLASSES,
}
# The mix of the published 35B-A3B files, used for the figures in docs/benchmarks.
DEFAULT_MIX = "all=Q8_0,embd=F16,head=Q6_K,gate_up=Q4_K,down=Q5_K"


@dataclass(frozen=True)
class Rule:
    """One `class[@first-last]=TYPE` of a mix; layers None means every layer."""

    classes: tuple[str, ...]
    layers: range | None
    type: str


class Mix:
    """A list of rules; the last one that matches wins."""

    def __init__(self, text: str) -> None:
        self.rules = [_parse(part) for part in text.split(",") if part]

    def type_of(self, cls: str, il: int | None) -> str:
        """Return the type of class `cls` in layer `il` (None outside the layers)."""
        for rule in reversed(self.rules):
            if cls in rule.classes and (rule.layers is None or il in rule.layers):
                return rule.type
        return "F32"


def _parse(part: str) -> Rule:
    left, _, name = part.partition("=")
    cls, _, layers = left.partition("@")
    classes = GROUPS.get(cls, (cls,) if cls in CLASSES else ())
    if not classes:
        known = ", ".join((*CLASSES, *GROUPS))
        raise ValueError(f"mix {part!r}: unknown tensor class {cls!r}, use one of {known}")
    if name not in TYPES:
        raise ValueError(f"mix {part!r}: unknown type {name!r}, use one of {', '.join(TYPES)}")
    return Rule(classes, _layers(part, layers), name)


def _layers(part: str, text: str) -> range | None:
    if not text:
        return None
    first, _, last = text.partition("-")
    if not first.isdigit() or (last and not last.isdigit()):
        raise ValueError(f"mix {part!r}: layers must be N or N-M")
    return range(int(first), int(last or first) + 1)
