"""What a DFlash drafter is, whatever its file's format: hyper-parameters and tensors.

A DFlash drafter is a small transformer that proposes a block of tokens at once. It reads outputs of
some layers of the target (taps), fused by one matrix. DSpark is DFlash with a Markov head, which
makes each token of the block depend on the one before, and perhaps a confidence head.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gguf.constants import GGMLQuantizationType

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.scan import TensorInfo
from .tensors import MATRIX_TYPES, VECTOR_TYPES, Expected, check_tensor

MAX_BLOCK = 32
MAX_LAYERS, MAX_TAPS = 128, 64
_FLOATS = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


@dataclass(frozen=True)
class RopeParams:
    """Arguments of ggml_rope_ext, with scaling applied; named as in `Architecture`.

    text: what the file says, for people.
    """

    n_rot: int
    n_ctx_orig: int
    rope_freq_base: float
    rope_freq_scale: float = 1.0
    rope_ext_factor: float = 0.0
    rope_attn_factor: float = 1.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    text: str = "plain"


def yarn(
    n_rot: int, base: float, n_ctx_orig: int, factor: float, beta_fast: float, beta_slow: float,
    magnitude: float = 0.0,
) -> RopeParams:  # fmt: skip
    """Return rope with YaRN; magnitude: of the rotated vectors, 0 for the usual 0.1 ln factor + 1.

    ggml multiplies by the usual one itself.
    """
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    text = f"YaRN, factor {factor:g} of {n_ctx_orig} positions"
    scale = (magnitude or usual) / usual
    return RopeParams(n_rot, n_ctx_orig, base, 1.0 / factor, 1.0, scale, beta_fast, beta_slow, text)


@dataclass(frozen=True)
class DFlashHParams:
    """What a drafter's graphs need besides its weights.

    dialect: the format of the file. n_vocab: tokens of the target; 0 if the file does not say.
    n_vocab_draft: tokens that the drafter can propose; 0 for all. n_embd: width of the target, and
    of the drafter. taps: the layers of the target whose outputs it reads, in the order of the
    inputs of `fc`. mask_id: the token at the places to fill in. block_size: rows of a block, the
    anchor included. is_causal: a row of a block does not see later ones. samples_anchor: row i
    proposes the token after its own place, row 0 the first one; otherwise row i proposes the token
    at its place, and row 0 nothing. n_swa: positions that a layer with a window reaches back; 0 for
    none. sliding: which layers have the window. markov_rank: 0 without a Markov head.
    """

    dialect: str
    n_vocab: int
    n_vocab_draft: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_embd_head: int
    n_ff: int
    n_ctx_train: int
    f_norm_rms_eps: float
    taps: tuple[int, ...]
    mask_id: int
    block_size: int
    rope: RopeParams
    is_causal: bool = False
    samples_anchor: bool = False
    n_swa: int = 0
    sliding: tuple[bool, ...] = field(default=())
    markov_rank: int = 0

    @property
    def name(self) -> str:
        """Return "dspark" with a Markov head, else "dflash"."""
        return "dspark" if self.markov_rank else "dflash"

    @property
    def max_draft(self) -> int:
        """Return the most tokens of a draft."""
        return self.block_size if self.samples_anchor else self.block_size - 1

    @property
    def n_embd_gqa(self) -> int:
        """Return the width of K, and of V, of a row."""
        return self.n_embd_head * self.n_head_kv

    def with_window(self, n_swa: int) -> DFlashHParams:
        """Return these, with a window for all layers but the last."""
        sliding = (*(True for _ in range(self.n_layer - 1)), False)
        return replace(self, n_swa=n_swa, sliding=sliding)

    def window(self, il: int) -> int:
        """Return how many positions layer il reaches back, its own included; 0 for all."""
        return self.n_swa if self.sliding[il] else 0


def expected_tensors(hp: DFlashHParams, n_vocab: int) -> dict[str, Expected]:
    """Return a drafter's tensors by llama.cpp's names; n_vocab: tokens of the target.

    Source: llama.cpp src/models/dflash.cpp load_arch_tensors.
    """
    n_draft = hp.n_vocab_draft or n_vocab
    vector, optional = Expected((hp.n_embd,), VECTOR_TYPES | _FLOATS), False
    found = {
        "fc.weight": Expected((len(hp.taps) * hp.n_embd, hp.n_embd), MATRIX_TYPES),
        "enc.output_norm.weight": vector,
        "output_norm.weight": vector,
        "token_embd.weight": Expected((hp.n_embd, n_vocab), MATRIX_TYPES, optional),
        "output.weight": Expected((hp.n_embd, n_draft), MATRIX_TYPES, bool(hp.n_vocab_draft)),
    }
    if hp.n_vocab_draft:
        found["d2t"] = Expected((n_draft,), frozenset({GGMLQuantizationType.I64}))
    if hp.markov_rank:
        width = hp.n_embd + hp.markov_rank
        found |= {
            "markov_w1.weight": Expected((hp.markov_rank, n_vocab), MATRIX_TYPES),
            "markov_w2.weight": Expected((hp.markov_rank, n_draft), MATRIX_TYPES),
            "conf_proj.weight": Expected((width, 1), MATRIX_TYPES, optional),
            "conf_proj.bias": Expected((1,), VECTOR_TYPES | _FLOATS, optional),
        }
    for il in range(hp.n_layer):
        found |= {f"blk.{il}.{name}": spec for name, spec in _layer(hp).items()}
    return found


def _layer(hp: DFlashHParams) -> dict[str, Expected]:
    d, n_embd = hp.n_embd_head, hp.n_embd
    shapes = {
        "attn_q": (n_embd, d * hp.n_head),
        "attn_k": (n_embd, hp.n_embd_gqa),
        "attn_v": (n_embd, hp.n_embd_gqa),
        "attn_output": (d * hp.n_head, n_embd),
        "ffn_gate": (n_embd, hp.n_ff),
        "ffn_up": (n_embd, hp.n_ff),
        "ffn_down": (hp.n_ff, n_embd),
    }
    norms = {"attn_norm": n_embd, "ffn_norm": n_embd, "attn_q_norm": d, "attn_k_norm": d}
    return {
        **{f"{name}.weight": Expected(ne, MATRIX_TYPES) for name, ne in shapes.items()},
        **{f"{name}.weight": Expected((n,), VECTOR_TYPES | _FLOATS) for name, n in norms.items()},
    }


def check_tensors(
    path: os.PathLike[str], hp: DFlashHParams, tensors: Mapping[str, TensorInfo], n_vocab: int
) -> list[str]:
    """Check that a file holds the tensors that a drafter needs; return warnings, one line each.

    tensors: by llama.cpp's names. n_vocab: tokens of the target.
    """
    expected = expected_tensors(hp, n_vocab)
    for name, spec in expected.items():
        if name in tensors:
            check_tensor(path, tensors[name], spec)
        elif spec.required:
            raise ModelFileError(
                f"{path}: the drafter's tensor {name} is missing; the file is incomplete "
                "or its keys describe another drafter"
            )
    unknown = [name for name in tensors if name not in expected]
    if not unknown:
        return []
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return [f"{path}: tensor {unknown[0]}{more}: not part of a DFlash drafter, ignored"]


def refuse_variant(path: os.PathLike[str], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors of variants that compute something else; they must not be ignored.

    tensors: by llama.cpp's names.
    """
    variants = {
        "selector_": "DFlash2 drafters",
        "hc_": "DSpark drafters for DeepSeek-V4",
        ".bias": "drafters with biases",
        ".scale": "drafters with per-tensor scales",
        "_sinks": "drafters with attention sinks",
        "post_attention_norm": "drafters with norms after attention",
        "post_ffw_norm": "drafters with norms after the FFN",
        "layer_output_scale": "drafters with scaled layers",
        "rope_freqs": "drafters with rope frequency factors",
        "_conv_": "DFlash2 drafters",
    }
    for name in tensors:
        for part, what in variants.items():
            if part in name and name != "conf_proj.bias":
                raise UnsupportedModel(f"{path}: tensor {name}: moegraph does not run {what}")
