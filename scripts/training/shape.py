"""Hyper-parameters of the small models and of their tokenizer, which every step reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelgen.shape import Shape as Shape

PRE_TOKENIZER = "qwen35"
# The expression that the name above selects in llama.cpp; only with the same one do ids agree.
PRE_TOKENIZER_REGEX = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EOT, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (EOT, IM_START, IM_END, MASK)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

SHAPE = Shape(
    n_vocab=4096, n_ctx_train=2048, n_embd=256, n_layer=8, n_head=8, n_head_kv=2, head_dim=64,
    n_rot=32, n_expert=32, n_expert_used=4, n_ff_exp=128, n_ff_shexp=256, ssm_d_state=64,
    n_k_heads=4, n_v_heads=8, rope_freq_base=1e5,
)  # fmt: skip
SHAPES = {
    "qwen35moe": SHAPE,
    "gpt-oss": Shape(
        arch="gpt-oss", n_vocab=4096, n_ctx_train=2048, n_embd=256, n_layer=6, n_head=4,
        n_head_kv=2, head_dim=64, n_rot=64, n_expert=32, n_expert_used=4, n_ff_exp=64,
        n_ff_shexp=0, n_swa=128, full_attention_interval=2, rope_freq_base=1e5,
        f_norm_rms_eps=1e-5,
    ),
}  # fmt: skip


def model_config(s: Shape) -> Any:
    """Return the transformers configuration (Qwen3_5MoeTextConfig, GptOssConfig) of a model."""
    from transformers import GptOssConfig, Qwen3_5MoeTextConfig

    common: dict[str, Any] = {
        "vocab_size": s.n_vocab,
        "hidden_size": s.n_embd,
        "num_hidden_layers": s.n_layer,
        "num_attention_heads": s.n_head,
        "num_key_value_heads": s.n_head_kv,
        "head_dim": s.head_dim,
        "max_position_embeddings": s.n_ctx_train,
        "rms_norm_eps": s.f_norm_rms_eps,
        "tie_word_embeddings": False,
        "num_experts_per_tok": s.n_expert_used,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": s.rope_freq_base}
    if s.arch == "gpt-oss":
        return GptOssConfig(
            **common,
            intermediate_size=s.n_ff_exp,
            num_local_experts=s.n_expert,
            sliding_window=s.n_swa,
            rope_parameters=rope,
        )
    return Qwen3_5MoeTextConfig(
        **common,
        full_attention_interval=s.full_attention_interval,
        linear_conv_kernel_dim=s.ssm_d_conv,
        linear_key_head_dim=s.ssm_d_state,
        linear_value_head_dim=s.ssm_d_state,
        linear_num_key_heads=s.n_k_heads,
        linear_num_value_heads=s.n_v_heads,
        moe_intermediate_size=s.n_ff_exp,
        shared_expert_intermediate_size=s.n_ff_shexp,
        num_experts=s.n_expert,
        rope_parameters={
            **rope,
            "partial_rotary_factor": s.n_rot / s.head_dim,
            "mrope_section": s.rope_sections()[:3],
            "mrope_interleaved": True,
        },
    )
