"""The tensors that a qwen35moe file must hold: names, shapes and types, derived from HParams.

Source: llama.cpp src/models/qwen35moe.cpp load_arch_tensors, src/llama-arch.cpp.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.scan import TensorInfo
from .hparams import HParams

_Q = GGMLQuantizationType
MATRIX_TYPES = frozenset(
    {
        _Q.F32,
        _Q.F16,
        _Q.BF16,
        _Q.Q8_0,
        _Q.Q4_0,
        _Q.Q4_1,
        _Q.Q5_0,
        _Q.Q5_1,
        _Q.Q2_K,
        _Q.Q3_K,
        _Q.Q4_K,
        _Q.Q5_K,
        _Q.Q6_K,
        _Q.IQ4_NL,
        _Q.IQ4_XS,
        _Q.MXFP4,
    }
)
# Norms, biases and the convolution go into element-wise ops and kernels that read only F32.
VECTOR_TYPES = frozenset({_Q.F32})

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.")
# Variants that llama.cpp computes differently; ignoring these tensors would change the results.
_REFUSED = (
    (re.compile(r".*\.(scale|input_scale)"), "per-tensor scales (NVFP4)"),
    (re.compile(r"blk\.\d+\.attn_(q|k|v|qkv|output)\.bias"), "attention biases"),
    (re.compile(r"output\.bias"), "an output bias"),
    (re.compile(r"rope_freqs\.weight|.*\.rope_freqs\.weight"), "rope frequency factors"),
)


@dataclass(frozen=True)
class Expected:
    """What one tensor must look like. Shapes: ne in ggml order, trailing 1s left out."""

    ne: tuple[int, ...]
    types: frozenset[GGMLQuantizationType]
    required: bool = True

    @property
    def ne4(self) -> tuple[int, int, int, int]:
        """Return the shape padded with 1 to four entries."""
        a, b, c, d = self.ne + (1,) * (4 - len(self.ne))
        return a, b, c, d


def _matrix(*ne: int, required: bool = True) -> Expected:
    return Expected(ne, MATRIX_TYPES, required)


def _vector(*ne: int) -> Expected:
    return Expected(ne, VECTOR_TYPES)


def expected_tensors(hp: HParams, merged: frozenset[int]) -> dict[str, Expected]:
    """Return the tensors, by name, of the embedding, the head and the layers that run.

    merged: layers whose gate and up experts are stored as one tensor, gate first.
    """
    expected = {
        "token_embd.weight": _matrix(hp.n_embd, hp.n_vocab),
        "output_norm.weight": _vector(hp.n_embd),
        # Without it the embedding serves as the head.
        "output.weight": _matrix(hp.n_embd, hp.n_vocab, required=False),
    }
    for il in range(hp.n_layer):
        layer = _delta_net(hp) if hp.is_recurrent(il) else _attention(hp)
        layer |= _ffn(hp, il in merged)
        expected |= {f"blk.{il}.{name}": spec for name, spec in layer.items()}
    return expected


def nextn_tensors(hp: HParams, merged: bool) -> dict[str, Expected]:
    """Return the tensors of one prediction (MTP) block, named without 'blk.N.'."""
    return (
        _attention(hp)
        | _ffn(hp, merged)
        | {
            "nextn.eh_proj.weight": _matrix(2 * hp.n_embd, hp.n_embd),
            "nextn.enorm.weight": _vector(hp.n_embd),
            "nextn.hnorm.weight": _vector(hp.n_embd),
            "nextn.embed_tokens.weight": _matrix(hp.n_embd, hp.n_vocab, required=False),
            "nextn.shared_head_head.weight": _matrix(hp.n_embd, hp.n_vocab, required=False),
            "nextn.shared_head_norm.weight": Expected((hp.n_embd,), VECTOR_TYPES, required=False),
        }
    )


def _attention(hp: HParams) -> dict[str, Expected]:
    head_dim = hp.n_embd_head_k
    return {
        "attn_norm.weight": _vector(hp.n_embd),
        # Per head: the query, then the output gate.
        "attn_q.weight": _matrix(hp.n_embd, 2 * head_dim * hp.n_head),
        "attn_k.weight": _matrix(hp.n_embd, head_dim * hp.n_head_kv),
        "attn_v.weight": _matrix(hp.n_embd, hp.n_embd_head_v * hp.n_head_kv),
        "attn_output.weight": _matrix(head_dim * hp.n_head, hp.n_embd),
        "attn_q_norm.weight": _vector(head_dim),
        "attn_k_norm.weight": _vector(head_dim),
    }


def _delta_net(hp: HParams) -> dict[str, Expected]:
    return {
        "attn_norm.weight": _vector(hp.n_embd),
        "attn_qkv.weight": _matrix(hp.n_embd, hp.conv_dim),
        "attn_gate.weight": _matrix(hp.n_embd, hp.value_dim),
        "ssm_conv1d.weight": _vector(hp.ssm_d_conv, hp.conv_dim),
        "ssm_dt.bias": _vector(hp.n_v_heads),
        "ssm_a": _vector(hp.n_v_heads),
        "ssm_beta.weight": _matrix(hp.n_embd, hp.n_v_heads),
        "ssm_alpha.weight": _matrix(hp.n_embd, hp.n_v_heads),
        "ssm_norm.weight": _vector(hp.head_v_dim),
        "ssm_out.weight": _matrix(hp.value_dim, hp.n_embd),
    }


def _ffn(hp: HParams, merged: bool) -> dict[str, Expected]:
    n_embd, n_ff, n_expert = hp.n_embd, hp.n_ff_exp, hp.n_expert
    if merged:
        experts = {"ffn_gate_up_exps.weight": _matrix(n_embd, 2 * n_ff, n_expert)}
    else:
        experts = {
            "ffn_gate_exps.weight": _matrix(n_embd, n_ff, n_expert),
            "ffn_up_exps.weight": _matrix(n_embd, n_ff, n_expert),
        }
    return experts | {
        "post_attention_norm.weight": _vector(n_embd),
        "ffn_gate_inp.weight": _matrix(n_embd, n_expert),
        "ffn_down_exps.weight": _matrix(n_ff, n_embd, n_expert),
        "ffn_gate_inp_shexp.weight": _matrix(n_embd),
        "ffn_gate_shexp.weight": _matrix(n_embd, hp.n_ff_shexp),
        "ffn_up_shexp.weight": _matrix(n_embd, hp.n_ff_shexp),
        "ffn_down_shexp.weight": _matrix(hp.n_ff_shexp, n_embd),
    }


def block_index(name: str) -> int | None:
    """Return N of a 'blk.N.' tensor name, or None for a tensor outside the blocks."""
    match = _BLOCK.match(name)
    return int(match.group(1)) if match else None


def merged_layers(hp: HParams, tensors: Mapping[str, TensorInfo]) -> frozenset[int]:
    """Return the blocks whose gate and up experts are one tensor, prediction blocks included."""
    blocks = range(hp.n_layer + hp.n_layer_nextn)
    return frozenset(il for il in blocks if f"blk.{il}.ffn_gate_up_exps.weight" in tensors)


def check_tensors(
    path: os.PathLike[str], hp: HParams, tensors: Mapping[str, TensorInfo]
) -> list[str]:
    """Check that the file holds what the model needs; return warnings, one line each.

    Raises:
        ModelFileError: a tensor is missing or has the wrong shape.
        UnsupportedModel: a tensor has a type, or belongs to a variant, that moegraph does not run.
    """
    _check_variants(path, hp, tensors)
    merged = merged_layers(hp, tensors)
    expected = expected_tensors(hp, merged)
    missing = [name for name, spec in expected.items() if spec.required and name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(
            f"{path}: tensor {missing[0]}{more} missing; the file is incomplete "
            "or its keys describe another model"
        )
    for name, spec in expected.items():
        if name in tensors:
            check_tensor(path, tensors[name], spec)
    return _nextn_warnings(hp, tensors, merged) + _unknown_warnings(hp, tensors, expected)


def _check_variants(path: os.PathLike[str], hp: HParams, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse known variants first: this message helps more than that of a missing tensor."""
    for name in tensors:
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
        if not hp.is_recurrent(il) and f"blk.{il}.attn_qkv.weight" in tensors:
            raise UnsupportedModel(
                f"{path}: tensor blk.{il}.attn_qkv.weight: full-attention layer {il} stores q, k "
                "and v as one tensor; moegraph needs attn_q, attn_k and attn_v, convert it again"
            )


