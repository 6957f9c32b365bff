"""The prediction (MTP) block of a model: its tensors, and how it takes its input.

The block is one more layer of the model's architecture, after the last one. At a position it takes
the embedding of the token there, and what the model's last layer put out at the position before.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ..errors import ModelFileError, UnsupportedModel
from .base import Architecture
from .inputs import Weights
from .tensors import Expected, check_tensor, matrix, vector

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor
    from ..gguf.tensorfile import TensorInfo


def block_tensors(hp: Architecture, tensors: Collection[str], il: int) -> dict[str, Expected]:
    """Return the tensors of prediction (MTP) block il, named without 'blk.N.'."""
    n_embd, n_vocab = hp.n_embd, hp.n_vocab
    merged = f"blk.{il}.ffn_gate_up_exps.weight" in tensors
    return hp.layer_tensors(hp.n_layer, merged) | {
        "nextn.eh_proj.weight": matrix(2 * n_embd, n_embd),
        "nextn.enorm.weight": vector(n_embd),
        "nextn.hnorm.weight": vector(n_embd),
        "nextn.embed_tokens.weight": matrix(n_embd, n_vocab, required=False),
        "nextn.shared_head_head.weight": matrix(n_embd, n_vocab, required=False),
        "nextn.shared_head_norm.weight": vector(n_embd, required=False),
    }


def build_block_input(
    b: Builder, hp: Architecture, w: Weights, embeddings: Tensor, tokens: Tensor, h: Tensor
) -> Tensor:
    """Append the input of the block: F32 [n_embd, n].

    embeddings: [n_embd, n_vocab]. tokens I32 [n]; h F32 [n_embd, n], normed outputs of the position
    before each.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp graph_mtp.
    """
    eps, il = hp.f_norm_rms_eps, hp.n_layer
    h = b.name(b.norm(h, w["nextn.hnorm.weight"], eps), "mtp_hnorm", il)
    e = b.get_rows(embeddings, tokens)
    e = b.name(b.norm(e, w["nextn.enorm.weight"], eps), "mtp_enorm", il)
    x = b.mul_mat(w["nextn.eh_proj.weight"], b.concat(e, h, 0))
    return b.name(x, "mtp_eh_proj", il)


def nextn_warnings(hp: Architecture, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Describe incomplete prediction blocks; a model runs without them."""
    blocks = range(hp.n_layer, hp.n_layer + hp.n_layer_nextn)
    faults = [_fault(hp, tensors, il) for il in blocks]
    return [f"prediction block {fault}; it is not run" for fault in faults if fault]


def _fault(hp: Architecture, tensors: Mapping[str, TensorInfo], il: int) -> str:
    """Return what a prediction block lacks, after its number, or '' if it is whole."""
    for name, spec in block_tensors(hp, tensors, il).items():
        info = tensors.get(f"blk.{il}.{name}")
        if info is None and spec.required:
            return f"{il} lacks {name}"
        if info is not None and info.ne != spec.ne4:
            shape = list(info.ne[: info.n_dims])
            return f"{il}: {name} has shape {shape}, expected {list(spec.ne)}"
    return ""


def require_nextn(
    path: os.PathLike[str], hp: Architecture, tensors: Mapping[str, TensorInfo]
) -> None:
    """Check that the file has one prediction (MTP) block, and all of it, to draft with."""
    if hp.n_layer_nextn != 1:
        count = f"{hp.n_layer_nextn} prediction (MTP) blocks"
        error = UnsupportedModel if hp.n_layer_nextn else ModelFileError
        raise error(f"{path}: the file has {count}; drafting with MTP needs one")
    il = hp.n_layer
    fault = _fault(hp, tensors, il)
    if fault:
        raise ModelFileError(f"{path}: prediction block {fault}; the file cannot draft with MTP")
    for name, spec in block_tensors(hp, tensors, il).items():
        if f"blk.{il}.{name}" in tensors:
            check_tensor(path, tensors[f"blk.{il}.{name}"], spec)


def refuse_mtp_alone(path: os.PathLike[str] | str, names: Collection[str]) -> None:
    """Refuse a file with the tensors of a prediction (MTP) block and not those of its model."""
    if "token_embd.weight" not in names and any(".nextn." in name for name in names):
        raise UnsupportedModel(
            f"{path}: this is a prediction (MTP) block alone; it drafts only as a part of its "
            "model's file (docs/drafting.md)"
        )
