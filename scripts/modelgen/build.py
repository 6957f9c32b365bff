"""Put shape, mix and seed together into a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from .calibrate import Calibration
from .fill import Filler
from .gguf_write import KV, Bytes, KVType, TensorEntry, write_split
from .mix import Mix
from .shape import Shape
from .tensors import Plan
from .vocab import vocabulary


def _general(shape: Shape, seed: int) -> list[KV]:
    return [
        KV("general.architecture", KVType.STRING, shape.arch),
        KV("general.type", KVType.STRING, "model"),
        KV("general.name", KVType.STRING, f"synthetic {shape.arch}, seed {seed}"),
        KV("general.quantization_version", KVType.U32, 2),
    ]


def write_model(
    path: Path,
    shape: Shape,
    mix: str,
    seed: int = 0,
    n_splits: int = 1,
    pre: str = "qwen35",
    progress: Callable[[int, int], None] | None = None,
    calibration: Calibration | None = None,
) -> list[Path]:
    """Write a synthetic model and return its files.

    mix: see mix.py. progress: called with (bytes done, bytes in all) after every tensor.
    """
    if problems := shape.problems():
        raise ValueError("; ".join(problems))
    cal = calibration or Calibration()
    types = Mix(mix)
    tensors = {t.name: t for t in Plan(shape, types, cal).tensors()}
    entries = [t.entry() for t in tensors.values()]
    filler = Filler(shape, cal, types.type_of("embd", None), seed)
    total = sum(e.n_bytes for e in entries)
    written = 0

    def data(entry: TensorEntry) -> Iterator[Bytes]:
        return filler.pieces(tensors[entry.name])

    def done(entry: TensorEntry) -> None:
        nonlocal written
        written += entry.n_bytes
        if progress:
            progress(written, total)

    kvs = [*_general(shape, seed), *shape.metadata(), *vocabulary(shape.n_vocab, pre)]
    return write_split(path, kvs, entries, n_splits, data, done)
