"""Train the small model from scratch on one GPU within a wall-clock budget.

    python train_tiny.py CORPUS_DIR OUT_DIR [--seconds 480]

Reads train.u16 and heldout.u16 of tokenize_text.py. Writes OUT_DIR/checkpoint.safetensors and
OUT_DIR/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from shape import N_EXPERT, N_LAYER, SSM_DT_RANK, model_config
from torch import Tensor, nn
from training_text import read_tokens, windows

# (batch, time, share of the budget): short sequences first, the full context at the end.
PHASES = ((64, 512, 0.7), (16, 2048, 0.3))


@dataclass(frozen=True)
class Recipe:
    """Optimizer settings."""

    peak_rate: float = 3e-3
    warmup_steps: int = 150
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    balance_weight: float = 0.002


def build_model(device: str) -> nn.Module:
    """Return the untrained model."""
    from transformers import Qwen3_5MoeForCausalLM

    torch.manual_seed(1)
    model = Qwen3_5MoeForCausalLM(model_config())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                p.mul_((2 * N_LAYER) ** -0.5)
            elif name.endswith("A_log"):
                p.copy_(torch.empty(SSM_DT_RANK).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                # Time steps spread over 0.001 to 0.1 give memories from ten to thousands of tokens.
                dt = torch.exp(torch.rand(SSM_DT_RANK) * math.log(100) + math.log(0.001))
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
    return model.float().to(device)


class Router:
    """Collects every layer's router output during a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: list[tuple[Tensor, Tensor]] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self.hook)

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
        share = torch.bincount(ids.flatten(), minlength=N_EXPERT) / ids.numel()
        total = total + N_EXPERT * (share * torch.softmax(logits.float(), -1).mean(0)).sum()
    return total


@torch.no_grad()
def evaluate(model: nn.Module, router: Router, tokens: Tensor, time: int) -> dict[str, float]:
    """Return the loss over all whole windows of held-out tokens [n]."""
    rows = tokens[: (len(tokens) - 1) // time * time + 1].long().unfold(0, time + 1, time)
    losses = [token_loss(model, part) * len(part) for part in rows.split(16)]
    router.take()
    loss = (torch.stack(losses).sum() / len(rows)).item()
    return {"loss": loss, "perplexity": math.exp(loss), "windows": len(rows)}


def rate_at(recipe: Recipe, step: int, progress: float) -> float:
    """Return the learning rate: linear warm-up, then a cosine over the wall-clock budget."""
    warmup = min(1.0, (step + 1) / recipe.warmup_steps)
    return recipe.peak_rate * warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW, which lets only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay},
              {"params": vectors, "weight_decay": 0.0}]  # fmt: skip
    found: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2))
    return found


def train(args: argparse.Namespace, recipe: Recipe) -> None:
    """Train, evaluate, and write both files."""
    tokens = read_tokens(args.corpus / "train.u16", args.device)
    model = build_model(args.device)
    router, optimizer = Router(model), optimizer_of(model, recipe)
    params = list(model.parameters())
    phases = [(b // args.shrink, t // args.shrink, share) for b, t, share in PHASES]
    log: list[dict[str, float]] = []
    start, step, n_tokens = time.time(), 0, 0
    while (progress := (time.time() - start) / args.seconds) < 1:
        batch, length, _ = phases[progress > phases[0][2]]
        loss = token_loss(model, windows(tokens, batch, length + 1))
        balance = balance_loss(router.take())
        optimizer.zero_grad(set_to_none=True)
        (loss + recipe.balance_weight * balance).backward()
        torch.nn.utils.clip_grad_norm_(params, recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(recipe, step, progress)
        optimizer.step()
        step, n_tokens = step + 1, n_tokens + batch * length
        if step % args.log_every == 0:
            log.append({"step": step, "tokens": n_tokens, "seconds": round(time.time() - start, 1),
                        "loss": round(loss.item(), 4),
                        "balance": round(balance.item() / N_LAYER, 3)})  # fmt: skip
            print(json.dumps(log[-1]), flush=True)
    state = {k: v.detach().cpu().contiguous() for k, v in model.named_parameters()}
    save_file(state, args.out / "checkpoint.safetensors")
    held_out = read_tokens(args.corpus / "heldout.u16", args.device)
    report = {
        "parameters": sum(p.numel() for p in params), "steps": step, "tokens": n_tokens,
        "seconds": round(time.time() - start, 1), "recipe": asdict(recipe), "phases": phases,
        "torch": torch.__version__,
        "held_out": evaluate(model, router, held_out, phases[1][1]), "log": log,
    }  # fmt: skip
    (args.out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["held_out"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0, help="wall-clock budget")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide batch and length (dry runs)")
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args, Recipe())


if __name__ == "__main__":
    main()
