"""Put shape, mix and seed together into a file."""

from __future__ import annotations

from pathlib import Path

from .calibrate import Calibration
from .fill import Filler
from .gguf_write import Keys, write_gguf
from .presets import Mix
from .shape import Shape
from .tensors import Plan, Tensor
from .vocab import gemma4_vocabulary, vocabulary


def contents(shape: Shape, mix: str, seed: int = 0) -> tuple[Keys, dict[str, Tensor]]:
    """Return the keys and the tensors of a model by name; mix: see `Mix`."""
    vocab = gemma4_vocabulary if shape.arch == "gemma4" else vocabulary
    keys = {
        "general.type": "model",
        "general.name": f"synthetic {shape.arch}, seed {seed}",
        "general.quantization_version": 2,
        **shape.metadata(),
        **vocab(shape.n_vocab),
    }
    return keys, {t.name: t for t in Plan(shape, Mix(mix), Calibration.of(shape)).tensors()}


def write_model(path: Path, shape: Shape, mix: str, seed: int = 0, n_splits: int = 1) -> list[Path]:
    """Write a synthetic model and return its files; mix: see `Mix`."""
    keys, tensors = contents(shape, mix, seed)
    filler = Filler(shape, Calibration.of(shape), Mix(mix).type_of("embd", None), seed)
    entries = [t.entry() for t in tensors.values()]
    return write_gguf(
        path, shape.arch, keys, entries, lambda one: filler.data(tensors[one.name]), n_splits
    )
