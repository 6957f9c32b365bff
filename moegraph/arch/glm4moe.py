"""glm4moe: GLM-4.5, GLM-4.6 and GLM-4.7, and their Air models.

Every mixer is attention; files may have biases and norms of heads. The first layers are dense. The
other layers have routed experts, whose scores are sigmoids, and a shared one without a gate.

Source: mirrors llama.cpp src/models/glm4-moe.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UnsupportedModel
from .blocks.attention import attention_tensors
from .blocks.common import CommonArchitecture, read_dense_lead
from .blocks.experts import expert_tensors, ffn_tensors, shared_tensors
from .blocks.router import read_rules
from .hparams import MAX_DIM, read_attention, read_rope, read_sizes
from .tensors import Expected, vector

if TYPE_CHECKING:
    from ..gguf.metadata import Metadata


@dataclass(frozen=True)
class Glm4Moe(CommonArchitecture):
    """See `CommonArchitecture`."""

    name = "glm4moe"
    families = "GLM-4.5, GLM-4.6 and GLM-4.7"
    sums_in_f32 = True
    ffn_norm = ("ffn_inp", "post_attention_norm.weight", "post_attn_norm")
    shexp = "ffn_shexp_out"

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Glm4Moe:
        """Read and check the hyper-parameters."""
        sizes, layers = read_sizes(meta, n_vocab), read_dense_lead(meta)
        n_all = layers["n_layer"] + layers["n_layer_nextn"]
        attention = read_attention(meta, sizes["n_embd"], n_all)
        _check_sections(meta, attention["n_rot"], attention["n_embd_head_k"])
        return cls(
            **sizes,
            **layers,
            **attention,
            **read_rope(meta, sizes["n_ctx_train"]),
            rules=read_rules(meta, layers["n_expert"], is_sigmoid=True),
        )

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of a layer."""
        found = attention_tensors(self, varies=True)
        found["post_attention_norm.weight"] = vector(self.n_embd)
        if not self.layer(il).is_routed:
            return found | ffn_tensors(self, self.n_ff)
        bias = {"exp_probs_b.bias": vector(self.n_expert)}
        # llama.cpp knows no merged stacks here
        experts = expert_tensors(self, merged=False) | shared_tensors(self, gated=False)
        return found | bias | experts


def _check_sections(meta: Metadata, n_rot: int, n_embd_head: int) -> None:
    """Check that M-RoPE, which files of vision models have, is plain rope for text.

    A text position is equal in the first three of its four components and 0 in the fourth, so no
    rotated pair may take its angle from the fourth.

    Source: llama.cpp ggml/src/ggml-cpu/ops.cpp ggml_mrope_cache_init.
    """
    key = ".rope.dimension_sections"
    sections = meta.integers(key, 4, 0, MAX_DIM) if key in meta else (0,)
    total = sum(sections)
    if all(sections[:2]) and (total > n_embd_head or min(total, n_rot // 2) > sum(sections[:3])):
        what = f"is {list(sections)}; moegraph runs text, whose positions have no fourth component"
        raise meta.error(key, what, UnsupportedModel)
