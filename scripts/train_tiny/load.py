"""Load the shipped GGUF as a transformers model, to train a drafter on its features.

model = load_gguf("moegraph/models/tiny.gguf")
hidden = hidden_states(model, ids)
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from mapping import entries, from_gguf
from shape import N_LAYER, model_config
from torch import Tensor, nn


def load_gguf(path: str | Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the transformers model with the file's weights, dequantized."""
    from transformers import Qwen3_5MoeForCausalLM

    tensors = {
        t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(str(path)).tensors
    }
    parts: dict[str, list[np.ndarray]] = {}
    for entry in entries():
        parts.setdefault(entry.param, []).append(from_gguf(entry, tensors.pop(entry.gguf)))
    if tensors:
        raise SystemExit(f"{path}: tensors that no parameter takes: {sorted(tensors)}")
    # entries() lists the two halves of a fused projection one after the other, gate first.
    state = {
        name: torch.from_numpy(np.concatenate(x, axis=1) if len(x) > 1 else x[0])
        for name, x in parts.items()
    }
    config = model_config()
    config._attn_implementation = "sdpa"
    model = Qwen3_5MoeForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.to(dtype).eval()


@torch.no_grad()
def hidden_states(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Return the output of every layer, [batch, time, n_embd] each, for ids [batch, time].

    Entry il is layer il's output before the final norm, which is what llama.cpp calls the input
    of layer il + 1 and what a DFlash drafter reads.
    """
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, out: outputs.append(out))
        for layer in model.model.layers
    ]
    try:
        model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(outputs) == N_LAYER
    return outputs
