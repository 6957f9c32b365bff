"""How many rows of a prompt are computed at a time, if the user does not say it. Pure arithmetic.

Longer chunks are faster: on an H200 with all experts resident, 2,048 rows at a time read 13,600
tokens a second, 1,024 rows 12,800, 512 rows 10,600. But their intermediates take memory from
experts (35B-A3B: 0.9 GiB more), and every token of an answer pays for that.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import CPU_ROWS, EngineConfig
from .planner import Footprint

# What is tried, the fastest first. More rows are hardly faster.
_CHUNKS = (2048, 1024, 512, 256)
_LEAST = 128
# Longer chunks may take so much of the memory for experts. A tenth fewer resident experts make an
# answer 2 to 5 % slower (`moegraph simulate`).
_SHARE = 1 / 12


def choose_rows(
    config: EngineConfig, budget: int | None, need_of: Callable[[int], Footprint]
) -> int:
    """Return the rows of a chunk: what the user set, or the most that experts can afford.

    budget: device bytes; None without a limit. need_of: what the model needs with chunks of so many
    rows.
    """
    if config.n_ubatch is not None:
        return config.n_ubatch
    if budget is None:
        return CPU_ROWS
    if config.cache_slots is None and config.pin_layers is None:
        for n_rows in (*_CHUNKS, _LEAST):  # nothing is as good as all experts
            need = need_of(n_rows)
            if need.fixed + need.experts <= budget:
                return n_rows
    least = need_of(_LEAST)
    set_bytes = (config.cache_slots or 0) * max(least.slot_bytes)
    set_bytes += (config.pin_layers or 0) * least.n_expert * max(least.slot_bytes)
    left = budget - least.fixed - least.staging - least.ring - set_bytes
    # what slots and layers that the user set leave has no other use
    share = 1.0 if None not in (config.cache_slots, config.pin_layers) else _SHARE
    for n_rows in _CHUNKS:
        need = need_of(n_rows)
        if need.fixed + need.staging - least.fixed - least.staging <= share * left:
            return n_rows
    return _LEAST
