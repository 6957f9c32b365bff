"""gpt-oss: OpenAI's gpt-oss-20b and gpt-oss-120b.

Every second layer attends to a window. Attention has sinks, and projections, router and experts
have biases. A row's weights are a softmax over the experts that it chose.

Source: mirrors llama.cpp src/models/openai-moe.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import UnsupportedModel
from .base import Layer, Routing
from .blocks.attention import attention_tensors
from .blocks.common import CommonArchitecture
from .blocks.experts import expert_tensors
from .hparams import MAX_CTX, read_plain
from .inputs import Memory, PassInputs, PassShape, Weights
from .tensors import Expected, matrix, vector, with_biases

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor
    from ..gguf.metadata import Metadata

_PATTERN = ".attention.sliding_window_pattern"


@dataclass(frozen=True)
class GptOss(CommonArchitecture):
    """See `Architecture`; windows: n_swa of layers with a window, 0 of the others."""

    name = "gpt-oss"
    layer_launches = 22.0
    families = "gpt-oss"
    glu = "swiglu_oai"
    has_expert_biases = True
    ffn_norm = ("ffn_inp", "post_attention_norm.weight", "attn_post_norm")

    windows: tuple[int, ...]

    @classmethod
    def read(cls, meta: Metadata, n_vocab: int) -> GptOss:
        """Read and check the hyper-parameters."""
        found = read_plain(meta, n_vocab)
        _refuse_windows(meta, found["rope_freq_base"])
        return cls(**found, windows=_read_windows(meta, found["n_layer"]))

    def layer(self, il: int) -> Layer:
        """Return what a layer keeps."""
        n_swa = self.windows[il]
        kept = replace(super().layer(il), window=n_swa or None, has_sinks=True)
        return replace(kept, mixer="attention in a window") if n_swa else kept

    def model_tensors(self) -> dict[str, Expected]:
        """Return the head, for which the embedding does not serve here."""
        return {"output.weight": matrix(self.n_embd, self.n_vocab)}

    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of a layer."""
        mixer = attention_tensors(self)
        matrices = {name: spec for name, spec in mixer.items() if "norm" not in name}
        # llama.cpp knows no merged stacks here
        return with_biases(matrices) | expert_tensors(self, merged=False) | {
            "attn_norm.weight": mixer["attn_norm.weight"],
            "post_attention_norm.weight": vector(self.n_embd),
            "attn_sinks.weight": vector(self.n_head),
            "ffn_gate_inp.bias": vector(self.n_expert),
        }  # fmt: skip

    def mixer(
        self, b: Builder, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
        cur: Tensor, il: int,
    ) -> Tensor:  # fmt: skip
        """Append attention."""
        out = super().mixer(b, w, memory, inp, shape, cur, il)
        return b.name(out, "attn_out", il)

    def router(self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, il: int) -> Routing:
        """Append the choice of experts, by their logits, and the softmax over the chosen ones.

        CUDA runs the nodes from argsort to the last reshape as one kernel, in this order.
        """
        k, n_tokens = self.n_expert_used, cur.ne[1]
        logits = b.name(b.mul_mat(w["ffn_gate_inp.weight"], cur), "ffn_moe_logits", il)
        probs = b.name(b.add(logits, w["ffn_gate_inp.bias"]), "ffn_moe_probs", il)
        topk = b.argsort_top_k(probs, k)
        argsort = b.name(topk.src[0], "ffn_moe_argsort", il)
        topk = b.name(topk, "ffn_moe_topk", il)
        weights = b.get_rows(b.reshape(probs, 1, self.n_expert, n_tokens), topk)
        weights = b.reshape(b.name(weights, "ffn_moe_weights", il), k, n_tokens)
        data = b.soft_max(weights)
        weights = b.expand(b.name(b.reshape(data, 1, k, n_tokens), "ffn_moe_weights_softmax", il))
        # read last: CUDA runs five kernels if the weights take the memory of the scores
        b.expand(b.reshape(probs, self.n_expert, n_tokens))
        return Routing(argsort, topk, weights, data)


def _read_windows(meta: Metadata, n_layer: int) -> tuple[int, ...]:
    """Read the window of each layer; without a pattern in the file, every second has one."""
    n_swa = meta.integer(".attention.sliding_window", 1, MAX_CTX)
    value = meta.values.get(meta.full(_PATTERN))
    if value is None or isinstance(value, int):
        n = meta.integer(_PATTERN, 0, 1 << 31, 2)
        has_window = [n == 0 or il % n < n - 1 for il in range(n_layer)]
    else:
        has_window = [bool(flag) for flag in meta.integers(_PATTERN, n_layer, 0, 1)]
    return tuple(n_swa * one for one in has_window)


def _refuse_windows(meta: Metadata, base: float) -> None:
    """Refuse what gives layers with a window another rope, or other heads, than the others."""
    key = ".rope.freq_base_swa"
    own = meta.number(key, 1.0, 1e12, base)
    if own != base:
        what = f"is {own:g} but rope.freq_base {base:g}; moegraph needs them equal"
        raise meta.error(key, what, UnsupportedModel)
    for name in (".attention.key_length", ".attention.value_length", ".rope.dimension_count"):
        key = f"{name}_swa"
        if key in meta and meta.integer(key, 0, MAX_CTX) != meta.integer(name, 0, MAX_CTX, 0):
            what = f"is not {meta.full(name)}; moegraph needs heads of one size"
            raise meta.error(key, what, UnsupportedModel)
    key, kind = ".rope.scaling.type", meta.string(".rope.scaling.type", "linear")
    if kind == "none" and meta.number(".rope.scaling.factor", 0.0, 1e6, 0.0) not in (0.0, 1.0):
        what = "is 'none' with a factor, by which llama.cpp scales layers with a window"
        raise meta.error(key, what, UnsupportedModel)
