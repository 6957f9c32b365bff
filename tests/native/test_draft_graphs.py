"""Graphs of drafters: what a plan sets aside for those that a device captures is what they take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import write_small
from helpers.mtp import MtpModel

from moegraph.arch.draftfile import open_drafter
from moegraph.config import EngineConfig
from moegraph.draft.dflash import DFlashDrafter, DSparkDrafter
from moegraph.engine import Engine
from moegraph.engine.drafters import limit_graphs
from moegraph.placement.drafters import dflash_graph_bytes, mtp_graph_bytes
from moegraph.resident.draftlayout import built_length, joint_lengths
from moegraph.resident.layout import MTP_ROWS, USUAL_MTP_DRAFT

SHAPES: dict[str, dict[str, Any]] = {
    "current": {"windows": "sssssf", "n_swa": 64, "target_layers": (0, 1, 2, 3, 4, 5)},
    "april": {"windows": "ffffffff", "n_swa": 0, "target_layers": (0, 1, 2, 3, 5)},
    "dspark": {"windows": "fffff", "n_swa": 0, "markov_rank": 32, "target_layers": (0, 1, 2, 3, 5)},
    "reduced": {
        "windows": "fffff",
        "markov_rank": 32,
        "n_vocab_draft": 300,
        "target_layers": (1, 3),
    },
}


@pytest.mark.parametrize(
    ("shape", "n_seq"), [("current", 3), ("april", 1), ("dspark", 3), ("reduced", 1)]
)
def test_graphs_of_a_block_in_use_fit(
    open_engine: Callable[..., Engine], stack: ExitStack, tmp_path: Path, shape: str, n_seq: int
) -> None:
    """Every length for each sequence and for all, tokens taken in any number, a prompt in parts."""
    n_ctx = 2048
    engine = open_engine("float32", n_seq=n_seq, n_ctx=n_ctx, n_ubatch=512)
    changes = {"block_size": 7 if "markov_rank" in SHAPES[shape] else 16, **SHAPES[shape]}
    file = open_drafter(write_small(tmp_path, **changes))
    stack.callback(file.close)
    engine.runner.graphs.clear()
    layers = tuple(sorted(changes["target_layers"]))
    engine.stage.hidden_states.reserve(layers, 64, n_seq)
    kind = DSparkDrafter if "markov_rank" in changes else DFlashDrafter
    drafter = kind(engine.stage, file, n_ctx)
    stack.callback(drafter.close)
    config = EngineConfig(n_seq=n_seq, n_ctx=n_ctx, n_ubatch=512, n_draft=15)
    planned, graphs = dflash_graph_bytes(file.hparams, config, n_ctx), drafter.graphs
    limit_graphs([drafter], engine.hparams, config, n_ctx)
    assert graphs.max_device_bytes == planned
    longest = drafter.max_draft
    lengths = sorted({built_length(n, longest) for n in range(1, longest + 1)})
    for _ in range(3):  # in the first time, the block of intermediates grows
        n_built = graphs.n_built
        for slot in range(n_seq):
            drafter.restart(slot, np.arange(4, dtype=np.int32))
            for n in lengths:
                drafter._draft_graph(slot, n, drafter._rings.full_lengths)
            for n in range(1, longest + 1) if isinstance(drafter, DSparkDrafter) else ():
                drafter._drawn_graph(slot, n, drafter._rings.full_lengths)
                if slot == 0:
                    drafter._lists_graph(slot, n, drafter._rings.full_lengths)
        for m in range(2, n_seq + 1):
            for n in joint_lengths(longest, m, not file.hparams.samples_anchor):
                drafter._joint_graph(drafter._joint, m, n)
        for n in (1, 2, 4, 8, 16, 32, 64):
            drafter.context.keys_graph(n)
        for read in drafter.prompt_readers(0, np.zeros(n_ctx, dtype=np.int32), 0).values():
            read(drafter._memory.features, 0, n_ctx, 0)  # as if that were the output of a layer
    assert graphs.n_dropped == 0 and graphs.n_built == n_built
    assert graphs.n_device_bytes <= planned <= 1.3 * graphs.n_device_bytes


@pytest.mark.parametrize(
    ("n_draft", "n_kept", "n_vocab"), [(3, None, 0), (8, 8, 700), (15, None, 0)]
)
def test_graphs_of_the_mtp_block_in_use_fit(
    model_path: Callable[[str], Path], n_draft: int, n_kept: int | None, n_vocab: int
) -> None:
    """Chains of every length, or usual ones of both kinds; and known rows in any number."""
    settings = {"n_seq": 2, "n_kept": n_kept, "n_vocab": n_vocab}
    with MtpModel(model_path("mini35b"), MTP_ROWS, **settings) as model:
        drafter, graphs = model.drafter, model.drafter.graphs
        config = EngineConfig(n_seq=2, n_ctx=512, n_draft=n_draft)
        limit_graphs([drafter], model.hp, config, 512)
        planned, most = mtp_graph_bytes(model.hp, config), 0
        assert graphs.max_device_bytes == planned
        usual = min(n_draft, USUAL_MTP_DRAFT)
        for kinds in (range(1, n_draft + 1), ()), (range(1, usual + 1), range(1, usual + 1)):
            graphs.clear()
            for _ in range(3):  # in the first time, the block of intermediates grows
                n_built = graphs.n_built
                for races, lengths in enumerate(kinds):
                    for n in lengths:
                        drafter._chain(n, 512, bool(races))
                for n in [1 << at for at in range(9)]:
                    drafter._known(n)
                    drafter._accepted(n)
            assert graphs.n_dropped == 0 and graphs.n_built == n_built
            most = max(most, graphs.n_device_bytes)
        assert most <= planned <= 1.3 * most
