"""Put shape, mix and seed together into a file."""

from __future__ import annotations

from pathlib import Path

from .calibrate import Calibration
from .fill import Filler
from .gguf_write import write_gguf
from .presets import Mix
from .shape import Shape
from .tensors import Plan
from .vocab import gemma4_vocabulary, vocabulary


def write_model(path: Path, shape: Shape, mix: str, seed: int = 0, n_splits: int = 1) -> list[Path]:
    """Write a synthetic model and return its files; mix: see `Mix`."""
    cal, types = Calibration(), Mix(mix)
    tensors = {t.name: t for t in Plan(shape, types, cal).tensors()}
    filler = Filler(shape, cal, types.type_of("embd", None), seed)
    keys = {
        "general.type": "model",
        "general.name": f"synthetic {shape.arch}, seed {seed}",
        "general.quantization_version": 2,
        **shape.metadata(),
        **(gemma4_vocabulary if shape.arch == "gemma4" else vocabulary)(shape.n_vocab),
    }
    entries = [t.entry() for t in tensors.values()]
    return write_gguf(
        path, shape.arch, keys, entries, lambda one: filler.data(tensors[one.name]), n_splits
    )
