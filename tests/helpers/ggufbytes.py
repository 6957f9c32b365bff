"""Build GGUF files byte by byte for tests, well-formed or not.

Nothing here checks anything: any count, length, type number or offset can be made wrong.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

T = GGUFValueType
Q = GGMLQuantizationType

_CODES = {
    T.UINT8: "B",
    T.INT8: "b",
    T.UINT16: "H",
    T.INT16: "h",
    T.UINT32: "I",
    T.INT32: "i",
    T.UINT64: "Q",
    T.INT64: "q",
    T.FLOAT32: "f",
    T.FLOAT64: "d",
    T.BOOL: "B",
}


def u32(n: int) -> bytes:
    """Return n as four little-endian bytes."""
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    """Return n as eight little-endian bytes."""
    return struct.pack("<Q", n)


def string(text: str | bytes) -> bytes:
    """Return a length-prefixed string."""
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def value(kind: GGUFValueType, v: Any) -> bytes:
    """Return a value of a kind without its type number."""
    if kind == T.STRING:
        return string(v)
    return struct.pack("<" + _CODES[kind], v)


def kv(key: str | bytes, kind: GGUFValueType, v: Any) -> bytes:
    """Return a scalar key-value pair."""
    return string(key) + u32(kind) + value(kind, v)


def kv_array(key: str, kind: GGUFValueType, values: Iterable[Any], n: int | None = None) -> bytes:
    """Return an array; n replaces the count that is written."""
    items = [value(kind, v) for v in values]
    count = len(items) if n is None else n
    return string(key) + u32(T.ARRAY) + u32(kind) + u64(count) + b"".join(items)


def row_bytes(kind: GGMLQuantizationType, n: int) -> int:
    """Return the bytes of n elements of a type."""
    block, size = GGML_QUANT_SIZES[kind]
    return n // block * size


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. Shapes: ne in ggml order. Fields other than the first three override."""

    name: str | bytes
    ne: tuple[int, ...]
    kind: GGMLQuantizationType = Q.F32
    data: bytes | None = None
    offset: int | None = None
    type_number: int | None = None
    n_dims: int | None = None

    def nbytes(self) -> int:
        """Return the number of bytes of the data."""
        if self.data is not None:
            return len(self.data)
        return row_bytes(self.kind, math.prod(self.ne))

    def payload(self) -> bytes:
        """Return the bytes of the data: given ones, or a pattern that differs between tensors."""
        if self.data is not None:
            return self.data
        seed = sum(self.name.encode() if isinstance(self.name, str) else self.name) % 251
        return bytes([seed + 1]) * self.nbytes()


