"""Train the small model from scratch on one GPU within a wall-clock budget.

    python train_tiny.py CORPUS_DIR OUT_DIR [--seconds 480] [--graph] [--balance-weight 0.002]
    python train_tiny.py CORPUS_DIR OUT_DIR --init CHECKPOINT [--peak-rate 0.0015]

Reads train.u16 and heldout.u16 of tokenize_text.py. Writes OUT_DIR/checkpoint.safetensors (matrices
in bfloat16, vectors in float32) and OUT_DIR/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import delta
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from shape import N_EXPERT, N_LAYER, SSM_DT_RANK, model_config
from torch import Tensor, nn

# (batch, time, share of the budget): short sequences first, the full context at the end.
PHASES = ((64, 512, 0.7), (16, 2048, 0.3))
EVAL_TIME = 2048


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
    """Return the untrained model, matrices in bfloat16 and vectors in float32."""
    from transformers import Qwen3_5MoeForCausalLM

    delta.install()
    torch.manual_seed(1)
    config = model_config()
    config._attn_implementation = "sdpa"
    model = Qwen3_5MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
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
    for p in model.parameters():
        p.data = p.data.to(torch.float32 if p.ndim == 1 else torch.bfloat16)
    return model.to(device)


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


def selection_share(ids: Tensor) -> Tensor:
    """Return the share of the selections that each expert got, [n_expert]."""
    # CPU histograms want floats, deterministic CUDA ones integers; neither synchronises.
    values = ids.flatten().int() if ids.is_cuda else ids.flatten().float()
    return torch.histc(values, bins=N_EXPERT, min=0, max=N_EXPERT - 1).float() / ids.numel()


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood, in nats, of ids [batch, time + 1]."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def balance_loss(routing: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum over layers of n_expert * sum(share * probability); 1 a layer if uniform."""
    total = torch.zeros((), device=routing[0][0].device)
    for logits, ids in routing:
        probability = torch.softmax(logits.float(), -1).mean(0)
        total = total + N_EXPERT * (selection_share(ids) * probability).sum()
    return total