def check_tensor(path: os.PathLike[str], info: TensorInfo, spec: Expected) -> None:
    """Check the shape and type of one tensor that runs."""
    if info.ne != spec.ne4:
        raise ModelFileError(
            f"{path}: tensor {info.name} has shape {list(info.ne[: info.n_dims])}; "
            f"the keys of the file ask for {list(spec.ne)}"
        )
    if info.type not in spec.types:
        names = ", ".join(t.name for t in sorted(spec.types))
        raise UnsupportedModel(
            f"{path}: tensor {info.name} has type {info.type.name}; moegraph runs {names} here"
        )


def _nextn_warnings(
    hp: HParams, tensors: Mapping[str, TensorInfo], merged: frozenset[int]
) -> list[str]:
    """Describe incomplete prediction blocks; a model runs without them."""
    blocks = range(hp.n_layer, hp.n_layer + hp.n_layer_nextn)
    faults = [_nextn_fault(hp, tensors, il, il in merged) for il in blocks]
    return [f"prediction block {fault}; it is not run" for fault in faults if fault]


def _nextn_fault(hp: HParams, tensors: Mapping[str, TensorInfo], il: int, merged: bool) -> str:
    """Return what a prediction block lacks, after its number, or '' if it is whole."""
    for name, spec in nextn_tensors(hp, merged).items():
        info = tensors.get(f"blk.{il}.{name}")
        if info is None and spec.required:
            return f"{il} lacks {name}"
        if info is not None and info.ne != spec.ne4:
            shape = list(info.ne[: info.n_dims])
            return f"{il}: {name} has shape {shape}, expected {list(spec.ne)}"
    return ""


