"""qwen35moe: Qwen3.5 and Qwen3.6 Mixture-of-Experts models.

Most mixers are gated DeltaNets, every fourth is attention with gated heads. Each layer has routed
experts and a shared one. Keys that llama.cpp ignores here (expert_weights_scale, attention.scale,
the yarn_* keys) are ignored too.

Source: mirrors llama.cpp src/models/qwen35moe.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedModel
from .base import Architecture
from .blocks.attention import attention_tensors
from .blocks.deltanet import PROJECTIONS, DeltaArchitecture, delta_tensors, read_delta
from .blocks.experts import expert_tensors, shared_tensors
from .hparams import MAX_DIM, read_attention, read_experts, read_layers, read_rope, read_sizes
from .tensors import Expected, vector

if TYPE_CHECKING:
    from ..gguf.metadata import Metadata


@dataclass(frozen=True)
class Qwen35Moe(DeltaArchitecture):
    """See `Architecture`; recurrent: which layers are DeltaNets."""

    name = "qwen35moe"
    layer_launches = 10.75
    families = "Qwen3.5 and Qwen3.6 Mixture-of-Experts"
    same_input = (PROJECTIONS, *Architecture.same_input)
    ffn_norm = ("attn_residual", "post_attention_norm.weight", "attn_post_norm")

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Qwen35Moe:
        """Read and check the hyper-parameters."""
        found = read_hybrid(meta, n_vocab)
        sections = _read_sections(meta, found["n_rot"], found["n_embd_head_k"])
        return cls(**found, rope_sections=sections)

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of layer il."""
        mixer = delta_tensors(self) if self.is_recurrent(il) else attention_tensors(self, True)
        norm = {"post_attention_norm.weight": vector(self.n_embd)}
        return mixer | norm | expert_tensors(self, merged) | shared_tensors(self)


def read_hybrid(meta: Metadata, n_vocab: int) -> dict[str, Any]:
    """Read all hyper-parameters."""
    sizes, layers = read_sizes(meta, n_vocab), _layers(meta)
    n_all = layers["n_layer"] + layers["n_layer_nextn"]
    return {
        **sizes,
        **layers,
        **read_attention(meta, sizes["n_embd"], n_all),
        **read_experts(meta, n_all, shared=True),
        **read_rope(meta, sizes["n_ctx_train"]),
        **read_delta(meta),
    }


def _layers(meta: Metadata) -> dict[str, Any]:
    """Read the block counts and which layers are recurrent."""
    layers = read_layers(meta, has_nextn=True)
    n_layer, n_all = layers["n_layer"], sum(layers.values())
    if ".attention.recurrent_layers" in meta:
        flags = meta.integers(".attention.recurrent_layers", n_all, 0, 1)[:n_layer]
        recurrent = tuple(bool(flag) for flag in flags)
    else:
        interval = meta.integer(".full_attention_interval", 1, 1 << 31, 4)
        recurrent = tuple((il + 1) % interval != 0 for il in range(n_layer))
    return layers | {"recurrent": recurrent}


def _read_sections(meta: Metadata, n_rot: int, n_embd_head: int) -> tuple[int, ...]:
    """Read the sections of interleaved M-RoPE, which of a text position must equal NEOX rope.

    A text position is equal in the first three of its four components and 0 in the fourth, so
    no rotated pair may take its angle from the fourth.

    Source: llama.cpp ggml/src/ggml-cpu/ops.cpp ggml_mrope_cache_init.
    """
    sections = meta.integers(".rope.dimension_sections", 4, 0, MAX_DIM)
    total = sum(sections)
    if not any(sections[:3]) or total > n_embd_head:
        raise meta.error(
            ".rope.dimension_sections",
            f"is {list(sections)}; the first three cannot all be 0 and the sum "
            f"cannot exceed the head size {n_embd_head}",
        )
    for pair in range(n_rot // 2):
        sector = pair % total
        if sector >= 3 * sections[sector % 3]:
            raise meta.error(
                ".rope.dimension_sections",
                f"is {list(sections)}, which leaves rotary pair {pair} of {n_rot // 2} "
                "without a text position; moegraph runs text models",
                UnsupportedModel,
            )
    return tuple(sections)
