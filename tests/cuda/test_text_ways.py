"""--deterministic: a text depends on nothing but its prompt, with the models that matter."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from helpers.text_ways import (
    CHUNKS,
    LENGTHS,
    ON_GPU,
    Wanted,
    all_ways,
    places,
    prompts_of,
    reference,
)

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


@pytest.fixture(scope="module")
def wanted_of(
    model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Wanted]]:
    """Return a function from a name to the model and its texts, which one process computes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all processes of this run

    def find(name: str) -> tuple[Path, Wanted]:
        path = SHIPPED / f"{name}.gguf" if name.startswith("tiny") else model_file(name)
        texts = folder / f"texts of {name}.json"
        with texts.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not texts.exists():
                ids = source_of(path)
                wanted = reference(path, ON_GPU, prompts_of(ids), N_TOKENS, N_CTX, ids[:17])
                texts.write_text(json.dumps(asdict(wanted)))
        return path, Wanted(**json.loads(texts.read_text()))

    return find


# the names come in turn, so that processes that begin together compute texts of different models
@pytest.mark.parametrize("name", ["tiny", "tiny-oss", "mini35b", "qwen3moe"])
@pytest.mark.parametrize("place", places(8, 32))
@pytest.mark.parametrize("n_ubatch", CHUNKS)
def test_texts_depend_on_nothing_else(
    name: str, place: str, n_ubatch: int, wanted_of: Callable[[str], tuple[Path, Wanted]]
) -> None:
    path, wanted = wanted_of(name)
    (found,) = all_ways(path, ON_GPU, wanted, N_TOKENS, N_CTX, [place], [n_ubatch])
    assert found.differ == [], found.name
    assert found.n == 5 * len(LENGTHS) and found.n_hits > 0
