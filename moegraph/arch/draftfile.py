"""A drafter on disk, in any format: opened, checked, and compared with its target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.file import GgufFile, open_gguf
from ..gguf.reader import StringArray
from ..gguf.safetensors import SafetensorsFile
from ..gguf.scan import TensorInfo
from ..gguf.sniff import MAGIC
from .base import Architecture
from .dflash import DFlashHParams, check_tensors, refuse_variant
from .dflashgguf import read_dialect
from .dflashhf import open_config, read_config, renamed
from .model import ModelFile

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_TOKENS, _KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_NORMAL = 1


class DraftFile:
    """An open drafter file; close it.

    hparams: what the file says. tensors: by llama.cpp's names. warnings: one line for each
    harmless oddity.
    """

    def __init__(
        self, source: GgufFile | SafetensorsFile, hparams: DFlashHParams,
        tensors: dict[str, TensorInfo],
    ) -> None:  # fmt: skip
        self._source = source
        self.path, self.hparams, self.tensors = source.path, hparams, tensors
        self.warnings: tuple[str, ...] = ()

    @property
    def takes_part(self) -> bool:
        """Whether the drafter can propose a part of the target's tokens: it has no head for all."""
        own = "output.weight", "token_embd.weight", "markov_w2.weight"
        return not any(name in self.tensors for name in own)

    @property
    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Return the size and the modification time (ns) of every part when it was opened."""
        return self._source.stamps

    def read(self, info: TensorInfo, out: np.ndarray, start: int = 0) -> None:
        """Copy a tensor's bytes, from byte `start` of it on, into out, U8 numpy [n]."""
        self._source.read(info, out, start)

    def map(self, info: TensorInfo) -> np.ndarray:
        """Return a read-only view of a tensor's bytes in the mapped file, U8 [nbytes]."""
        return self._source.map(info)

    def mappings(self) -> list[tuple[Path, np.ndarray]]:
        """Return (path, all bytes) of the mapped file; `map` returns slices of these bytes."""
        return self._source.mappings()

    def ids(self, name: str) -> np.ndarray:
        """Return a tensor of type I64 as numpy [n]."""
        raw = np.empty(self.tensors[name].nbytes, np.uint8)
        self.read(self.tensors[name], raw)
        return raw.view(np.int64)

    def check_unchanged(self) -> None:
        """Refuse a file that was written to after it was opened; see `GgufFile`."""
        self._source.check_unchanged()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._source.close()

    def require_target(self, target: ModelFile) -> None:
        """Check that this drafter can draft for a target, and note warnings."""
        hp, other = self.hparams, target.hparams
        problem = _misfit(hp, other) or self._other_tokens(target)
        if problem:
            raise UnsupportedModel(
                f"{self.path}: this drafter does not fit {target.path}: {problem}"
            )
        self.warnings = tuple(check_tensors(self.path, hp, self.tensors, other.n_vocab))
        if hp.n_vocab_draft:
            self.d2t(other.n_vocab)

    def d2t(self, n_vocab: int) -> np.ndarray:
        """Return the target's token of each token of a reduced vocabulary, I32 numpy [n]."""
        ids = self.ids("d2t")
        if self.hparams.dialect == "safetensors":  # there it holds differences
            ids = ids + np.arange(len(ids))
        if ids.min() < 0 or ids.max() >= n_vocab or len(np.unique(ids)) < len(ids):
            raise ModelFileError(
                f"{self.path}: tensor d2t does not name different tokens of {n_vocab}"
            )
        return ids.astype(np.int32)

    def _other_tokens(self, target: ModelFile) -> str:
        """Return how the file's vocabulary differs from the target's, or ''; if it has one."""
        own = self._source.kv if isinstance(self._source, GgufFile) else {}
        return _other_tokens(own, target.kv)


def _misfit(hp: DFlashHParams, target: Architecture) -> str:
    """Return what does not fit, or ''."""
    if hp.n_embd != target.n_embd:
        return f"it was made for a target of width {hp.n_embd}, and this one has {target.n_embd}"
    if max(hp.taps) >= target.n_layer:
        return f"it reads the output of layer {max(hp.taps)}, and there are {target.n_layer} layers"
    if hp.n_vocab and hp.n_vocab != target.n_vocab:
        return f"it was made for {hp.n_vocab} tokens, and there are {target.n_vocab}"
    if hp.mask_id >= target.n_vocab:
        return f"its mask token is {hp.mask_id}, and there are {target.n_vocab} tokens"
    return ""


def _other_tokens(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the first ordinary token that differs between two vocabularies, in words, or ''."""
    mine, theirs = own.get(_TOKENS), other.get(_TOKENS)
    if not isinstance(mine, StringArray) or not isinstance(theirs, StringArray):
        return ""
    kinds = [np.asarray(kv.get(_KINDS, ())) for kv in (own, other)]
    if any(len(kind) != len(mine) for kind in kinds):
        return ""
    pairs = zip(mine.raw_strings(), theirs.raw_strings())
    differ = np.array([a != b for a, b in pairs])
    differ &= (kinds[0] == _NORMAL) & (kinds[1] == _NORMAL)
    if not differ.any():
        return ""
    first = int(differ.argmax())
    return f"token {first} is {mine[first]!r} in its vocabulary and {theirs[first]!r} in the other"


def open_drafter(path: str | os.PathLike[str]) -> DraftFile:
    """Open a drafter: a GGUF or safetensors file, or the folder of the latter."""
    file = Path(path)
    if file.is_dir():
        file = _weights_in(file)
    if file.suffix == ".safetensors" and not _is_gguf(file):
        return _open_safetensors(file)
    source = open_gguf(file)
    try:
        hparams, tensors = read_dialect(source.metadata, source.tensors)
        refuse_variant(file, tensors)
    except BaseException:
        source.close()
        raise
    return DraftFile(source, hparams, tensors)


def _is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def _weights_in(folder: Path) -> Path:
    """Return the weights in a folder as authors publish it."""
    if (folder / f"{_WEIGHTS}.index.json").exists():
        raise UnsupportedModel(f"{folder}: a drafter in several files; moegraph reads one")
    if not (folder / _WEIGHTS).exists():
        raise ModelFileError(f"{folder}: a folder without {_WEIGHTS}; name the drafter's file")
    return folder / _WEIGHTS


def _open_safetensors(path: Path) -> DraftFile:
    source = SafetensorsFile(path)
    try:
        tensors = renamed(source.tensors)
        foreign = next(iter(renamed_types(source.other)), None)
        if foreign:
            raise UnsupportedModel(f"{path}: tensor {foreign}: moegraph reads BF16, F16 and F32")
        refuse_variant(path, tensors)
        hparams = read_config(open_config(path.with_name(_CONFIG)), tensors)
    except BaseException:
        source.close()
        raise
    return DraftFile(source, hparams, tensors)


def renamed_types(other: dict[str, str]) -> list[str]:
    """Return the names and types of tensors that cannot be read and are needed."""
    return [f"{name} has type {kind}" for name, kind in other.items() if name != "t2d"]
