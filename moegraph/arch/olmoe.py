"""olmoe: OLMoE-1B-7B.

As qwen3moe, but Q and K are normed over all heads together, and the weights of the chosen experts
are not divided by their sum.

Source: mirrors llama.cpp src/models/olmoe.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .blocks.attention import attention_tensors
from .blocks.router import Rules
from .hparams import MAX_DIM, uniform
from .qwen3moe import Qwen3Moe
from .tensors import Expected, matrix

if TYPE_CHECKING:
    from ..gguf.metadata import Metadata


@dataclass(frozen=True)
class Olmoe(Qwen3Moe):
    """See `Architecture`."""

    name = "olmoe"
    families = "OLMoE"

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Qwen3Moe:
        """Read and check the hyper-parameters."""
        hp = super().read(meta, n_vocab)
        if hp.n_head_kv != hp.n_head:
            what = f"is {hp.n_head_kv}; this architecture has one for each of {hp.n_head} heads"
            raise meta.error(".attention.head_count_kv", what)
        if hp.n_embd_head_k * hp.n_head != hp.n_embd:
            what = f"is {hp.n_embd_head_k}; {hp.n_head} heads must have {hp.n_embd} elements"
            raise meta.error(".attention.key_length", what)
        # llama.cpp reads no other width of experts here
        n_ff = uniform(meta, ".feed_forward_length", hp.n_layer, 1, MAX_DIM)
        return replace(hp, n_ff_exp=n_ff, rules=Rules(normed=False))

    def model_tensors(self) -> dict[str, Expected]:
        """Return the head, for which the embedding does not serve here."""
        return {"output.weight": matrix(self.n_embd, self.n_vocab)}

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of a layer."""
        return super().layer_tensors(il, merged) | attention_tensors(self, wide_norms=True)
