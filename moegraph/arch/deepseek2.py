"""deepseek2: GLM-4.7-Flash and DeepSeek-V2-Lite.

Attention is multi-head latent attention (MLA): a position keeps one compressed row for all heads,
of which the first elements are its V too. Half of attn_kv_b is multiplied into Q (attn_k_b), the
other half into the result (attn_v_b).

Source: mirrors llama.cpp src/models/deepseek2.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedModel
from .base import Layer
from .blocks.attention import attend_by_mask, write_keys
from .blocks.common import CommonArchitecture, read_dense_lead
from .blocks.experts import expert_tensors, ffn_tensors, shared_tensors
from .blocks.router import read_rules
from .hparams import MAX_DIM, read_rope, read_sizes
from .inputs import Memory, PassInputs, PassShape, Weights, project
from .tensors import Expected, matrix, vector

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor
    from ..gguf.metadata import Metadata

_KV = "attn_kv_a_mqa.weight"


@dataclass(frozen=True)
class DeepSeek2(CommonArchitecture):
    """See `CommonArchitecture`; n_embd_head_k and n_embd_head_v are those of the compressed row.

    head_k, head_v: of the heads that it stands for. n_lora_q: rank of Q's projection; 0: it has one
    matrix. kq_scale: of Q times K.
    """

    name = "deepseek2"
    layer_launches = 30.5
    families = "GLM-4.7-Flash and DeepSeek-V2-Lite"
    same_input = (("attn_q.weight", _KV), ("attn_q_a.weight", _KV))

    head_k: int
    head_v: int
    n_lora_q: int
    kq_scale: float

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> DeepSeek2:
        """Read and check the hyper-parameters."""
        sizes, layers = read_sizes(meta, n_vocab), read_dense_lead(meta)
        n_layer = layers["n_layer"]
        if meta.number(".attention.temperature_scale", -1e6, 1e6, 0.0):
            what = "is set; moegraph does not run attention with a temperature for each position"
            raise meta.error(".attention.temperature_scale", what, UnsupportedModel)
        # 10 undoes what converters do, in F32 as llama.cpp does it
        log_mul = np.float32(meta.number(".rope.scaling.yarn_log_multiplier", 0.0, 1e3, 0.0))
        log_mul /= np.float32(0.1)
        rope = read_rope(meta, sizes["n_ctx_train"], scales_attn=not log_mul)
        heads = _read_heads(meta, n_layer, n_vocab)
        # llama.cpp knows old files of GLM-4.7-Flash, which do not say it, by these numbers
        is_sigmoid = n_layer in (47, 48) and n_vocab == 154_880
        return cls(
            **sizes,
            **layers,
            **heads,
            **rope,
            kq_scale=_kq_scale(rope, float(log_mul), heads["head_k"]),
            rules=read_rules(meta, layers["n_expert"], is_sigmoid),
        )

    def layer(self, il: int) -> Layer:
        """Return what a layer keeps."""
        kv = self.n_embd_head_k, self.n_embd_head_v
        return replace(super().layer(il), mixer="MLA", kv=kv, v_in_k=True)

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of a layer."""
        n_embd, n_head, n_lora_kv = self.n_embd, self.n_head, self.n_embd_head_v
        n_q, n_lora_q = n_head * self.head_k, self.n_lora_q
        if n_lora_q:
            q = {
                "attn_q_a.weight": matrix(n_embd, n_lora_q),
                "attn_q_a_norm.weight": vector(n_lora_q),
                "attn_q_b.weight": matrix(n_lora_q, n_q),
            }
        else:
            q = {"attn_q.weight": matrix(n_embd, n_q)}
        if il < self.n_layer_dense_lead:
            ffn = ffn_tensors(self, self.n_ff)
        else:
            bias = {"exp_probs_b.bias": vector(self.n_expert, required=False)}
            ffn = expert_tensors(self, merged) | shared_tensors(self, gated=False) | bias
        return q | ffn | {
            "attn_norm.weight": vector(n_embd),
            _KV: matrix(n_embd, self.n_embd_head_k),
            "attn_kv_a_norm.weight": vector(n_lora_kv),
            "attn_k_b.weight": matrix(self.head_k - self.n_rot, n_lora_kv, n_head),
            "attn_v_b.weight": matrix(n_lora_kv, self.head_v, n_head),
            "attn_output.weight": matrix(n_head * self.head_v, n_embd),
            "ffn_norm.weight": vector(n_embd),
        }  # fmt: skip

    @property
    def mixer_width(self) -> int:
        """Return a bound on the F32 numbers that a mixer and its projections have of a row."""
        head = 2 * self.head_k + 2 * self.head_v + 4 * self.n_embd_head_k
        return self.n_head * head + 2 * self.n_lora_q + 4 * self.n_embd_head_k

    def mixer(
        self, b: Builder, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
        cur: Tensor, il: int,
    ) -> Tensor:  # fmt: skip
        """Append attention."""
        n, n_head = cur.ne[1], self.n_head
        first = "attn_q_a.weight" if self.n_lora_q else "attn_q.weight"
        q, kv = project(b, w, (first, _KV), cur)
        if self.n_lora_q:
            q = b.norm(q, w["attn_q_a_norm.weight"], self.f_norm_rms_eps)
            q = b.mul_mat(w["attn_q_b.weight"], q)
        q = b.name(b.reshape(q, self.head_k, n_head, n), "q", il)
        q = b.expand(self._absorbed(b, w, q, inp.pos, il))
        write_keys(b, memory, self._keys(b, w, kv, inp.pos, il), inp.kv_idx, il)
        out = attend_by_mask(b, self, memory, inp, shape, q, self.kq_scale, il)
        out = b.permute(b.reshape(out, self.n_embd_head_v, n_head, n), 0, 2, 1, 3)
        out = b.name(b.mul_mat(w["attn_v_b.weight"], out), "fattn_mla", il)
        out = b.cont(b.permute(out, 0, 2, 1, 3))
        out = b.expand(b.name(b.reshape(out, self.head_v * n_head, n), "kqv_out", il))
        return b.mul_mat(w["attn_output.weight"], out)

    def keys_values(
        self, b: Builder, w: Weights, memory: Memory, pos: Tensor, kv_idx: Tensor, cur: Tensor,
        il: int,
    ) -> None:  # fmt: skip
        """Append the write of the compressed rows."""
        (kv,) = project(b, w, (_KV,), cur)
        write_keys(b, memory, self._keys(b, w, kv, pos, il), kv_idx, il)

    def _absorbed(self, b: Builder, w: Weights, q: Tensor, pos: Tensor, il: int) -> Tensor:
        """Append Q against compressed rows: F32 [head_k, n_head, n] to [n_embd_head_k, ...]."""
        n_head, n, n_nope = self.n_head, q.ne[2], self.head_k - self.n_rot
        strides = q.nb[1], q.nb[2]
        nope = b.name(b.view(q, (n_nope, n_head, n), strides), "q_nope", il)
        rotated = b.view(q, (self.n_rot, n_head, n), strides, 4 * n_nope)
        rotated = b.name(b.rope(rotated, pos, self, neox=False), "q_pe", il)
        nope = b.name(b.permute(nope, 0, 2, 1, 3), "q_nope_perm", il)
        nope = b.name(b.mul_mat(w["attn_k_b.weight"], nope), "q_nope_absorbed", il)
        nope = b.name(b.permute(nope, 0, 2, 1, 3), "q_nope_absorbed_perm", il)
        return b.name(b.concat(nope, rotated, 0), "Qcur", il)

    def _keys(self, b: Builder, w: Weights, kv: Tensor, pos: Tensor, il: int) -> Tensor:
        """Append norm and rope of compressed rows: F32 [n_embd_head_k, n] to [..., 1, n]."""
        n_lora, row, n = self.n_embd_head_v, kv.nb[1], kv.ne[1]
        b.name(kv, "kv_cmpr_pe", il)
        rotated = b.view(kv, (self.n_rot, 1, n), (row, row), 4 * n_lora)
        rotated = b.name(b.rope(rotated, pos, self, neox=False), "k_pe", il)
        kv = b.view(kv, (n_lora, n), (row,))
        kv = b.name(b.norm(kv, w["attn_kv_a_norm.weight"], self.f_norm_rms_eps), "kv_cmpr", il)
        kv = b.name(b.reshape(kv, n_lora, 1, n), "Vcur", il)
        return b.name(b.concat(kv, rotated, 0), "Kcur", il)


