"""qwen3moe: Qwen3 Mixture-of-Experts models, such as Qwen3-30B-A3B and Qwen3-Coder.

Every mixer is attention, and every layer has routed experts and no shared one.

Source: mirrors llama.cpp src/models/qwen3moe.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .blocks.attention import attention_tensors
from .blocks.common import CommonArchitecture
from .blocks.experts import expert_tensors
from .hparams import read_plain
from .tensors import Expected, vector

if TYPE_CHECKING:
    from ..gguf.metadata import Metadata


@dataclass(frozen=True)
class Qwen3Moe(CommonArchitecture):
    """See `Architecture`."""

    name = "qwen3moe"
    families = "Qwen3 Mixture-of-Experts"

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Qwen3Moe:
        """Read and check the hyper-parameters."""
        return cls(**read_plain(meta, n_vocab))

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of a layer."""
        norm = {"ffn_norm.weight": vector(self.n_embd)}
        # llama.cpp knows no merged stacks here
        return attention_tensors(self) | norm | expert_tensors(self, merged=False)
