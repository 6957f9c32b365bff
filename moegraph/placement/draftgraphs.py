"""Device memory of the graphs of drafters that a device captures: of all that texts use at once.

Each graph is for a length of a draft. A DFlash drafter's is also for a sequence and for as many
rows of its rings as the sequence needs now, or for a number of sequences. Others are dropped as new
ones are built.
"""

from __future__ import annotations

from ..arch.base import Architecture
from ..arch.dflash import DFlashHParams
from ..config import EngineConfig
from ..resident.draftlayout import (
    CHUNK,
    MOST_JOINT,
    N_TAKEN,
    built_length,
    joint_lengths,
    ring_shapes,
)
from ..resident.kvpool import PoolShape
from ..resident.layout import CAPTURED_NODE_BYTES, MAX_MTP_DRAFT, MTP_ROWS, USUAL_MTP_DRAFT
from .drafters import Sources
from .footprint import sweep_rows

# Nodes of a step of a chain of the MTP block, besides two for each expert that it uses, and of
# both graphs of known rows.
_STEP, _KNOWN = 84, 54
# Nodes of a layer over a block and over rows that are taken, of a tap, and of the rest of a graph.
_LAYER, _LAYER_KEYS, _TAP, _REST = 34, 9, 4, 8
# Nodes of each drafted token with a Markov head.
_MARKOV = 14


def longest_draft(config: EngineConfig, most: int) -> int:
    """Return the most tokens that a draft has; most: that the drafter can propose."""
    limits = [most, most if config.draft_max is None else config.draft_max]
    if not config.ddtree:  # its budget is for rows, of which a path may have any number
        limits.append(config.n_draft)
    return max(min(limits), 1)


def captured_drafts(hp: Architecture, config: EngineConfig, n_ctx: int, sources: Sources) -> int:
    """Return the memory for all that is loaded; hp: of the model. config: after `with_drafts`."""
    total = mtp_graph_bytes(hp, config) if sources.mtp else 0
    if sources.draft:
        total += dflash_graph_bytes(sources.draft.hparams, config, n_ctx)
    return total


def mtp_graph_bytes(hp: Architecture, config: EngineConfig) -> int:
    """Return the memory of chains, and of known rows.

    hp: of the model. config: after `with_drafts`. Chains go on with the likeliest token, or with
    the winner of a race: there is room for all lengths of one kind, and for usual ones of both.
    """
    n = longest_draft(config, MAX_MTP_DRAFT)
    usual = min(n, USUAL_MTP_DRAFT)
    n_steps = max(n * (n + 1) // 2, usual * (usual + 1))
    chains = n_steps * (_STEP + 2 * hp.n_expert_used) + max(n, 2 * usual) * _REST
    return CAPTURED_NODE_BYTES * (chains + MTP_ROWS.bit_length() * _KNOWN)


def dflash_graph_bytes(hp: DFlashHParams, config: EngineConfig, n_ctx: int) -> int:
    """Return the memory of drafts of every length for each sequence, and of a part of a prompt.

    hp: of the drafter. config: after `with_drafts`.
    """
    n = longest_draft(config, hp.max_draft)
    lengths = {built_length(at, hp.max_draft) for at in range(1, n + 1)}
    block = _LAYER * hp.n_layer + _REST
    drafts = config.n_seq * len(lengths) * block
    if hp.markov_rank:
        # a sequence's drafts that follow winners are of any length, as are trees of one that is
        # alone
        drafts = (config.n_seq + 1) * (n * (block + _REST) + _MARKOV * n * (n + 1) // 2)
        drafts += len(lengths) * (block + _REST + _MARKOV * max(lengths))
    for m in range(2, min(config.n_seq, MOST_JOINT) + 1):
        for each in joint_lengths(n, m, not hp.samples_anchor):
            drafts += block + (_MARKOV * each if hp.markov_rank else 0)
    keys = _LAYER_KEYS * hp.n_layer + _TAP * len(hp.taps) + _REST
    shape = PoolShape.of(config, n_ctx)
    rings = ring_shapes(hp, shape.most_seen(config.draft_ctx_max))
    chunk = min(CHUNK, *(ring.n_cells for ring in rings))
    n_sweep = sweep_rows(min(config.n_rows, shape.n_ctx), shape.n_ctx)
    # of tokens that were taken, of a part of a prompt, and of the end of another
    n_keys = N_TAKEN.bit_length() + -(-n_sweep // chunk) + 1
    return CAPTURED_NODE_BYTES * (drafts + n_keys * keys)
