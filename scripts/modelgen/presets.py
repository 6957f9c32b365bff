"""Named models, and mixes: which ggml type each tensor gets, by class and by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .blocks import TYPES
from .shape import Shape

# The classes that a rule may name, and names for groups of them.
CLASSES = ("embd", "head", "attn", "latent", "ssm", "ssm_ab", "shexp", "gate_up", "down", "nextn")
GROUPS = {
    "dense": ("attn", "latent", "ssm", "ssm_ab", "shexp", "nextn"),
    "experts": ("gate_up", "down"),
    "all": CLASSES,
}
# The mix of the published 35B-A3B files, used for the figures in docs/benchmarks.
DEFAULT_MIX = "all=Q8_0,embd=F16,head=Q6_K,gate_up=Q4_K,down=Q5_K"


# One `class[@first-last]=TYPE` of a mix: classes, layers, type; layers None means every layer.
Rule = tuple[tuple[str, ...], range | None, str]


class Mix:
    """A list of rules; the last one that matches wins."""

    def __init__(self, text: str) -> None:
        self._rules = [_parse(part) for part in text.split(",") if part]

    def type_of(self, cls: str, il: int | None) -> str:
        """Return the type of class `cls` in layer `il` (None outside the layers)."""
        for classes, layers, name in reversed(self._rules):
            if cls in classes and (layers is None or il in layers):
                return name
        return "F32"


def _parse(part: str) -> Rule:
    left, _, name = part.partition("=")
    cls, _, layers = left.partition("@")
    classes = GROUPS.get(cls, (cls,) if cls in CLASSES else ())
    if not classes:
        known = ", ".join((*CLASSES, *GROUPS))
        raise ValueError(f"mix {part!r}: unknown tensor class {cls!r}, use one of {known}")
    if name not in TYPES:
        raise ValueError(f"mix {part!r}: unknown type {name!r}, use one of {', '.join(TYPES)}")
    first, _, last = layers.partition("-")
    return classes, range(int(first), int(last or first) + 1) if layers else None, name


@dataclass(frozen=True)
class Preset:
    """A shape with its quant mix."""

    shape: Shape
    mix: str
    about: str


_SMALL = Shape(
    n_vocab=1024, n_ctx_train=4096, n_embd=256, n_layer=4, n_head=4, n_head_kv=2, head_dim=64,
    n_rot=16, n_expert=32, n_expert_used=4, n_ff_exp=64, n_ff_shexp=64, ssm_d_state=64,
    n_k_heads=2, n_v_heads=4,
)  # fmt: skip


def _small(**changes: object) -> Shape:
    return replace(_SMALL, **changes)  # type: ignore[arg-type]


PRESETS = {
    "35b-a3b": Preset(Shape(), DEFAULT_MIX, "the benchmark model, 22 GB"),
    "legacy32": Preset(
        _small(n_layer=8),
        "all=Q8_0,embd=F16,gate_up=Q4_0,down=Q5_0,gate_up@4-7=Q4_1,down@4-7=Q5_1,attn@7=Q5_1",
        "32 experts top-4, block-32 types, 8 layers",
    ),
    "kquant40": Preset(
        _small(
            n_embd=512, n_expert=40, n_expert_used=6, n_ff_exp=256, n_ff_shexp=256, head_dim=128,
            n_head=4, n_head_kv=1, n_rot=32, ssm_d_state=128, n_k_heads=2, n_v_heads=2,
            full_attention_interval=2, expert_weights_scale=1.5,
        ),
        "all=Q6_K,embd=Q4_K,ssm_ab=F32,attn=Q5_K,shexp=Q3_K,gate_up=Q2_K,down=Q3_K,"
        "gate_up@1=Q3_K,down@1=Q4_K,gate_up@2-3=Q4_K,down@2=Q5_K,down@3=Q6_K",
        "40 experts top-6, every K-quant, a mix that changes from layer to layer",
    ),
    "iq64": Preset(
        _small(
            n_layer=6, n_expert=64, n_expert_used=8, head_dim=256, n_head=2, n_head_kv=2, n_rot=64,
            n_k_heads=4, n_v_heads=4, full_attention_interval=3, merged_gate_up=True,
        ),
        "all=IQ4_NL,embd=BF16,head=Q4_1,ssm_ab=F16,attn=IQ4_XS,gate_up=IQ4_XS,down=IQ4_NL",
        "64 experts top-8, merged gate_up, non-linear types",
    ),
    "mxfp256": Preset(
        _small(
            n_expert=256, n_expert_used=8, n_head=8, n_head_kv=2, ssm_d_state=128, n_k_heads=1,
            n_v_heads=4, n_vocab=2048,
        ),
        "all=Q8_0,embd=Q8_0,experts=MXFP4,ssm_ab=F32",
        "256 experts top-8, MXFP4",
    ),
    "float32": Preset(
        _small(
            n_layer=5, layers="daddd", n_head=2, n_head_kv=1, head_dim=128, n_rot=128, n_ff_exp=96,
            n_ff_shexp=160, tied=True, n_layer_nextn=1, rope_scaling="yarn", rope_factor=4.0,
            rope_orig_ctx=512, rope_freq_base=10000.0,
        ),
        "all=F32,attn=F16,ssm=BF16,gate_up=F16,down=BF16,shexp=F16,gate_up@2=BF16,experts@3=F32",
        "32 experts top-4, floats only, tied embeddings, MTP block, YaRN, irregular layers",
    ),
    "mini35b": Preset(
        _small(
            n_embd=512, n_head=4, n_head_kv=1, head_dim=256, n_rot=64, n_ff_exp=256,
            n_ff_shexp=256, ssm_d_state=128, n_k_heads=2, n_v_heads=4, n_expert_used=8,
            n_layer_nextn=1,
        ),
        DEFAULT_MIX,
        "the 35B-A3B mix and head shapes at a small size, with an MTP block",
    ),
    "wide64": Preset(
        _small(
            n_embd=2048, n_layer=2, layers="da", n_head=4, n_head_kv=1, head_dim=256, n_rot=64,
            n_expert=64, n_ff_exp=256, n_ff_shexp=256, ssm_d_state=128, n_k_heads=2, n_v_heads=4,
            n_expert_used=8,
        ),
        DEFAULT_MIX,
        "the 35B-A3B mix and row at two layers of 64 experts: kernels of one token, 150 MB",
    ),
    "qwen3moe": Preset(
        _small(arch="qwen3moe", n_layer=3, n_rot=64, n_expert_used=6, n_ff_shexp=0),
        "all=Q6_K,embd=F16,attn=Q8_0,gate_up=Q4_K,down=Q4_0,down@1=Q8_0",
        "qwen3moe: 3 layers of plain attention, 32 experts top-6, no shared expert",
    ),
    "qwen3next": Preset(
        _small(
            arch="qwen3next", n_expert=512, n_expert_used=10, n_ff_exp=32, n_k_heads=2,
            n_v_heads=6, n_layer_nextn=1, expert_weights_scale=1.5,
        ),
        "all=Q8_0,embd=F16,experts=Q4_0,attn=Q5_K,ssm=Q5_0,ssm_ab=F16,down@2=Q8_0",
        "qwen3next: 512 experts top-10, 3 value heads for each key head, MTP block",
    ),
    "qwen3next-fused": Preset(
        _small(
            arch="qwen3next", n_layer=3, layers="dad", n_expert=48, n_expert_used=10,
            ssm_d_state=128, n_k_heads=2, n_v_heads=4, has_qkvz=True, merged_gate_up=True,
            n_layer_nextn=1, rope_scaling="yarn", rope_factor=4.0, rope_orig_ctx=512,
        ),
        "all=Q8_0,embd=Q6_K,gate_up=Q4_K,down=Q5_0,attn=Q6_K",
        "qwen3next as older files are: q, k, v and z as one matrix; merged gate_up, MTP, YaRN",
    ),
    "30b-a3b": Preset(
        Shape(
            arch="qwen3moe", n_vocab=151936, n_ctx_train=262144, n_layer=48, n_head=32, n_head_kv=4,
            head_dim=128, n_rot=128, n_expert=128, n_ff_exp=768, n_ff_shexp=0,
        ),
        "all=Q8_0,embd=F16,head=Q6_K,gate_up=Q4_K,down=Q5_K",
        "the shape of Qwen3-30B-A3B, 19 GB",
    ),
    "235b-a22b": Preset(
        Shape(
            arch="qwen3moe", n_vocab=151936, n_ctx_train=262144, n_embd=4096, n_layer=94, n_head=64,
            n_head_kv=4, head_dim=128, n_rot=128, n_expert=128, n_ff_exp=1536, n_ff_shexp=0,
        ),
        "all=Q8_0,embd=F16,head=Q6_K,gate_up=Q4_K,down=Q5_K",
        "the shape of Qwen3-235B-A22B, 148 GB",
    ),
    "mla-lite": Preset(
        _small(
            arch="deepseek2", n_layer=3, n_head_kv=1, head_dim=96, head_v=64, n_rot=64,
            n_lora_kv=512, n_ff_shexp=128, n_layer_dense_lead=1, n_ff=96, rope_scaling="yarn",
            rope_factor=40.0, rope_orig_ctx=512, rope_log_mul=0.0707,
        ),
        "all=Q8_0,embd=F16,gate_up=Q4_K,down=Q4_0",
        "deepseek2 as DeepSeek-V2-Lite has it: MLA with one matrix for Q, a dense layer, YaRN",
    ),
    "glm47flash": Preset(
        _small(
            arch="deepseek2", n_layer=3, n_head_kv=1, head_dim=96, head_v=64, n_rot=64,
            n_lora_kv=512, n_lora_q=128, n_ff_shexp=64, n_layer_dense_lead=1, n_ff=160,
            is_sigmoid=True, expert_weights_norm=True, expert_weights_scale=1.8, n_layer_nextn=1,
            rope_freq_base=1e6,
        ),
        "all=Q8_0,embd=F16,gate_up=Q4_0,down=Q5_0",
        "deepseek2 as GLM-4.7-Flash has it: two matrices for Q, a dense layer, MTP block",
    ),
    "gemma4": Preset(
        _small(
            arch="gemma4", n_layer=6, full_attention_interval=6, n_head_kv=1, head_dim=128,
            n_rot=128, n_head_kv_swa=2, head_dim_swa=64, n_swa=32, n_ff_shexp=96, tied=True,
            merged_gate_up=True, rope_freq_base=1e6,
        ),
        "all=Q8_0,embd=Q6_K,attn=Q6_K,gate_up=Q4_K,down=Q5_0,gate_up@1=Q5_K",
        "gemma4: 5 layers with a window of 32, 1 without, 32 experts top-4 beside a dense FFN",
    ),
    "glm4moe": Preset(
        _small(
            arch="glm4moe", n_layer=4, n_rot=32, n_layer_dense_lead=1, n_ff=160, is_sigmoid=True,
            expert_weights_norm=True, expert_weights_scale=1.5, n_layer_nextn=1, has_qk_norm=False,
            has_qkv_bias=True, has_nextn_embd=True,
        ),
        "all=Q8_0,embd=F16,attn=Q5_K,gate_up=Q4_K,down=Q4_0,down@2=Q8_0",
        "glm4moe as GLM-4.5-Air has it: a dense layer, biases, no norms of heads, MTP block",
    ),
    "glm4moe-groups": Preset(
        _small(
            arch="glm4moe", n_layer=3, n_rot=64, n_layer_dense_lead=2, n_ff=96, n_ff_shexp=128,
            is_sigmoid=True, n_expert_groups=4, n_expert_used=6, has_mrope=True,
        ),
        "all=Q6_K,embd=F16,attn=Q8_0,gate_up=Q4_0,down=Q5_0,shexp=F16",
        "glm4moe with norms of heads, M-RoPE, groups of experts, two dense layers",
    ),
    "80b-a3b": Preset(
        Shape(
            arch="qwen3next", n_vocab=151936, n_layer=48, n_expert=512, n_expert_used=10,
        ),
        "all=Q8_0,embd=F16,head=Q6_K,ssm_ab=F32,gate_up=Q4_K,down=Q5_K",
        "the shape of Qwen3-Next-80B-A3B, 50 GB",
    ),
    "122b-a10b": Preset(
        Shape(
            n_embd=3072, n_layer=48, n_head=32, n_ff_exp=1024, n_ff_shexp=1024, n_v_heads=64,
        ),
        DEFAULT_MIX,
        "the shape of Qwen3.5-122B-A10B, 77 GB",
    ),
    "397b-a17b": Preset(
        Shape(
            n_embd=4096, n_layer=60, n_head=32, n_expert=512, n_expert_used=10, n_ff_exp=1024,
            n_ff_shexp=1024, n_v_heads=64,
        ),
        DEFAULT_MIX,
        "the shape of Qwen3.5-397B-A17B, 245 GB",
    ),
    "glm-4.5-air": Preset(
        Shape(
            arch="glm4moe", n_vocab=151552, n_ctx_train=131072, n_embd=4096, n_layer=46,
            n_layer_nextn=1, n_head=96, n_head_kv=8, head_dim=128, n_rot=64, n_expert=128,
            n_ff_exp=1408, n_ff_shexp=1408, n_layer_dense_lead=1, n_ff=10944, is_sigmoid=True,
            expert_weights_norm=True, expert_weights_scale=1.0, has_qk_norm=False,
            has_qkv_bias=True, has_nextn_embd=True, rope_freq_base=1e6, f_norm_rms_eps=1e-5,
        ),
        "all=Q8_0,embd=Q4_K,head=Q6_K,gate_up=Q4_K,down=Q5_0",
        "the shape of GLM-4.5-Air, 70 GB",
    ),
    "gemma-4-26b-a4b": Preset(
        Shape(
            arch="gemma4", n_vocab=262144, n_embd=2816, n_layer=30, full_attention_interval=6,
            n_head=16, n_head_kv=2, head_dim=512, n_rot=512, n_expert=128, n_ff_exp=704,
            n_ff_shexp=2112, tied=True, merged_gate_up=True, rope_freq_base=1e6,
        ),
        "all=Q8_0,embd=Q6_K,gate_up=Q4_K,down=Q5_0",
        "the shape of Gemma-4-26B-A4B, 16 GB",
    ),
    "glm-4.7-flash": Preset(
        Shape(
            arch="deepseek2", n_vocab=154880, n_ctx_train=202752, n_embd=2048, n_layer=47,
            n_layer_nextn=1, n_head=20, n_head_kv=1, head_dim=256, head_v=256, n_rot=64,
            n_lora_kv=512, n_lora_q=768, n_expert=64, n_expert_used=4, n_ff_exp=1536,
            n_ff_shexp=1536, n_layer_dense_lead=1, n_ff=10240, is_sigmoid=True,
            expert_weights_norm=True, expert_weights_scale=1.8, rope_freq_base=1e6,
            f_norm_rms_eps=1e-5,
        ),
        "all=Q8_0,embd=Q4_K,head=Q6_K,gate_up=Q4_K,down=Q5_0",
        "the shape of GLM-4.7-Flash, 19 GB",
    ),
    "gptoss": Preset(
        _small(
            arch="gpt-oss", full_attention_interval=2, n_rot=64, n_ff_shexp=0, n_swa=32,
            rope_scaling="yarn", rope_factor=8.0, rope_orig_ctx=512, rope_freq_base=150000.0,
        ),
        "all=Q8_0,embd=F16,experts=MXFP4",
        "gpt-oss: 2 layers with a window of 32, 2 without, sinks, biases, 32 experts top-4",
    ),
    "gpt-oss-20b": Preset(
        Shape(
            arch="gpt-oss", n_vocab=201088, n_ctx_train=131072, n_embd=2880, n_layer=24,
            full_attention_interval=2, n_head=64, n_head_kv=8, head_dim=64, n_rot=64, n_expert=32,
            n_expert_used=4, n_ff_exp=2880, n_ff_shexp=0, n_swa=128, rope_scaling="yarn",
            rope_factor=32.0, rope_orig_ctx=4096, rope_freq_base=150000.0, f_norm_rms_eps=1e-5,
        ),
        "all=Q8_0,experts=MXFP4",
        "the shape of gpt-oss-20b, 12 GB",
    ),
    "olmoe": Preset(
        _small(
            arch="olmoe", n_layer=3, n_head_kv=4, n_rot=64, n_expert=64, n_expert_used=8,
            n_ff_shexp=0, rope_freq_base=1e4, f_norm_rms_eps=1e-5,
        ),
        "all=Q8_0,embd=F16,attn=Q5_K,gate_up=Q4_K,down=Q5_0,down@1=Q4_1",
        "olmoe: norms over all heads together, 64 experts top-8",
    ),
    "olmoe-1b-7b": Preset(
        Shape(
            arch="olmoe", n_vocab=50304, n_ctx_train=4096, n_layer=16, n_head_kv=16, head_dim=128,
            n_rot=128, n_expert=64, n_ff_exp=1024, n_ff_shexp=0, rope_freq_base=1e4,
            f_norm_rms_eps=1e-5,
        ),
        "all=Q8_0,embd=Q4_K,head=Q6_K,gate_up=Q4_K,down=Q5_K",
        "the shape of OLMoE-1B-7B, 4 GB",
    ),
}  # fmt: skip
