"""Kinds of passes and of steps of a sweep, and how a pass may handle missing experts."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

# Rows for which the CPU has memory to compute missing experts.
MAX_CPU_ROWS = 32
# Rows of a pass whose graphs can fetch missing experts, and the ids that they then look up:
# MOEGRAPH_FETCH_IDS (moegraph.h).
MAX_FETCH_ROWS, MAX_FETCH_IDS = 32, 256
# A longer piece of a prompt would evict much of what a layer holds.
SHORT_PROMPT = 32
# Tokens of a sequence that drafters need not have computed yet, at most: then one graph computes
# them all.
MOST_BEHIND = 64


class Kind(Enum):
    """What a pass is for.

    PREFILL: rows of a prompt. DECODE: the next row of each sequence. VERIFY: trees of drafted rows,
    of which none, some or all will be committed.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


class MissRules(NamedTuple):
    """What a pass may do about missing experts; `rules_of` decides it once for each pass.

    admits: give them slots; otherwise they only pass through staging. fetches: its graphs may fetch
    them. on_cpu: the CPU may compute them.
    """

    admits: bool
    fetches: bool
    on_cpu: bool


class SweepStep(NamedTuple):
    """What the next step of a sweep computes, as far as its time depends on it.

    kind: "recurrent" or "attention": a chunk in such a layer, of n_rows rows, which attend to n_kv
    positions ("attention" only). "experts": those that a layer misses. "sum": a chunk's experts.
    "head": the last one.
    """

    kind: str
    n_rows: int
    n_kv: int = 0


@cache
def rules_of(kind: Kind, n_tokens: int) -> MissRules:
    """Return what a pass of a kind with n_tokens rows may do about missing experts.

    A short piece of a prompt, such as the last one, may do what decode does.
    """
    may = kind is not Kind.PREFILL or n_tokens <= SHORT_PROMPT
    return MissRules(
        admits=may,
        fetches=may and n_tokens <= MAX_FETCH_ROWS,
        on_cpu=may and n_tokens <= MAX_CPU_ROWS,
    )
