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
from ..gguf.tensorfile import TensorFile, TensorInfo
from .base import Architecture
from .dflash import DFlashHParams, expected_tensors, refuse_variant
from .dflashgguf import read_dialect, read_hparams
from .dflashhf import IGNORED, open_config, renamed, translated
from .model import ModelFile
from .tensors import check_tensors

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_TOKENS, _KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_NORMAL = 1


class DraftFile:
    """An open drafter file; close it.

    hparams: what the file says. source: the file; tensors: its tensors by llama.cpp's names.
    warnings: one line for each harmless oddity.
    """

    def __init__(
        self, source: TensorFile, hparams: DFlashHParams, tensors: dict[str, TensorInfo]
    ) -> None:
        self.source, self.path = source, source.path
        self.hparams, self.tensors = hparams, tensors
        self.warnings: tuple[str, ...] = ()

    @property
    def takes_part(self) -> bool:
        """Whether the drafter can propose a part of the target's tokens: it has no head for all."""
        own = "output.weight", "token_embd.weight", "markov_w2.weight"
        return not any(name in self.tensors for name in own)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self.source.close()

    def require_target(self, target: ModelFile) -> None:
        """Check that this drafter can draft for a target, and note warnings."""
        hp, other = self.hparams, target.hparams
        own = self.source.kv if isinstance(self.source, GgufFile) else {}
        problem = _misfit(hp, other) or _other_tokens(own, target.kv)
        if problem:
            raise UnsupportedModel(
                f"{self.path}: this drafter does not fit {target.path}: {problem}"
            )
        found = check_tensors(self.path, self.tensors, expected_tensors(hp, other.n_vocab))
        self.warnings = tuple(f"{self.path}: {warning}" for warning in found)
        if hp.n_vocab_draft:
            self.d2t(other.n_vocab)

    def d2t(self, n_vocab: int) -> np.ndarray:
        """Return the target's token of each token of a reduced vocabulary, I32 numpy [n]."""
        raw = np.empty(self.tensors["d2t"].nbytes, np.uint8)
        self.source.read(self.tensors["d2t"], raw)
        ids = raw.view(np.int64)
        if self.hparams.dialect == "safetensors":  # there it holds differences
            ids = ids + np.arange(len(ids))
        if ids.min() < 0 or ids.max() >= n_vocab or len(np.unique(ids)) < len(ids):
            raise ModelFileError(
                f"{self.path}: tensor d2t does not name different tokens of {n_vocab}"
            )
        return ids.astype(np.int32)


def _misfit(hp: DFlashHParams, target: Architecture) -> str:
    """Return what does not fit, or ''."""
    if hp.n_embd != target.n_embd:
        return f"it was made for a target of width {hp.n_embd}, and this one has {target.n_embd}"
    if (last := max(hp.target_layers)) >= target.n_layer:
        return f"it reads the output of layer {last}, and there are {target.n_layer} layers"
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
    source = SafetensorsFile(file) if file.suffix == ".safetensors" else open_gguf(file)
    try:
        if isinstance(source, SafetensorsFile):
            hparams, tensors = _read_safetensors(source)
        else:
            hparams, tensors = read_dialect(source.metadata, source.tensors)
        refuse_variant(file, tensors)
    except BaseException:
        source.close()
        raise
    return DraftFile(source, hparams, tensors)


def _weights_in(folder: Path) -> Path:
    """Return the weights in a folder as authors publish it."""
    if (folder / f"{_WEIGHTS}.index.json").exists():
        raise UnsupportedModel(f"{folder}: a drafter in several files; moegraph reads one")
    if not (folder / _WEIGHTS).exists():
        raise ModelFileError(f"{folder}: a folder without {_WEIGHTS}; name the drafter's file")
    return folder / _WEIGHTS


def _read_safetensors(source: SafetensorsFile) -> tuple[DFlashHParams, dict[str, TensorInfo]]:
    """Read hyper-parameters, and tensors by llama.cpp's names, of a file and its config."""
    for name, kind in source.other.items():
        if name not in IGNORED:
            raise UnsupportedModel(
                f"{source.path}: tensor {name} has type {kind}: moegraph reads BF16, F16 and F32"
            )
    tensors, config = renamed(source.tensors), source.path.with_name(_CONFIG)
    return read_hparams(translated(config, open_config(config), tensors), tensors), tensors
