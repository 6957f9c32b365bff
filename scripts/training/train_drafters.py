"""Train an MTP block and a DFlash drafter for a model, together, within a wall-clock budget.

    python train_drafters.py MODEL.gguf CORPUS_DIR OUT_DIR [--seconds 300]

Reads train.u16 of tokenize_text.py and own.u16 of own_text.py. Every step runs the model over a
batch and trains both drafters on the same features, against the model's own distributions. Writes
OUT_DIR/mtp.safetensors, OUT_DIR/dflash.safetensors (float16) and OUT_DIR/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from drafters import BlockShape, Dflash, Mtp, Named, dflash_loss, mtp_loss
from safetensors.torch import load_file, save_file
from target import Target
from torch import Tensor
from training_text import read_tokens, windows


@dataclass(frozen=True)
class Recipe:
    """Sizes of batches and settings of the optimizer. own_share: rows that the model wrote."""

    batch: int = 48
    time: int = 512
    long_batch: int = 12
    long_time: int = 2048
    long_every: int = 4
    n_anchor: int = 24
    own_share: float = 0.7
    mtp_rate: float = 1.2e-3
    dflash_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0


class Trainee:
    """A drafter with its optimizer."""

    def __init__(self, module: Named, rate: float, recipe: Recipe) -> None:
        self.module, self.rate, self.recipe = module, rate, recipe
        self.params = params = list(module.parameters())
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))

    def step(self, loss: Tensor, n_step: int, progress: float) -> None:
        """Take one step: linear warm-up, then a cosine over the wall-clock budget."""
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, self.recipe.clip)
        warmup = min(1.0, (n_step + 1) / self.recipe.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self.adam.param_groups:
            group["lr"] = self.rate * warmup * cosine
        self.adam.step()

    def save(self, path: Path) -> None:
        """Write the parameters in float16 by GGUF name."""
        state = {n: self.module.weight(n).detach().half().cpu() for n in self.module.names()}
        save_file({k: v.contiguous() for k, v in state.items()}, path)

    def load(self, path: Path) -> None:
        """Continue from a written file."""
        with torch.no_grad():
            for name, x in load_file(path).items():
                self.module.weight(name).copy_(x)


def next_batch(corpus: Tensor, own: Tensor, step: int, r: Recipe) -> Tensor:
    """Return the ids [batch, time] of a step: mixed, or long windows of the corpus."""
    if step % r.long_every == r.long_every - 1:
        return windows(corpus, r.long_batch, r.long_time)
    n_own = round(r.batch * r.own_share)
    return torch.cat([windows(own, n_own, r.time), windows(corpus, r.batch - n_own, r.time)])


def train(args: argparse.Namespace, recipe: Recipe) -> None:
    """Train both drafters and write all files."""
    torch.manual_seed(args.seed)
    is_cuda = args.device == "cuda"
    target = Target(args.model, args.device, torch.bfloat16 if is_cuda else torch.float32)
    corpus, own = (
        read_tokens(args.corpus / f"{name}.u16", args.device) for name in ("train", "own")
    )
    mtp = Mtp(target).to(args.device)
    shape = BlockShape(tuple(args.taps), block_size=args.block)
    dflash = Dflash(target, shape, args.mask_id).to(args.device)
    trainees = {
        "mtp": Trainee(mtp, recipe.mtp_rate, recipe),
        "dflash": Trainee(dflash, recipe.dflash_rate, recipe),
    }
    for name, trainee in trainees.items() if args.init else ():
        trainee.load(args.init / f"{name}.safetensors")
    log: list[dict[str, float]] = []
    start, step = time.time(), 0
    while (progress := (time.time() - start) / args.seconds) < 1:
        ids = next_batch(corpus, own, step, recipe)
        features = target.features(ids)
        with torch.no_grad():
            logits = target.logits(features.hidden)
        first = mtp_loss(mtp, target, ids, features.hidden, logits)
        trainees["mtp"].step(first, step, progress)
        n_anchor = max(1, recipe.n_anchor * ids.shape[1] // recipe.time)
        second = dflash_loss(dflash, target, ids, features, logits, n_anchor)
        trainees["dflash"].step(second, step, progress)
        if step % args.log_every == 0:
            losses = {"mtp": round(first.item(), 4), "dflash": round(second.item(), 4)}
            log.append({"step": step, "seconds": round(time.time() - start, 1), **losses})
            print(json.dumps(log[-1]), flush=True)
        step += 1
    for name, trainee in trainees.items():
        trainee.save(args.out / f"{name}.safetensors")
    report = {
        "dflash": asdict(shape) | {"mask_id": args.mask_id}, "recipe": asdict(recipe),
        "steps": step, "own_tokens": len(own), "seconds": round(time.time() - start, 1), "log": log,
    }  # fmt: skip
    (args.out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="wall-clock budget")
    parser.add_argument("--init", type=Path, help="continue from the drafters in this folder")
    parser.add_argument("--taps", type=int, nargs="+", default=[1, 3, 5, 6])
    parser.add_argument("--block", type=int, default=BlockShape.block_size)
    parser.add_argument("--mask-id", type=int, default=4095)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="small batches, to try this out")
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    small = {"batch": 4, "time": 64, "long_batch": 2, "long_time": 128, "n_anchor": 3}
    train(args, Recipe(**small) if args.dry else Recipe())


if __name__ == "__main__":
    main()
