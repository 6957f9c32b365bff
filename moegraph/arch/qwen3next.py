"""qwen3next: Qwen3-Next-80B-A3B and Qwen3-Coder-Next.

As qwen35moe, with plain rope. In DeltaNets each key head belongs to a group of value heads that are
next to each other, and beta and alpha are one matrix, group by group. Older files also have q, k, v
and z as one matrix of that kind (ssm_in).

Source: mirrors llama.cpp src/models/qwen3next.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UnsupportedModel
from .base import Architecture
from .inputs import Weights, project
from .qwen35moe import Qwen35Moe, read_hybrid
from .tensors import Expected, matrix

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor
    from ..gguf.metadata import Metadata

_QKV, _Z, _QKVZ, _BA = "attn_qkv.weight", "attn_gate.weight", "ssm_in.weight", "ssm_ba.weight"
# Graphs have room for the nodes that repeat heads so often.
_MOST_REPEATS = 64


@dataclass(frozen=True)
class Qwen3Next(Qwen35Moe):
    """See `Architecture`."""

    name = "qwen3next"
    families = "Qwen3-Next and Qwen3-Coder-Next"
    same_input = ((_QKV, _Z, _QKVZ, _BA), *Architecture.same_input)
    has_head_groups = True

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Qwen3Next:
        """Read and check the hyper-parameters."""
        found = read_hybrid(meta, n_vocab)
        n_k, n_v = found["ssm_n_group"], found["ssm_dt_rank"]
        if n_v // n_k > _MOST_REPEATS:
            what = f"gives {n_v // n_k} value heads a key head; moegraph runs {_MOST_REPEATS}"
            raise meta.error(".ssm.group_count", what, UnsupportedModel)
        return cls(**found)

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of layer il."""
        found = super().layer_tensors(il, merged)
        if not self.is_recurrent(il):
            return found
        del found["ssm_beta.weight"], found["ssm_alpha.weight"]
        n_embd, width = self.n_embd, self.conv_dim + self.value_dim
        return found | {
            _QKV: matrix(n_embd, self.conv_dim, instead=_QKVZ),
            _Z: matrix(n_embd, self.value_dim, instead=_QKVZ),
            _QKVZ: matrix(n_embd, width, required=False),
            _BA: matrix(n_embd, 2 * self.n_v_heads),
        }

    @property
    def mixer_width(self) -> int:
        """Return a bound on the F32 numbers that a mixer has of a row."""
        return 3 * self.value_dim + super().mixer_width

    def project_delta(self, b: Builder, w: Weights, cur: Tensor, il: int) -> list[Tensor]:
        """Append the projections of rows, and put those of all groups side by side."""
        d, r, n = self.head_dim, self.n_v_heads // self.n_k_heads, cur.ne[1]
        if _QKV in w and _Z in w:
            qkv, z, ba = project(b, w, (_QKV, _Z, _BA), cur)
        else:
            qkvz, ba = project(b, w, (_QKVZ, _BA), cur)
            b.name(qkvz, "linear_attn_mixed_qkvz", il)
            q, k, v, z = self._split(b, qkvz, {"q": d, "k": d, "v": r * d, "z": r * d}, il)
            z = b.expand(b.cont(z, self.value_dim, n))
            q = b.name(b.cont(q, self.key_dim, n), "query_flat", il)
            k = b.name(b.cont(k, self.key_dim, n), "key_flat", il)
            v = b.name(b.cont(v, self.value_dim, n), "value_flat", il)
            qkv = b.name(b.concat(b.concat(q, k, 0), v, 0), "qkv_mixed", il)
        b.name(ba, "linear_attn_mixed_ba", il)
        beta, alpha = self._split(b, ba, {"b": r, "a": r}, il)
        return [qkv, z, *(b.expand(b.cont(x, self.n_v_heads, n)) for x in (beta, alpha))]

    def _split(self, b: Builder, x: Tensor, widths: Mapping[str, int], il: int) -> list[Tensor]:
        """View what groups of x F32 [m, n] have one after another: each F32 [width, n_k_heads, n].

        widths: by names of nodes.
        """
        group, offset, found = 4 * sum(widths.values()), 0, []
        for name, width in widths.items():
            part = b.view(x, (width, self.n_k_heads, x.ne[1]), (group, x.nb[1]), offset)
            found.append(b.name(part, name, il))
            offset += 4 * width
        return found
