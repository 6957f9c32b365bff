"""Train an MTP block and a DFlash drafter for a model, together, within a wall-clock budget.

    python train_drafters.py MODEL.gguf CORPUS_DIR OUT_DIR [--seconds 300] [--generate 0.15]

Reads train.u16 and heldout.u16 of tokenize_text.py. First the model itself continues text of
the corpus, because drafters meet its own text, not ours. Then every step runs the model over a
batch and trains both drafters on the same features, against the model's own distributions. Writes
OUT_DIR/mtp.safetensors, OUT_DIR/dflash.safetensors (float16) and OUT_DIR/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from draft_rates import evaluate
from drafters import BlockShape, Dflash, Mtp, Named, dflash_loss, mtp_loss, n_parameters, shape_name
from safetensors.torch import load_file, save_file
from target import Target
from torch import Tensor
from training_text import Recipe, Text, read_tokens


class Trainee:
    """A drafter with its optimizer."""

    def __init__(self, module: Named, rate: float, recipe: Recipe) -> None:
        self.module, self.rate, self.recipe = module, rate, recipe
        params = list(module.parameters())
        self.params = params
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=params[0].is_cuda
        )

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


class Run:
    """One training run; its clock starts when it is made."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.begin = time.time()
        self.args = args
        self.recipe = Recipe() if args.shrink == 1 else Recipe().shrunk(args.shrink)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.manual_seed(args.seed)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.target = Target(args.model, args.device, dtype)
        self.text = Text(read_tokens(args.corpus / "train.u16", args.device), self.recipe)
        self.held_out = read_tokens(args.corpus / "heldout.u16", args.device)
        self.mtp = Mtp(self.target).to(args.device)
        shape = BlockShape(tuple(args.taps), block_size=args.block)
        self.dflash = Dflash(self.target, shape, args.mask_id).to(args.device)
        self.trainees = {
            "mtp": Trainee(self.mtp, self.recipe.mtp_rate, self.recipe),
            "dflash": Trainee(self.dflash, self.recipe.dflash_rate, self.recipe),
        }
        if args.init:
            for name, trainee in self.trainees.items():
                trainee.load(args.init / f"{name}.safetensors")
        self.log: list[dict[str, float]] = []
        self.n_step = 0

    def elapsed(self) -> float:
        """Return the seconds since the run was made."""
        return time.time() - self.begin

    def say(self, **entry: float) -> None:
        """Print and keep one line of the log."""
        entry = {"seconds": round(self.elapsed(), 1), **entry}
        self.log.append(entry)
        print(json.dumps(entry), flush=True)

    def synchronize(self) -> None:
        """Wait for the device, so that clocks tell the truth."""
        if self.args.device == "cuda":
            torch.cuda.synchronize()

    def generate(self, until: float) -> None:
        """Let the model write until the given second."""
        while self.elapsed() < until:
            self.text.generate(self.target)
            self.synchronize()
            self.say(own_tokens=self.text.own.numel())

    def step(self, progress: float) -> tuple[Tensor, Tensor]:
        """Take one step with both drafters; return their losses."""
        ids = self.text.batch(self.n_step, self.recipe)
        with torch.no_grad():
            features = self.target.features(ids)
            logits = self.target.logits(features.hidden)
        first = mtp_loss(self.mtp, self.target, ids, features.hidden, logits)
        self.trainees["mtp"].step(first, self.n_step, progress)
        n_anchor = max(1, self.recipe.n_anchor * ids.shape[1] // self.recipe.time)
        second = dflash_loss(self.dflash, self.target, ids, features, logits, n_anchor)
        self.trainees["dflash"].step(second, self.n_step, progress)
        self.n_step += 1
        return first.detach(), second.detach()

    def train(self, until: float) -> None:
        """Train until the given second, with a checkpoint every minute."""
        start = self.elapsed()
        said = saved = start
        while (now := self.elapsed()) < until and self.n_step < self.args.max_steps:
            losses = self.step((now - start) / (until - start))
            if self.n_step % 4 == 0:
                self.synchronize()  # the schedule follows the clock, so wait for the device
            if now - said > self.args.log_seconds or self.n_step == 1:
                said = now
                self.say_losses(*losses)
            if now - saved > 60:
                saved = now
                self.save()

    def say_losses(self, mtp: Tensor, dflash: Tensor) -> None:
        """Log a step; stop if a loss is not finite."""
        losses = {"mtp": round(mtp.item(), 4), "dflash": round(dflash.item(), 4)}
        if not all(map(math.isfinite, losses.values())):
            raise SystemExit(f"loss is not finite at step {self.n_step}: {losses}")
        self.say(step=self.n_step, **losses)

    def save(self) -> None:
        """Write both drafters."""
        for name, trainee in self.trainees.items():
            trainee.save(self.args.out / f"{name}.safetensors")

    def report(self) -> None:
        """Evaluate on held-out text and write metrics.json."""
        found = evaluate(self.target, self.mtp, self.dflash, self.held_out, self.args.shrink)
        report = {
            "target": shape_name(self.target.hp),
            "parameters": {k: n_parameters(t.module) for k, t in self.trainees.items()},
            "dflash": asdict(self.dflash.shape) | {"mask_id": self.dflash.mask_id},
            "recipe": asdict(self.recipe),
            "steps": self.n_step,
            "own_tokens": self.text.own.numel(),
            "seconds": round(self.elapsed(), 1),
            "held_out": found,
            "log": self.log,
        }
        (self.args.out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
        for name, values in found.items():
            print(name, json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="all but the evaluation")
    parser.add_argument("--generate", type=float, default=0.15, help="share spent on its own text")
    parser.add_argument("--init", type=Path, help="continue from the drafters in this folder")
    parser.add_argument("--taps", type=int, nargs="+", default=[1, 3, 5, 6])
    parser.add_argument("--block", type=int, default=BlockShape.block_size)
    parser.add_argument("--mask-id", type=int, default=4095)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=1, help="divide batch and length (dry runs)")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--log-seconds", type=float, default=20.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    run.say(ready=1)
    run.generate(args.generate * args.seconds)
    run.train(args.seconds)
    run.save()
    run.report()


if __name__ == "__main__":
    main()