class Step:
    """Forward and backward pass over a fixed shape, optionally captured in a CUDA graph."""

    def __init__(
        self, model: nn.Module, router: Router, shape: tuple[int, int], weight: float, graph: bool
    ) -> None:
        self.model, self.router, self.weight = model, router, weight
        self.params = list(model.parameters())
        self.ids = torch.zeros(
            shape[0], shape[1] + 1, dtype=torch.long, device=self.params[0].device
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph:
            self.capture()

    def compute(self) -> None:
        loss = token_loss(self.model, self.ids)
        balance = balance_loss(self.router.take())
        (loss + self.weight * balance).backward()
        self.loss, self.balance = loss.detach(), balance.detach()

    def capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.clear()
                self.compute()
        torch.cuda.current_stream().wait_stream(stream)
        expected = self.loss.item()
        self.clear()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.compute()
        self.grads = [p.grad for p in self.params]
        self.clear()
        self.graph.replay()
        got = self.loss.item()
        if not math.isclose(expected, got, rel_tol=1e-3):
            raise RuntimeError(f"captured step has loss {got}, not {expected}")

    def clear(self) -> None:
        for p in self.params:
            p.grad = None

    def run(self, ids: Tensor) -> list[Tensor]:
        """Return the gradients of the parameters for a batch ids [batch, time + 1]."""
        self.ids.copy_(ids)
        if self.graph is not None:
            self.graph.replay()
            return self.grads
        self.clear()
        self.compute()
        return [p.grad for p in self.params]


class Optimizer:
    """AdamW on float32 master copies of the parameters, with gradient clipping."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.params = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.params]
        for m in self.masters:
            m.grad = torch.zeros_like(m)
        groups = [
            {
                "params": [m for m in self.masters if m.ndim > 1],
                "weight_decay": recipe.weight_decay,
            },
            {"params": [m for m in self.masters if m.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            groups, betas=(recipe.beta1, recipe.beta2), eps=1e-8, fused=self.masters[0].is_cuda
        )

    @torch.no_grad()
    def step(self, grads: list[Tensor], rate: float) -> None:
        own = [m.grad for m in self.masters]
        torch._foreach_copy_(own, grads)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own)))
        torch._foreach_mul_(own, torch.clamp(self.recipe.clip / (norm + 1e-6), max=1.0))
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        torch._foreach_copy_([p.data for p in self.params], self.masters)


def sample_batch(tokens: Tensor, batch: int, length: int) -> Tensor:
    """Return random windows [batch, length + 1] of tokens [n], as int64."""
    starts = torch.randint(tokens.numel() - length - 1, (batch, 1), device=tokens.device)
    return tokens[starts + torch.arange(length + 1, device=tokens.device)].long()


@torch.no_grad()
def evaluate(model: nn.Module, router: Router, tokens: Tensor) -> dict[str, object]:
    """Return held-out loss over whole windows of EVAL_TIME tokens, and the share of each expert."""
    n = (tokens.numel() - 1) // EVAL_TIME
    losses, shares = [], []
    for i in range(0, n, 16):
        rows = [tokens[j * EVAL_TIME : (j + 1) * EVAL_TIME + 1] for j in range(i, min(i + 16, n))]
        ids = torch.stack(rows).long()
        losses.append(token_loss(model, ids) * len(rows))
        shares.append(torch.stack([selection_share(e) for _, e in router.take()]) * len(rows))
    share = torch.stack(shares).sum(0) / n
    quarter = share.sort(-1, descending=True).values[:, : N_EXPERT // 4].sum(-1)
    loss = (torch.stack(losses).sum() / n).item()
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "windows": n,
        "busiest_quarter": [round(x, 4) for x in quarter.tolist()],
        "share": [[round(x, 5) for x in row] for row in share.tolist()],
    }


def save(model: nn.Module, out: Path) -> None:
    """Write the parameters to OUT/checkpoint.safetensors."""
    state = {k: v.detach().cpu().contiguous() for k, v in model.named_parameters()}
    save_file(state, out / "checkpoint.safetensors")


def rate_at(recipe: Recipe, step: int, progress: float) -> float:
    """Return the learning rate: linear warm-up, then a cosine over the wall-clock budget."""
    warmup = min(1.0, (step + 1) / recipe.warmup_steps)
    return recipe.peak_rate * warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(args: argparse.Namespace, recipe: Recipe) -> None:
    device = args.device
    begin = time.time()
    torch.backends.cuda.matmul.allow_tf32 = True
    tokens, held_out = (
        torch.from_numpy(np.fromfile(args.corpus / f"{n}.u16", "<u2").astype("<i4")).to(device)
        for n in ("train", "heldout")
    )
    model = build_model(device)
    router = Router(model)
    if args.init:
        model.load_state_dict(load_file(args.init), strict=True)
    optimizer = Optimizer(model, recipe)
    phases = [(b // args.shrink, t // args.shrink, share) for b, t, share in PHASES]
    if args.init:
        phases = [(*phases[-1][:2], 1.0)]
    steps = [Step(model, router, p[:2], recipe.balance_weight, args.graph) for p in phases]
    n_params = sum(p.numel() for p in model.parameters())
    start = time.time()
    budget = args.seconds - (start - begin)
    print(
        f"{n_params} parameters, {tokens.numel()} tokens, ready after {start - begin:.1f} s, "
        f"{budget:.0f} s to train",
        flush=True,
    )
    log: list[dict[str, float]] = []
    n_step = n_tokens = phase = 0
    end_of_phase = phases[0][2]
    while (progress := (time.time() - start) / budget) < 1 and n_step < args.max_steps:
        if progress > end_of_phase and phase + 1 < len(phases):
            save(model, args.out)
            phase += 1
            end_of_phase += phases[phase][2]
        batch, length, _ = phases[phase]
        grads = steps[phase].run(sample_batch(tokens, batch, length))
        optimizer.step(grads, rate_at(recipe, n_step, progress))
        n_step += 1
        n_tokens += batch * length
        if n_step % 8 == 0 and device == "cuda":
            torch.cuda.synchronize()  # the schedule follows the clock, so wait for the device
        if n_step % args.log_every == 0:
            entry = {
                "step": n_step,
                "tokens": n_tokens,
                "seconds": round(time.time() - start, 1),
                "loss": round(steps[phase].loss.item(), 4),
                "balance": round(steps[phase].balance.item() / N_LAYER, 3),
            }
            if not math.isfinite(entry["loss"]):
                raise SystemExit(f"loss is not finite at step {n_step}")
            log.append(entry)
            print(json.dumps(entry), flush=True)
    save(model, args.out)
    seconds = time.time() - start
    report = {
        "parameters": n_params,
        "steps": n_step,
        "tokens": n_tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(n_tokens / seconds),
        "recipe": asdict(recipe),
        "phases": phases,
        "device": device_name(device),
        "torch": torch.__version__,
        "held_out": evaluate(model, router, held_out),
        "log": log,
    }
    (args.out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "log"}), flush=True)


def device_name(device: str) -> str:
    """Return the name of the training device."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0, help="wall-clock budget")
    parser.add_argument("--init", type=Path, help="continue from this checkpoint, full context")
    parser.add_argument("--peak-rate", type=float, default=Recipe.peak_rate)
    parser.add_argument("--balance-weight", type=float, default=Recipe.balance_weight)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graph", action="store_true", help="capture the step in a CUDA graph")
    parser.add_argument("--shrink", type=int, default=1, help="divide batch and length (dry runs)")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args, Recipe(peak_rate=args.peak_rate, balance_weight=args.balance_weight))


if __name__ == "__main__":
    main()
