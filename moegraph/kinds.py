"""What a pass is for."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """What a pass is for.

    PREFILL: rows of a prompt. DECODE: the next row of each sequence. VERIFY: trees of drafted rows,
    of which none, some or all will be committed.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
