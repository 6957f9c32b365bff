"""A model file: a GGUF file whose hyper-parameters, vocabulary and tensors were checked."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.file import GgufFile
from ..gguf.metadata import Metadata
from ..gguf.tensorfile import TensorInfo
from ..gguf.vocab import check_vocab
from .base import Architecture
from .deepseek2 import DeepSeek2
from .gemma4 import Gemma4
from .glm4moe import Glm4Moe
from .gptoss import GptOss
from .mtp import block_tensors, nextn_warnings, refuse_mtp_alone
from .olmoe import Olmoe
from .qwen3moe import Qwen3Moe
from .qwen3next import Qwen3Next
from .qwen35moe import Qwen35Moe
from .tensors import Expected, check_tensors, matrix, vector

_ARCHITECTURE = "general.architecture"
_ALL: tuple[type[Architecture], ...] = (
    Qwen35Moe, Qwen3Moe, Qwen3Next, DeepSeek2, Gemma4, Glm4Moe, GptOss, Olmoe,
)  # fmt: skip
ARCHITECTURES = {one.name: one for one in _ALL}
# Variants that llama.cpp computes differently; ignoring these tensors would change the results.
_REFUSED = (
    (re.compile(r".*\.(scale|input_scale)"), "per-tensor scales (NVFP4)"),
    (re.compile(r"blk\.\d+\.attn_(q|k|v|qkv|output)\.bias"), "attention biases"),
    (re.compile(r"blk\.\d+\.attn_sinks\.weight"), "attention sinks"),
    (re.compile(r"blk\.\d+\.ffn_.*\.bias"), "biases of a router or experts"),
    (re.compile(r"output\.bias"), "an output bias"),
    (re.compile(r"rope_freqs\.weight|.*\.rope_freqs\.weight"), "rope frequency factors"),
)


class ModelFile(GgufFile):
    """A validated model; a context manager that `open_model` returns."""

    hparams: Architecture

    def _scan(self) -> dict[str, TensorInfo]:
        tensors, path, meta = super()._scan(), self.path, self.metadata
        kind, embedding = _kind(path, meta), tensors.get("token_embd.weight")
        if embedding is None:
            refuse_mtp_alone(path, tensors)
            what = "tensor token_embd.weight missing" if tensors else "the file holds no tensors"
            raise ModelFileError(f"{path}: {what}; the file is incomplete")
        self.hparams = hp = kind.read(meta, check_vocab(meta, embedding.ne[1], kind.tokenizer))
        expected = expected_tensors(hp, merged_layers(hp, tensors))
        nextn = range(hp.n_layer, hp.n_layer + hp.n_layer_nextn)
        blocks = {f"blk.{il}.{n}" for il in nextn for n in block_tensors(hp, tensors, il)}
        _check_variants(path, hp, tensors, {*expected, *blocks})
        run = {name: info for name, info in tensors.items() if name not in blocks}
        warnings = nextn_warnings(hp, tensors) + check_tensors(path, run, expected)
        self.warnings = (*warnings, *self.warnings)
        return tensors


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open and validate a model file and all its parts.

    Raises:
        ModelFileError: missing, unreadable, foreign, truncated or malformed.
        UnsupportedModel: well-formed, but not a model that moegraph runs.
    """
    return ModelFile(Path(path))


def _kind(path: Path, meta: Metadata) -> type[Architecture]:
    """Return the architecture that a file names."""
    arch = meta.string(_ARCHITECTURE)
    if "dflash" in arch:
        raise UnsupportedModel(
            f"{path}: this is a drafter; give the model for which it was made, and the drafter "
            "with --draft"
        )
    if arch not in ARCHITECTURES:
        known = ", ".join(f"{name!r} ({one.families})" for name, one in ARCHITECTURES.items())
        raise UnsupportedModel(
            f"{path}: architecture {arch!r} is not supported; moegraph runs {known}"
        )
    return ARCHITECTURES[arch]


def expected_tensors(hp: Architecture, merged: frozenset[int]) -> dict[str, Expected]:
    """Return the tensors, by name, of the embedding, the head and the layers that run.

    merged: layers whose gate and up experts are stored as one tensor, gate first.
    """
    expected = {
        "token_embd.weight": matrix(hp.n_embd, hp.n_vocab),
        "output_norm.weight": vector(hp.n_embd),
        # Without it the embedding serves as the head.
        "output.weight": matrix(hp.n_embd, hp.n_vocab, required=False),
        **hp.model_tensors(),
    }
    for il in range(hp.n_layer):
        layer = hp.layer_tensors(il, il in merged)
        expected |= {f"blk.{il}.{name}": spec for name, spec in layer.items()}
    return expected


def merged_layers(hp: Architecture, tensors: Mapping[str, TensorInfo]) -> frozenset[int]:
    """Return the blocks whose gate and up experts are one tensor, prediction blocks included."""
    blocks = range(hp.n_layer + hp.n_layer_nextn)
    return frozenset(il for il in blocks if f"blk.{il}.ffn_gate_up_exps.weight" in tensors)


def _check_variants(
    path: os.PathLike[str], hp: Architecture, tensors: Mapping[str, TensorInfo],
    known: Collection[str],
) -> None:  # fmt: skip
    """Refuse known variants first: this message helps more than that of a missing tensor."""
    for name in (name for name in tensors if name not in known):
        for pattern, what in _REFUSED:
            if pattern.fullmatch(name):
                raise UnsupportedModel(
                    f"{path}: tensor {name}: moegraph does not run models with {what}"
                )
    if hp.n_layer_nextn and "blk.0.attn_norm.weight" not in tensors:
        raise UnsupportedModel(
            f"{path}: the file holds only prediction (MTP) blocks; give the whole model"
        )
    for il in range(hp.n_layer):
        if hp.layer(il).kv and f"blk.{il}.attn_qkv.weight" in tensors:
            raise UnsupportedModel(
                f"{path}: tensor blk.{il}.attn_qkv.weight: full-attention layer {il} stores q, k "
                "and v as one tensor; moegraph needs attn_q, attn_k and attn_v, convert it again"
            )