def _read_heads(meta: Metadata, n_layer: int, n_vocab: int) -> dict[str, Any]:
    """Read heads, and the sizes of compressed rows."""
    if ".attention.key_length_mla" not in meta:
        what = "is missing: the file is an old one, with attn_kv_b in one piece; convert it again"
        raise meta.error(".attention.key_length_mla", what, UnsupportedModel)
    n_head = meta.integer(".attention.head_count", 1, 65_536)
    n_lora_kv = meta.integer(".attention.kv_lora_rank", 1, MAX_DIM)
    n_rot = meta.integer(".rope.dimension_count", 2, 65_536)
    head_k = meta.integer(".attention.key_length_mla", 1, 65_536)
    if n_rot % 2 or n_rot >= head_k:
        what = f"is {n_rot}; it must be even and less than the head size {head_k}"
        raise meta.error(".rope.dimension_count", what)
    row = n_lora_kv + n_rot
    for key, n in {"head_count_kv": 1, "key_length": row, "value_length": n_lora_kv}.items():
        found = meta.integer(f".attention.{key}", 1, MAX_DIM)
        if found != n:
            what = f"is {found}; a compressed row of {n_lora_kv} and {n_rot} elements makes it {n}"
            raise meta.error(f".attention.{key}", what)
    # llama.cpp knows models without that key, or in spite of it, by these numbers
    is_lite = n_layer in (26, 27) or (n_layer, n_vocab) == (48, 128_256)
    return {
        "n_head": n_head,
        "n_head_kv": 1,
        "n_embd_head_k": row,
        "n_embd_head_v": n_lora_kv,
        "n_rot": n_rot,
        "head_k": head_k,
        "head_v": meta.integer(".attention.value_length_mla", 1, 65_536),
        "n_lora_q": 0 if is_lite else meta.integer(".attention.q_lora_rank", 0, MAX_DIM),
    }


def _kq_scale(rope: Mapping[str, Any], log_mul: float, head_k: int) -> float:
    """Return the scale of Q times K, in float32 as llama.cpp computes it."""
    one, tenth = np.float32(1), np.float32(0.1)
    log = np.float32(math.log(one / np.float32(rope["rope_freq_scale"])))
    mscale = np.float32(rope["rope_attn_factor"]) * (one + tenth * log)
    mscale *= one + tenth * np.float32(log_mul) * log
    return float(mscale * mscale / np.sqrt(np.float32(head_k)))
