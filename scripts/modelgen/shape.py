"""Hyper-parameters of a model, their checks and their GGUF keys."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .gguf_write import Keys


def _opt(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Shape:
    """The hyper-parameters of one model; the defaults are those of 35B-A3B."""

    arch: str = _opt("qwen35moe", "name of the architecture, such as qwen3moe or gpt-oss")
    n_vocab: int = _opt(248320, "vocabulary size")
    n_ctx_train: int = _opt(262144, "context length written to the file")
    n_embd: int = _opt(2048, "width of the residual stream")
    n_layer: int = _opt(40, "layers, MTP block not counted")
    n_layer_nextn: int = _opt(0, "MTP blocks after the last layer, 0 or 1")
    has_nextn_embd: bool = _opt(False, "MTP blocks have embeddings and a head of their own")
    n_head: int = _opt(16, "query heads of a full-attention layer")
    n_head_kv: int = _opt(2, "key and value heads of a full-attention layer")
    head_dim: int = _opt(256, "width of an attention head")
    n_rot: int = _opt(64, "rotated dimensions of an attention head")
    head_v: int = _opt(0, "width of a value head with MLA; head_dim is that of a key head")
    n_lora_kv: int = _opt(0, "MLA: rank of keys and values")
    n_lora_q: int = _opt(0, "MLA: rank of queries, 0 for one matrix")
    n_expert: int = _opt(256, "routed experts of a layer")
    n_expert_used: int = _opt(8, "routed experts of a token")
    n_ff_exp: int = _opt(512, "width of a routed expert")
    n_ff_shexp: int = _opt(512, "width of the shared expert")
    n_layer_dense_lead: int = _opt(0, "first layers, which have a dense FFN and no experts")
    n_ff: int = _opt(0, "width of the FFN of dense layers")
    expert_weights_norm: bool = _opt(False, "routing weights are divided by their sum")
    is_sigmoid: bool = _opt(False, "scores are sigmoids, with a bias for the choice")
    n_expert_groups: int = _opt(0, "groups of experts, of which a token takes half; 0 for none")
    has_qk_norm: bool = _opt(True, "glm4moe: norms of heads")
    has_mrope: bool = _opt(False, "glm4moe: rope sections, as vision models have them")
    has_qkv_bias: bool = _opt(False, "glm4moe: biases of q, k and v")
    expert_weights_scale: float = _opt(0.0, "scale of the routing weights, 0 for none")
    ssm_d_conv: int = _opt(4, "kernel size of the short convolution")
    ssm_d_state: int = _opt(128, "width of a DeltaNet head")
    n_k_heads: int = _opt(16, "DeltaNet key heads")
    n_v_heads: int = _opt(32, "DeltaNet value heads")
    has_qkvz: bool = _opt(False, "qwen3next: q, k, v and z of a DeltaNet as one matrix")
    full_attention_interval: int = _opt(4, "every n-th layer is full attention")
    layers: str = _opt("", "layer kinds as letters, d(eltanet) or a(ttention); beats the interval")
    rope_freq_base: float = _opt(1e7, "rope base frequency")
    n_swa: int = _opt(1024, "positions that a layer with a window attends to")
    n_head_kv_swa: int = _opt(8, "key and value heads of a layer with a window")
    head_dim_swa: int = _opt(256, "width of a head of a layer with a window")
    rope_freq_base_swa: float = _opt(1e4, "rope base frequency of layers with a window")
    logit_softcap: float = _opt(30.0, "bound of logits, 0 for none")
    rope_scaling: str = _opt("none", "rope scaling: none, linear or yarn")
    rope_factor: float = _opt(4.0, "rope scaling factor")
    rope_log_mul: float = _opt(0.0, "YaRN: what converters call yarn_log_multiplier")
    rope_orig_ctx: int = _opt(4096, "context length before rope scaling")
    f_norm_rms_eps: float = _opt(1e-6, "epsilon of the norms")
    merged_gate_up: bool = _opt(False, "store gate and up of the routed experts as one tensor")
    tied: bool = _opt(False, "the head is the token embedding")

    @property
    def is_qwen35(self) -> bool:
        """Whether there are DeltaNets, gated attention and shared experts."""
        return self.arch in ("qwen35moe", "qwen3next")

    @property
    def key_dim(self) -> int:
        return self.ssm_d_state * self.n_k_heads

    @property
    def value_dim(self) -> int:
        return self.ssm_d_state * self.n_v_heads

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def n_layer_all(self) -> int:
        return self.n_layer + self.n_layer_nextn

    def is_recurrent(self, il: int) -> bool:
        """Return whether layer `il` is DeltaNet; MTP blocks are full attention."""
        if il >= self.n_layer or not self.is_qwen35:
            return False
        if self.layers:
            return self.layers[il] == "d"
        return (il + 1) % self.full_attention_interval != 0

    def is_window(self, il: int) -> bool:
        """Return whether layer `il` attends to a window."""
        has_window = self.arch in ("gemma4", "gpt-oss")
        return has_window and (il + 1) % self.full_attention_interval != 0

    def heads(self, il: int) -> tuple[int, int]:
        """Return the width of a head of layer `il`, and its key and value heads."""
        window = self.head_dim_swa, self.n_head_kv_swa
        return window if self.is_window(il) else (self.head_dim, self.n_head_kv)

    def rope_sections(self) -> list[int]:
        """Return sections that give every rotated pair a text position.

        Pair i takes section i % 3 if i < 3 * section; all other pairs would read position 0.
        """
        n = self.n_rot // 2
        return [(n + 2) // 3, (n + 1) // 3, n // 3, 0]

    def metadata(self) -> Keys:
        """Return the GGUF keys of the architecture."""
        keys: Keys = {
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "block_count": self.n_layer_all,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.f_norm_rms_eps,
            "rope.dimension_count": self.n_rot,
            "rope.freq_base": self.rope_freq_base,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_expert_used,
            "expert_feed_forward_length": self.n_ff_exp,
        }
        if self.is_qwen35:
            keys |= self._hybrid()
        if self.n_lora_kv:
            keys |= self._latent()
        if self.arch == "glm4moe":
            keys |= self._routing()
        if self.has_mrope:
            keys["rope.dimension_sections"] = self.rope_sections()
        if self.n_layer_dense_lead:
            keys["leading_dense_block_count"] = self.n_layer_dense_lead
            keys["feed_forward_length"] = self.n_ff
        if self.arch == "gemma4":
            keys |= self._gemma4()
        if self.arch == "olmoe":
            keys["feed_forward_length"] = keys.pop("expert_feed_forward_length")
        if self.arch == "gpt-oss":
            keys["attention.sliding_window"] = self.n_swa
        if self.expert_weights_scale:
            keys["expert_weights_scale"] = self.expert_weights_scale
        if self.rope_scaling != "none":
            keys["rope.scaling.type"] = self.rope_scaling
            keys["rope.scaling.factor"] = self.rope_factor
            keys["rope.scaling.original_context_length"] = self.rope_orig_ctx
        if self.rope_log_mul:
            keys["rope.scaling.yarn_log_multiplier"] = self.rope_log_mul
        return {f"{self.arch}.{key}": value for key, value in keys.items()}

    def _latent(self) -> Keys:
        """Return the keys of MLA and of shared experts."""
        keys: Keys = {
            "attention.q_lora_rank": self.n_lora_q,
            "attention.kv_lora_rank": self.n_lora_kv,
            "attention.key_length": self.n_lora_kv + self.n_rot,
            "attention.value_length": self.n_lora_kv,
            "attention.key_length_mla": self.head_dim,
            "attention.value_length_mla": self.head_v,
        }
        return keys | self._routing()

    def _routing(self) -> Keys:
        """Return the keys of the router, shared experts and MTP blocks."""
        keys: Keys = {
            "expert_shared_count": self.n_ff_shexp // self.n_ff_exp,
            "expert_weights_norm": self.expert_weights_norm,
            "expert_gating_func": 1 + self.is_sigmoid,
        }
        if self.n_expert_groups:
            keys["expert_group_count"] = self.n_expert_groups
            keys["expert_group_used_count"] = self.n_expert_groups // 2
        if self.n_layer_nextn:
            keys["nextn_predict_layers"] = self.n_layer_nextn
        return keys

    def _hybrid(self) -> Keys:
        """Return the keys of DeltaNets, the shared expert and MTP blocks."""
        keys: Keys = {
            "expert_shared_feed_forward_length": self.n_ff_shexp,
            "ssm.conv_kernel": self.ssm_d_conv,
            "ssm.inner_size": self.value_dim,
            "ssm.state_size": self.ssm_d_state,
            "ssm.time_step_rank": self.n_v_heads,
            "ssm.group_count": self.n_k_heads,
        }
        if self.arch == "qwen35moe":
            keys["rope.dimension_sections"] = self.rope_sections()
        if self.layers:
            kinds = [self.is_recurrent(il) for il in range(self.n_layer_all)]
            keys["attention.recurrent_layers"] = kinds
        else:
            keys["full_attention_interval"] = self.full_attention_interval
        if self.n_layer_nextn:
            keys["nextn_predict_layers"] = self.n_layer_nextn
        return keys

    def _gemma4(self) -> Keys:
        """Return what gemma4 has otherwise: heads and rope of layers with and without a window."""
        layers = range(self.n_layer)
        return {
            "attention.head_count_kv": [self.heads(il)[1] for il in layers],
            "attention.key_length_swa": self.head_dim_swa,
            "attention.value_length_swa": self.head_dim_swa,
            "attention.sliding_window": self.n_swa,
            "attention.sliding_window_pattern": [self.is_window(il) for il in layers],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "feed_forward_length": self.n_ff_shexp,
            "final_logit_softcapping": self.logit_softcap,
            "rope.dimension_count_swa": self.head_dim_swa,
            "rope.freq_base_swa": self.rope_freq_base_swa,
        }


def shape_options() -> list[tuple[str, Any, str]]:
    """Return (name, default, help) of every hyper-parameter, for a command line."""
    return [(f.name, f.default, f.metadata["help"]) for f in fields(Shape)]
