"""Hyper-parameters of the small model and of its tokenizer, which every step reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelgen.shape import Shape

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


def model_config() -> Any:
    """Return the transformers configuration (Qwen3_5MoeTextConfig) of the small model."""
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(
        vocab_size=SHAPE.n_vocab,
        hidden_size=SHAPE.n_embd,
        num_hidden_layers=SHAPE.n_layer,
        num_attention_heads=SHAPE.n_head,
        num_key_value_heads=SHAPE.n_head_kv,
        head_dim=SHAPE.head_dim,
        max_position_embeddings=SHAPE.n_ctx_train,
        rms_norm_eps=SHAPE.f_norm_rms_eps,
        tie_word_embeddings=False,
        full_attention_interval=SHAPE.full_attention_interval,
        linear_conv_kernel_dim=SHAPE.ssm_d_conv,
        linear_key_head_dim=SHAPE.ssm_d_state,
        linear_value_head_dim=SHAPE.ssm_d_state,
        linear_num_key_heads=SHAPE.n_k_heads,
        linear_num_value_heads=SHAPE.n_v_heads,
        moe_intermediate_size=SHAPE.n_ff_exp,
        shared_expert_intermediate_size=SHAPE.n_ff_shexp,
        num_experts=SHAPE.n_expert,
        num_experts_per_tok=SHAPE.n_expert_used,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": SHAPE.rope_freq_base,
            "partial_rotary_factor": SHAPE.n_rot / SHAPE.head_dim,
            "mrope_section": SHAPE.rope_sections()[:3],
            "mrope_interleaved": True,
        },
    )
