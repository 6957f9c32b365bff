"""Train a small model from scratch on one GPU within a wall-clock budget.

    python train_tiny.py CORPUS_DIR OUT_DIR [--family gpt-oss] [--seconds 480]

Reads train.u16 and heldout.u16 of tokenize_text.py. Writes OUT_DIR/checkpoint.safetensors and
OUT_DIR/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from shape import SHAPES, Shape, model_config
from torch import Tensor, nn

# (batch, time, share of the budget): short sequences first, the full context at the end.
PHASES = ((64, 512, 0.7), (16, 2048, 0.3))


PEAK_RATE, WARMUP_STEPS, WEIGHT_DECAY, BALANCE_WEIGHT = 3e-3, 150, 0.1, 0.002


def read_tokens(path: Path, device: str) -> Tensor:
    """Return the ids of a .u16 file, int32."""
    return torch.from_numpy(np.fromfile(path, "<u2").astype("<i4")).to(device)


def windows(tokens: Tensor, batch: int, length: int) -> Tensor:
    """Return random windows [batch, length] of tokens [n], int64."""
    starts = torch.randint(len(tokens) - length + 1, (batch, 1), device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def wide_experts(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of a layer's routed experts for normed x [n, n_embd].

    Runs all of them side by side as one wide feed-forward layer and masks those not chosen: at
    these widths that is faster than gathering rows.
    """
    gate_up, down = (w if self.is_transposed else w.mT for w in (self.gate_up_proj, self.down_proj))
    act = x @ gate_up.transpose(0, 1).flatten(1)
    if self.has_bias:
        act = act + self.gate_up_proj_bias.flatten().to(act.dtype)
    share = act.new_zeros(len(x), self.num_experts).scatter(1, ids, weights.to(act.dtype))
    act = self._apply_gate(act.unflatten(1, (self.num_experts, -1))) * share[..., None]
    out = act.flatten(1) @ down.flatten(0, 1)
    return out + share @ self.down_proj_bias if self.has_bias else out


def build_model(shape: Shape, device: str) -> nn.Module:
    """Return the untrained model."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    torch.manual_seed(1)
    ALL_EXPERTS_FUNCTIONS.register("wide", wide_experts)
    model = AutoModelForCausalLM.from_config(model_config(shape), experts_implementation="wide")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                p.mul_((2 * shape.n_layer) ** -0.5)
            elif name.endswith("A_log"):
                p.copy_(torch.empty(shape.n_v_heads).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                # Time steps spread over 0.001 to 0.1 give memories from ten to thousands of tokens.
                dt = torch.exp(torch.rand(shape.n_v_heads) * math.log(100) + math.log(0.001))
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
    return model.float().to(device)


class Router:
    """Collects every layer's router output during a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: list[tuple[Tensor, Tensor]] = []
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: object, out: tuple[Tensor, Tensor, Tensor]) -> None:
        self.outputs.append((out[0], out[2]))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Return (logits [n, n_expert], ids [n, n_used]) by layer, and forget them."""
        outputs, self.outputs = self.outputs, []
        return outputs


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood, in nats, of ids [batch, time + 1]."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def balance_loss(routing: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum over layers of n_expert * sum(share * probability); 1 a layer if uniform."""
    total = torch.zeros((), device=routing[0][0].device)
    for logits, ids in routing:
        probs = torch.softmax(logits.float(), -1)
        share = torch.zeros_like(probs).scatter(1, ids, 1 / ids.shape[1]).mean(0)
        total = total + len(share) * (share * probs.mean(0)).sum()
    return total


@torch.no_grad()
def evaluate(model: nn.Module, router: Router, tokens: Tensor, time: int) -> dict[str, float]:
    """Return the loss over all whole windows of held-out tokens [n]."""
    rows = tokens[: (len(tokens) - 1) // time * time + 1].long().unfold(0, time + 1, time)
    losses = [token_loss(model, part) * len(part) for part in rows.split(16)]
    router.take()
    loss = (torch.stack(losses).sum() / len(rows)).item()
    return {"loss": loss, "perplexity": math.exp(loss), "windows": len(rows)}


class Optimizer:
    """AdamW, which lets only matrices decay, with a rate that follows the wall-clock budget."""

    def __init__(self, model: nn.Module, peak: float, warmup_steps: int, decay: float) -> None:
        self._peak, self._warmup_steps = peak, warmup_steps
        self._params = list(model.parameters())
        groups = [
            {"params": [p for p in self._params if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in self._params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def step(self, loss: Tensor, n_step: int, progress: float) -> None:
        """Take one step: linear warm-up, then a cosine over the budget."""
        self._adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._params, 1.0)
        warmup = min(1.0, (n_step + 1) / self._warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self._adam.param_groups:
            group["lr"] = self._peak * warmup * cosine
        self._adam.step()


def train(args: argparse.Namespace) -> None:
    """Train, evaluate, and write both files."""
    tokens = read_tokens(args.corpus / "train.u16", args.device)
    shape = SHAPES[args.family]
    model = build_model(shape, args.device)
    router = Router(model)
    optimizer = Optimizer(model, PEAK_RATE, WARMUP_STEPS, WEIGHT_DECAY)
    if args.compile:
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        for batch, length, _ in PHASES:
            token_loss(model, windows(tokens, batch, length + 1)).backward()
            router.take()
    log: list[dict[str, float]] = []
    start, step, n_tokens = time.time(), 0, 0
    while (progress := (time.time() - start) / args.seconds) < 1:
        batch, length, _ = PHASES[progress > PHASES[0][2]]
        loss = token_loss(model, windows(tokens, batch, length + 1))
        balance = balance_loss(router.take())
        optimizer.step(loss + BALANCE_WEIGHT * balance, step, progress)
        step, n_tokens = step + 1, n_tokens + batch * length
        if step % 50 == 0:
            log.append({"step": step, "tokens": n_tokens, "seconds": round(time.time() - start, 1),
                        "loss": round(loss.item(), 4),
                        "balance": round(balance.item() / shape.n_layer, 3)})  # fmt: skip
            print(json.dumps(log[-1]), flush=True)
    state = {k: v.detach().cpu().contiguous() for k, v in model.named_parameters()}
    save_file(state, args.out / "checkpoint.safetensors")
    with torch.compiler.set_stance("force_eager"):
        found = read_tokens(args.corpus / "heldout.u16", args.device)
        held_out = evaluate(model, router, found, PHASES[1][1])
    report = {
        "parameters": sum(p.numel() for p in model.parameters()), "steps": step, "tokens": n_tokens,
        "seconds": round(time.time() - start, 1), "phases": PHASES,
        "torch": torch.__version__,
        "held_out": held_out, "log": log,
    }  # fmt: skip
    (args.out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["held_out"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=SHAPES, default="qwen35moe")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0, help="wall-clock budget")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="compile the layers first")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
