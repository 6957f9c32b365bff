"""Hyper-parameters of the small model and of its tokenizer, which every step reads."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 4096
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

N_EMBD = 256
N_LAYER = 8
FULL_ATTENTION_INTERVAL = 4
N_HEAD = 8
N_HEAD_KV = 2
HEAD_DIM = 64
N_ROT = 32
ROPE_SECTIONS = (6, 5, 5)
ROPE_FREQ_BASE = 100000.0
N_EXPERT = 32
N_EXPERT_USED = 4
N_FF_EXP = 128
N_FF_SHEXP = 256
SSM_D_CONV = 4
SSM_D_STATE = 64
SSM_N_GROUP = 4
SSM_DT_RANK = 8
SSM_D_INNER = SSM_D_STATE * SSM_DT_RANK
NORM_RMS_EPS = 1e-6
N_CTX_TRAIN = 2048


def is_recurrent(il: int) -> bool:
    """Return whether layer il is a DeltaNet layer."""
    return (il + 1) % FULL_ATTENTION_INTERVAL != 0


def model_config() -> Any:
    """Return the transformers configuration (Qwen3_5MoeTextConfig) of the small model."""
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=N_EMBD,
        num_hidden_layers=N_LAYER,
        num_attention_heads=N_HEAD,
        num_key_value_heads=N_HEAD_KV,
        head_dim=HEAD_DIM,
        max_position_embeddings=N_CTX_TRAIN,
        rms_norm_eps=NORM_RMS_EPS,
        tie_word_embeddings=False,
        full_attention_interval=FULL_ATTENTION_INTERVAL,
        linear_conv_kernel_dim=SSM_D_CONV,
        linear_key_head_dim=SSM_D_STATE,
        linear_value_head_dim=SSM_D_STATE,
        linear_num_key_heads=SSM_N_GROUP,
        linear_num_value_heads=SSM_DT_RANK,
        moe_intermediate_size=N_FF_EXP,
        shared_expert_intermediate_size=N_FF_SHEXP,
        num_experts=N_EXPERT,
        num_experts_per_tok=N_EXPERT_USED,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": ROPE_FREQ_BASE,
            "partial_rotary_factor": N_ROT / HEAD_DIM,
            "mrope_section": list(ROPE_SECTIONS),
            "mrope_interleaved": True,
        },
    )
