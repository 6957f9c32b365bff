"""--deterministic: a text depends on nothing but its prompt, with the models that matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.text_ways import LENGTHS, ON_GPU, all_ways, places, prompts_of, reference

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine

N_CTX, N_TOKENS = 1024, 32
HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.py.txt"
SHIPPED = Path(__file__).parents[2] / "moegraph" / "models"


def source_of(path: Path) -> list[int]:
    """Return token ids to take prompts from: text for a trained model, else random ones."""
    if path.parent == SHIPPED:
        with Engine.load(path, EngineConfig(device="cpu", n_ctx=256)) as engine:
            return engine.tokenizer.encode(HELD_OUT.read_text("utf-8")[:20000])
    with open_model(path) as file:
        n_vocab = file.hparams.n_vocab
    return [int(token) for token in np.random.default_rng(3).integers(0, n_vocab, 8000)]


@pytest.mark.parametrize("place", places(8, 32))
@pytest.mark.parametrize("name", ["tiny", "tiny-oss", "mini35b", "qwen3moe"])
def test_texts_depend_on_nothing_else(
    name: str, place: str, model_file: Callable[[str], Path]
) -> None:
    path = SHIPPED / f"{name}.gguf" if name.startswith("tiny") else model_file(name)
    ids = source_of(path)
    wanted = reference(path, ON_GPU, prompts_of(ids), N_TOKENS, N_CTX, ids[:17])
    for found in all_ways(path, ON_GPU, wanted, N_TOKENS, N_CTX, [place]):
        assert found.differ == [], found.name
        assert found.n == 5 * len(LENGTHS) and found.n_hits > 0
