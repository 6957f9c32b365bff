"""Models, texts and engines that the regression and CUDA tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.shared import model_writer
from oracle.client import Oracle, OracleError, Step, StepResult, oracle_folder

if TYPE_CHECKING:
    from moegraph.engine import Engine

ROOT = Path(__file__).resolve().parents[2]

F32 = npt.NDArray[np.float32]

# One preset of each family but qwen35moe, for test_families.py and, among MODELS, for what all have
# in common.
FAMILIES = ("qwen3moe", "qwen3next", "glm47flash", "gemma4", "glm4moe", "gptoss", "olmoe")
# Those with attention over pages on CUDA; --deterministic refuses the others there.
WITH_PAGES = ("qwen3moe", "qwen3next", "gemma4", "glm4moe", "gptoss", "olmoe")
# The trained model and random ones: experts 32 to 512; every weight type; merged and separate
# gate_up; tied and own head; MTP block; head sizes 64, 128, 256; DeltaNet states 64 and 128.
MODELS = (
    "tiny", "legacy32", "kquant40", "iq64", "mxfp256", "float32", "mini35b", "glm4moe-groups",
    *FAMILIES,
)  # fmt: skip
TEXT_MODELS = (*MODELS, "tiny-oss")  # with the second trained model, for texts
KV_TYPES = ("f16", "q8_0", "q4_0")
# One model for each way of quantized K and V: rotated, and of each layer's own width; MLA has none.
QUANTIZED_KV = ("tiny", "kquant40", "gemma4", "glm47flash")
MODES = ("whole", "layered")
SEED = 20
THREADS = min(2, os.cpu_count() or 1)

HELD_OUT = ROOT / "tests" / "data" / "heldout.py.txt"


def held_out_text() -> str:
    """Return text no model was trained on. It is part of the checkout: without it, tests fail."""
    return HELD_OUT.read_text(encoding="utf-8")


class Models:
    """Test models by name, written once a session."""

    def __init__(self, folder: Path) -> None:
        self._random = model_writer(folder, SEED)

    def path(self, name: str) -> Path:
        """Return the file of a model: a trained one, which is part of the checkout, or random."""
        shipped = ROOT / "moegraph" / "models" / f"{name}.gguf"
        return shipped if shipped.is_file() else self._random(name)


class Upstream:
    """The oracle with its answers kept for the session.

    If it crashes, the test that saw it fails with one line, and the others are skipped.
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._rows: dict[Any, F32] = {}
        self._texts: dict[Any, list[list[int]]] = {}
        self._crash, self._is_told = "", False

    def logits(self, model: Path, tokens: Sequence[int], **cfg: Any) -> F32:
        """Return the logits of every token of a prompt, [n_tokens, n_vocab]."""
        return self._kept(model, [Step(tokens)], cfg)

    def parts(self, model: Path, parts: Sequence[Sequence[int]], **cfg: Any) -> F32:
        """Return the logits of all tokens of a sequence that is run in parts."""
        return self._kept(model, [Step(part) for part in parts], cfg)

    def decode_steps(
        self, model: Path, prompt: Sequence[int], more: Sequence[int], **cfg: Any
    ) -> F32:
        """Return the logits of `more`, run a token at a time after a prompt."""
        return self._kept(model, [Step(prompt, "none"), *(Step([t]) for t in more)], cfg)

    def texts(
        self, model: Path, prompts: Sequence[Sequence[int]], n: int, **cfg: Any
    ) -> list[list[int]]:
        """Return n greedy tokens after each prompt."""
        key = (model, str(prompts), n, tuple(sorted(cfg.items())))
        if key not in self._texts:
            self._texts[key] = self.oracle.greedy(model, prompts, n, **cfg)[0]
        return self._texts[key]

    def _kept(self, model: Path, steps: Sequence[Step], cfg: dict[str, Any]) -> F32:
        asked = tuple((tuple(s.tokens), s.rows) for s in steps)
        key = (model, asked, tuple(sorted(cfg.items())))
        if key not in self._rows:
            results = self._run(model, steps, cfg)
            self._rows[key] = np.concatenate([r.logits for r in results if r.logits is not None])
        return self._rows[key]

    @property
    def oracle(self) -> Oracle:
        """The process; fails or skips the test that asks for one that has crashed."""
        if self._crash and not self._is_told:
            self._is_told = True
            pytest.fail(f"unpatched llama.cpp crashed: {self._crash}", pytrace=False)
        if self._oracle.has_ended:
            pytest.skip(
                f"unpatched llama.cpp crashed in an earlier test: {self._crash}".rstrip(": ")
            )
        return self._oracle

    def has_gpu(self) -> bool:
        """Return whether the oracle has a device; also if it crashed, which a test then tells."""
        try:
            return bool(self._oracle.info()["gpu"])
        except (OracleError, OSError) as error:
            self._note(error)
            return True

    def _note(self, error: Exception) -> None:
        """Keep why the oracle crashed; raise the error again if it only refused."""
        if isinstance(error, OracleError) and not self._oracle.has_ended:
            raise error
        self._crash = " ".join(str(error).split())[-300:]

    def _run(self, model: Path, steps: Sequence[Step], cfg: dict[str, Any]) -> list[StepResult]:
        try:
            return self.oracle.run(model, steps, **cfg)
        except (OracleError, OSError) as error:
            self._note(error)
        return self.oracle.run(model, steps, **cfg)  # which tells it


def start_oracle() -> Oracle:
    """Start the oracle process; skips the test if there is none and --require does not forbid."""
    folder = oracle_folder()
    if folder is None:
        pytest.skip("no unpatched llama.cpp to compare with; scripts/test makes it in .oracle")
    return Oracle(folder)


@contextmanager
def open_engine(model: Path, **settings: Any) -> Iterator[Engine]:
    """Load a model on our side. Imported here: the tests are collected where nothing is built."""
    from moegraph.config import EngineConfig
    from moegraph.engine import Engine

    # threads that wait sleep: upstream's process and ours take turns
    chosen = {"device": "cpu", "n_threads": THREADS, "poll": 0, "n_ctx": 1024, **settings}
    with Engine.load(model, EngineConfig(**chosen)) as engine:
        yield engine


def random_ids(n_vocab: int, n: int, seed: int = SEED) -> list[int]:
    """Return n token ids drawn from the whole vocabulary."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, n_vocab, n)]


def our_logits(engine: Engine, tokens: Sequence[int], width: int | None = None) -> F32:
    """Run tokens from an empty sequence in passes of `width` rows; return all rows of logits."""
    engine.reset()
    width = width or len(tokens)
    rows = [
        engine.forward_logits(tokens[at : at + width], pos0=at)
        for at in range(0, len(tokens), width)
    ]
    return np.concatenate(rows)
