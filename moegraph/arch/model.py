"""A model file: a GGUF file whose hyper-parameters, vocabulary and tensors were checked."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.file import GgufFile
from ..gguf.metadata import Metadata
from ..gguf.scan import TensorInfo
from ..gguf.vocab import check_vocab
from .hparams import ARCH, HParams, read_hparams, refuse_mtp_alone
from .tensors import check_tensors

_ARCHITECTURE = "general.architecture"


class ModelFile(GgufFile):
    """A validated qwen35moe model; a context manager that `open_model` returns."""

    hparams: HParams

    def _check_metadata(self, meta: Metadata) -> None:
        _check_arch(self.path, meta)

    def _check(self) -> None:
        self.hparams, warnings = _validate(self.path, self._meta, self.tensors)
        self.warnings = tuple(warnings + self._trailing())


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open and validate a model file and all its parts.

    Raises:
        ModelFileError: missing, unreadable, foreign, truncated or malformed.
        UnsupportedModel: well-formed, but not a model that moegraph runs.
    """
    return ModelFile(Path(path))


def _check_arch(path: Path, meta: Metadata) -> None:
    arch = meta.string(_ARCHITECTURE)
    if "dflash" in arch:
        raise UnsupportedModel(
            f"{path}: this is a drafter; give the model for which it was made, and the drafter "
            "with --draft"
        )
    if arch != ARCH:
        raise UnsupportedModel(
            f"{path}: architecture {arch!r} is not supported; moegraph runs {ARCH!r} "
            "(Qwen3.5 and Qwen3.6 Mixture-of-Experts)"
        )


def _validate(
    path: Path, meta: Metadata, tensors: dict[str, TensorInfo]
) -> tuple[HParams, list[str]]:
    """Check hyper-parameters, vocabulary and tensors; return hparams and warnings."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        refuse_mtp_alone(path, tensors)
        what = "the file holds no tensors" if not tensors else "tensor token_embd.weight missing"
        raise ModelFileError(f"{path}: {what}; the file is incomplete")
    hparams = read_hparams(meta, check_vocab(meta, embedding.ne[1]))
    return hparams, check_tensors(path, hparams, tensors)
