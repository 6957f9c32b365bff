"""Small synthetic drafters for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from . import shared  # makes scripts/ importable

from modelgen.drafter import DraftShape, write_drafter  # isort: skip

if TYPE_CHECKING:
    from moegraph.engine import Engine

assert shared
# For the small synthetic models of 1024 tokens, width 256 and 8 layers.
SMALL = DraftShape(
    n_vocab=1024, n_embd=256, windows="sf", n_head=4, n_head_kv=2, head_dim=64, n_ff=320,
    n_ctx_train=512, n_swa=24, target_layers=(1, 4, 6), mask_id=990, block_size=8,
)  # fmt: skip


def write_small(
    folder: Path, kind: str = "dflash", matrices: str = "F32", seed: int = 3, **changes: Any
) -> Path:
    """Write a small drafter as one of the formats; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("model.safetensors" if kind == "safetensors" else f"{kind}.gguf")
    write_drafter(path, replace(SMALL, **changes), kind, matrices, seed)
    return path


def damage(engine: Engine, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the target's embedding of a token be NaN."""
    embedding = engine.stage.weights.embedding
    assert embedding is not None
    rows = embedding.rows

    def damaged(tokens: np.ndarray, out: np.ndarray) -> None:
        rows(tokens, out)
        out[tokens == bad] = np.nan

    monkeypatch.setattr(embedding, "rows", damaged)