def require_nextn(path: os.PathLike[str], hp: HParams, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that the file has one prediction (MTP) block, and all of it, to draft with.

    Raises:
        ModelFileError: there is none, or a tensor of it is missing or has the wrong shape.
        UnsupportedModel: there are several, or a tensor has a type that moegraph does not run.
    """
    if hp.n_layer_nextn != 1:
        count = f"{hp.n_layer_nextn} prediction (MTP) blocks"
        error = UnsupportedModel if hp.n_layer_nextn else ModelFileError
        raise error(f"{path}: the file has {count}; drafting with MTP needs one")
    il = hp.n_layer
    merged = il in merged_layers(hp, tensors)
    fault = _nextn_fault(hp, tensors, il, merged)
    if fault:
        raise ModelFileError(f"{path}: prediction block {fault}; the file cannot draft with MTP")
    for name, spec in nextn_tensors(hp, merged).items():
        if f"blk.{il}.{name}" in tensors:
            check_tensor(path, tensors[f"blk.{il}.{name}"], spec)


def _unknown_warnings(
    hp: HParams, tensors: Mapping[str, TensorInfo], expected: Mapping[str, Expected]
) -> list[str]:
    """Describe unknown tensors outside the prediction blocks; no graph reads them."""
    nextn = range(hp.n_layer, hp.n_layer + hp.n_layer_nextn)
    unknown = [n for n in tensors if n not in expected and block_index(n) not in nextn]
    if not unknown:
        return []
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return [f"tensor {unknown[0]}{more}: not part of this architecture, ignored"]