@dataclass
class File:
    """A GGUF file in pieces; every piece of the header can be replaced."""

    pairs: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    alignment: int = 32
    magic: bytes = b"GGUF"
    version: int = 3
    n_kv: int | None = None
    n_tensors: int | None = None
    tail: bytes = b""

    def header(self) -> bytes:
        """Return everything in front of the data, unpadded."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(self.pairs) if self.n_kv is None else self.n_kv
        out = [self.magic, u32(self.version), u64(n_tensors), u64(n_kv), *self.pairs]
        offset = 0
        for t in self.tensors:
            out += [string(t.name), u32(len(t.ne) if t.n_dims is None else t.n_dims)]
            out += [u64(dim) for dim in t.ne]
            out += [u32(t.kind if t.type_number is None else t.type_number)]
            out += [u64(offset if t.offset is None else t.offset)]
            offset += t.nbytes() + -t.nbytes() % self.alignment
        return b"".join(out)

    def write_sparse(self, path: Path) -> None:
        """Write the header and leave the data, of any size, a hole of zeros."""
        header = self.header()
        size = len(header)
        for t in self.tensors:
            size += -size % self.alignment + t.nbytes()
        path.write_bytes(header)
        os.truncate(path, size)

    def build(self) -> bytes:
        """Return the whole file."""
        out = bytearray(self.header())
        for t in self.tensors:
            out += bytes(-len(out) % self.alignment)
            out += t.payload()
        if self.tensors:
            out += bytes(-len(out) % self.alignment)
        return bytes(out) + self.tail


@dataclass
class Shape:
    """Sizes of a small model that has every feature of a large one."""

    n_vocab: int = 40
    n_embd: int = 32
    n_layer: int = 4
    n_nextn: int = 0
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 16
    n_rot: int = 8
    sections: tuple[int, ...] = (2, 1, 1, 0)
    n_expert: int = 8
    n_used: int = 2
    n_ff_exp: int = 32
    n_ff_shexp: int = 64
    d_conv: int = 4
    d_state: int = 8
    n_v_heads: int = 4
    n_k_heads: int = 2
    interval: int = 4
    merged: bool = False
    tied: bool = False
    expert_type: GGMLQuantizationType = Q.F16
    matrix_type: GGMLQuantizationType = Q.F32

    @property
    def conv_dim(self) -> int:
        """Return the number of convolution channels."""
        return self.d_state * (2 * self.n_k_heads + self.n_v_heads)

    def is_attention(self, il: int) -> bool:
        """Return whether block il is a full-attention one."""
        return il >= self.n_layer or (il + 1) % self.interval == 0


# Sizes of the real 35B-A3B, with its MTP block.
REAL_35B: dict[str, Any] = {
    "n_embd": 2048, "n_layer": 40, "n_nextn": 1, "n_head": 16, "n_head_kv": 2, "head_dim": 256,
    "n_rot": 64, "sections": (11, 11, 10, 0), "n_expert": 256, "n_used": 8, "n_ff_exp": 512,
    "n_ff_shexp": 512, "d_state": 128, "n_v_heads": 32, "n_k_heads": 16,
}  # fmt: skip


def key(suffix: str) -> str:
    """Return a key of the architecture."""
    return f"qwen35moe.{suffix}"


def model_pairs(s: Shape) -> dict[str, bytes]:
    """Return the key-value pairs of a model by key, so that a test can replace or drop some."""
    ints = {
        "block_count": s.n_layer + s.n_nextn,
        "context_length": 4096,
        "embedding_length": s.n_embd,
        "expert_count": s.n_expert,
        "expert_used_count": s.n_used,
        "expert_feed_forward_length": s.n_ff_exp,
        "expert_shared_feed_forward_length": s.n_ff_shexp,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "rope.dimension_count": s.n_rot,
        "ssm.conv_kernel": s.d_conv,
        "ssm.inner_size": s.d_state * s.n_v_heads,
        "ssm.state_size": s.d_state,
        "ssm.time_step_rank": s.n_v_heads,
        "ssm.group_count": s.n_k_heads,
        "full_attention_interval": s.interval,
    }
    if s.n_nextn:
        ints["nextn_predict_layers"] = s.n_nextn
    pairs = {"general.architecture": kv("general.architecture", T.STRING, "qwen35moe")}
    pairs |= {key(k): kv(key(k), T.UINT32, v) for k, v in ints.items()}
    floats = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7}
    pairs |= {key(k): kv(key(k), T.FLOAT32, v) for k, v in floats.items()}
    sections = key("rope.dimension_sections")
    pairs[sections] = kv_array(sections, T.INT32, s.sections)
    return pairs | vocab_pairs(s.n_vocab)


def vocab_pairs(n: int) -> dict[str, bytes]:
    """Return a byte-level BPE tokenizer of n tokens."""
    ggml = "tokenizer.ggml."
    tokens = [f"t{i}" for i in range(n)]
    return {
        ggml + "model": kv(ggml + "model", T.STRING, "gpt2"),
        ggml + "pre": kv(ggml + "pre", T.STRING, "qwen35"),
        ggml + "tokens": kv_array(ggml + "tokens", T.STRING, tokens),
        ggml + "token_type": kv_array(ggml + "token_type", T.INT32, [1] * n),
        ggml + "merges": kv_array(ggml + "merges", T.STRING, ["t 1", "t 2"]),
        ggml + "eos_token_id": kv(ggml + "eos_token_id", T.UINT32, 1),
    }


def model_tensors(s: Shape) -> list[Tensor]:
    """Return the tensors of a model, prediction blocks included."""
    tensors = [
        Tensor("token_embd.weight", (s.n_embd, s.n_vocab), s.matrix_type),
        Tensor("output_norm.weight", (s.n_embd,)),
    ]
    if not s.tied:
        tensors.append(Tensor("output.weight", (s.n_embd, s.n_vocab), s.matrix_type))
    for il in range(s.n_layer + s.n_nextn):
        tensors += _block(s, il)
    for il in range(s.n_layer, s.n_layer + s.n_nextn):
        tensors += [
            Tensor(f"blk.{il}.nextn.eh_proj.weight", (2 * s.n_embd, s.n_embd), s.matrix_type),
            Tensor(f"blk.{il}.nextn.enorm.weight", (s.n_embd,)),
            Tensor(f"blk.{il}.nextn.hnorm.weight", (s.n_embd,)),
        ]
    return tensors


def _block(s: Shape, il: int) -> list[Tensor]:
    value_dim = s.d_state * s.n_v_heads
    m, e = s.matrix_type, s.expert_type
    rows: list[tuple[str, tuple[int, ...], GGMLQuantizationType]] = [
        ("attn_norm.weight", (s.n_embd,), Q.F32),
        ("post_attention_norm.weight", (s.n_embd,), Q.F32),
    ]
    if s.is_attention(il):
        rows += [
            ("attn_q.weight", (s.n_embd, 2 * s.head_dim * s.n_head), m),
            ("attn_k.weight", (s.n_embd, s.head_dim * s.n_head_kv), m),
            ("attn_v.weight", (s.n_embd, s.head_dim * s.n_head_kv), m),
            ("attn_output.weight", (s.head_dim * s.n_head, s.n_embd), m),
            ("attn_q_norm.weight", (s.head_dim,), Q.F32),
            ("attn_k_norm.weight", (s.head_dim,), Q.F32),
        ]
    else:
        rows += [
            ("attn_qkv.weight", (s.n_embd, s.conv_dim), m),
            ("attn_gate.weight", (s.n_embd, value_dim), m),
            ("ssm_conv1d.weight", (s.d_conv, s.conv_dim), Q.F32),
            ("ssm_dt.bias", (s.n_v_heads,), Q.F32),
            ("ssm_a", (s.n_v_heads,), Q.F32),
            ("ssm_beta.weight", (s.n_embd, s.n_v_heads), m),
            ("ssm_alpha.weight", (s.n_embd, s.n_v_heads), m),
            ("ssm_norm.weight", (s.d_state,), Q.F32),
            ("ssm_out.weight", (value_dim, s.n_embd), m),
        ]
    if s.merged:
        rows += [("ffn_gate_up_exps.weight", (s.n_embd, 2 * s.n_ff_exp, s.n_expert), e)]
    else:
        rows += [
            ("ffn_gate_exps.weight", (s.n_embd, s.n_ff_exp, s.n_expert), e),
            ("ffn_up_exps.weight", (s.n_embd, s.n_ff_exp, s.n_expert), e),
        ]
    rows += [
        ("ffn_down_exps.weight", (s.n_ff_exp, s.n_embd, s.n_expert), e),
        ("ffn_gate_inp.weight", (s.n_embd, s.n_expert), Q.F32),
        ("ffn_gate_inp_shexp.weight", (s.n_embd,), Q.F32),
        ("ffn_gate_shexp.weight", (s.n_embd, s.n_ff_shexp), m),
        ("ffn_up_shexp.weight", (s.n_embd, s.n_ff_shexp), m),
        ("ffn_down_shexp.weight", (s.n_ff_shexp, s.n_embd), m),
    ]
    return [Tensor(f"blk.{il}.{name}", ne, kind) for name, ne, kind in rows]


def model_file(
    shape: Shape | None = None,
    pairs: dict[str, bytes | None] | None = None,
    tensors: Callable[[list[Tensor]], list[Tensor]] | None = None,
) -> File:
    """Return a whole model; pairs replaces or (None) drops keys, tensors edits the tensor list."""
    s = shape or Shape()
    merged: dict[str, bytes | None] = {**model_pairs(s), **(pairs or {})}
    kept = [pair for pair in merged.values() if pair is not None]
    listed = model_tensors(s)
    return File(pairs=kept, tensors=tensors(listed) if tensors else listed)


def edit(name: str, **changes: Any) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return an editor that changes fields of the tensor of that name."""

    def apply(tensors: list[Tensor]) -> list[Tensor]:
        if not any(t.name == name for t in tensors):
            raise KeyError(name)
        return [replace(t, **changes) if t.name == name else t for t in tensors]

    return apply


def drop(name: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return an editor that leaves out the tensor of that name."""
    return lambda tensors: [t for t in tensors if t.name != name]


def add(*more: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return an editor that appends tensors."""
    return lambda tensors: [*tensors, *more]
