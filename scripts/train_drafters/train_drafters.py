"""Train an MTP block and a DFlash drafter for a model, together, within a wall-clock budget.

    python train_drafters.py MODEL.gguf CORPUS_DIR OUT_DIR [--seconds 300] [--generate 0.15]

Reads train.u16.xz and heldout.u16.xz of encode_text.py. First the model itself continues text of
the corpus, because drafters meet its own text, not ours. Then every step runs the model over a
batch and trains both drafters on the same features, against the model's own distributions. Writes
OUT_DIR/mtp.safetensors, OUT_DIR/dflash.safetensors (float16) and OUT_DIR/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from draft_rates import evaluate
from drafters import (
    BlockShape,
    Dflash,
    Mtp,
    Named,
    depth_weights,
    n_parameters,
    shape_name,
    soft_loss,
)
from safetensors.torch import load_file, save_file
from target import Features, Target
from torch import Tensor

MTP_WEIGHTS = (1.0, 0.8, 0.6)
TIMED_STEPS = range(8, 16)


@dataclass(frozen=True)
class Recipe:
    """Sizes of batches and settings of the optimizer."""

    batch: int = 48
    time: int = 512
    long_batch: int = 12
    long_time: int = 2048
    long_every: int = 4
    n_anchor: int = 24
    generated_batch: int = 4096
    generated_time: int = 640
    own_share: float = 0.7
    greedy_share: float = 0.5
    mtp_rate: float = 1.2e-3
    dflash_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0

    def halved(self) -> Recipe:
        """Return a recipe with half the batch, for a device that is slow or short of memory."""
        return replace(self, batch=max(2, self.batch // 2), long_batch=max(1, self.long_batch // 2))

    def shrunk(self, by: int) -> Recipe:
        """Return a recipe for dry runs: smaller batches, shorter sequences."""
        return Recipe(
            batch=max(2, self.batch // by),
            time=max(64, self.time // by),
            long_batch=2,
            long_time=max(128, self.long_time // by),
            n_anchor=max(2, self.n_anchor // by),
            generated_batch=max(4, self.generated_batch // by**3),
            generated_time=max(96, self.generated_time // by),
        )


class Text:
    """Token ids to train on: the corpus, and what the model wrote to follow pieces of it."""

    def __init__(self, tokens: Tensor, recipe: Recipe) -> None:
        self.tokens, self.recipe = tokens, recipe
        self.own = torch.zeros(0, recipe.generated_time, dtype=torch.int16, device=tokens.device)

    def windows(self, batch: int, length: int) -> Tensor:
        """Return random windows [batch, length] of the corpus."""
        device = self.tokens.device
        starts = torch.randint(self.tokens.numel() - length, (batch, 1), device=device)
        return self.tokens[starts + torch.arange(length, device=device)].long()

    def extend(self, tokens: Tensor) -> None:
        """Add tokens to the corpus."""
        self.tokens = torch.cat([self.tokens, tokens])

    def generate(self, target: Target) -> None:
        """Add one batch of the model's own continuations, half of them greedy."""
        r = self.recipe
        ids = self.windows(r.generated_batch, r.generated_time)
        n = (r.generated_batch,)
        n_prompt = torch.randint(16, r.generated_time // 2, n, device=ids.device)
        greedy = torch.rand(n, device=ids.device) < r.greedy_share
        warm = 0.3 + 0.7 * torch.rand(n, device=ids.device)
        text = target.generate(ids, n_prompt, torch.where(greedy, 0.0, warm))
        self.own = torch.cat([self.own, text.to(torch.int16)])

    def batch(self, step: int, r: Recipe) -> Tensor:
        """Return the ids [batch, time] of a step: mixed, or long windows of the corpus."""
        if step % r.long_every == r.long_every - 1:
            return self.windows(r.long_batch, r.long_time)
        n_own = round(r.batch * r.own_share) if len(self.own) else 0
        real = self.windows(r.batch - n_own, r.time)
        if not n_own:
            return real
        rows = torch.randint(len(self.own), (n_own, 1), device=real.device)
        starts = torch.randint(r.generated_time - r.time + 1, (n_own, 1), device=real.device)
        columns = starts + torch.arange(r.time, device=real.device)
        return torch.cat([real, self.own[rows, columns].long()])


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


def mtp_loss(mtp: Mtp, target: Target, ids: Tensor, hidden: Tensor, logits: Tensor) -> Tensor:
    """Return the loss of the whole chain; logits: the target's [batch, time, n_vocab]."""
    time = ids.shape[1]
    with target.autocast():
        steps = mtp(target, ids, hidden, len(MTP_WEIGHTS))
    total = torch.zeros((), device=ids.device)
    for s, (row, weight) in enumerate(zip(steps, MTP_WEIGHTS)):
        drafted = target.logits(row[:, : time - s])
        ones = torch.ones(drafted.shape[:2], device=ids.device)
        total = total + weight * soft_loss(drafted, logits[:, s:], ones)
    return total / sum(MTP_WEIGHTS)


def draw_blocks(ids: Tensor, n_anchor: int, size: int) -> tuple[Tensor, Tensor]:
    """Return random anchors and lengths [batch, n_anchor]; half of the blocks have all rows."""
    shape = (ids.shape[0], n_anchor)
    anchors = torch.randint(1, ids.shape[1] - 2, shape, device=ids.device)
    short = torch.randint(3, size + 1, shape, device=ids.device)
    full = torch.rand(shape, device=ids.device) < 0.5
    return anchors, torch.where(full, size, short)


def dflash_loss(dflash: Dflash, target: Target, ids: Tensor, features: Features,
                logits: Tensor, n_anchor: int) -> Tensor:  # fmt: skip
    """Return the loss of random blocks: without and with the Markov head, and of confidence."""
    size, time = dflash.shape.block_size, ids.shape[1]
    anchors, lengths = draw_blocks(ids, n_anchor, size)
    with target.autocast():
        blocks = dflash(target, ids, features, anchors, lengths)
    at = anchors[..., None] + torch.arange(size, device=ids.device) - 1
    weight = depth_weights(size, ids.device) * blocks.visible * (at < time)
    at = at.clamp(max=time - 1)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    wanted, previous = logits[rows, at], ids[rows, at]
    plain = target.logits(blocks.hidden)
    with target.autocast():
        embedding, bias = dflash.markov(previous)
    drafted = plain + bias
    accepted = (drafted.argmax(-1) == wanted.argmax(-1)).float()
    sure = F.binary_cross_entropy_with_logits(
        dflash.confidence(blocks.hidden, embedding), accepted, reduction="none"
    )
    confidence = (sure * weight).sum() / weight.sum()
    both = soft_loss(plain, wanted, weight) + soft_loss(drafted, wanted, weight)
    return 0.5 * both + 0.1 * confidence


def read_tokens(path: Path, device: str) -> Tensor:
    """Return the ids of a file of encode_text.py, int32."""
    ids = np.frombuffer(lzma.decompress(path.read_bytes()), "<u2").astype("<i4")
    return torch.from_numpy(ids).to(device)


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
        self.text = Text(read_tokens(args.corpus / "train.u16.xz", args.device), self.recipe)
        self.held_out = read_tokens(args.corpus / "heldout.u16.xz", args.device)
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
        self.parts: dict[str, float] = {}

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

    def read_more(self) -> None:
        """Add the tokens of --more to the corpus once that file is there."""
        if self.args.more and self.args.more.exists():
            self.text.extend(read_tokens(self.args.more, self.args.device))
            self.args.more = None
            self.say(corpus_tokens=self.text.tokens.numel())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add up the time of a part of the steps TIMED_STEPS."""
        if self.n_step not in TIMED_STEPS:
            yield
            return
        self.synchronize()
        start = time.time()
        yield
        self.synchronize()
        self.parts[name] = self.parts.get(name, 0.0) + 1e3 * (time.time() - start)

    def step(self, progress: float) -> tuple[Tensor, Tensor]:
        """Take one step with both drafters; return their losses."""
        ids = self.text.batch(self.n_step, self.recipe)
        with self.timed("target_ms"), torch.no_grad():
            features = self.target.features(ids)
            logits = self.target.logits(features.hidden)
        with self.timed("mtp_ms"):
            first = mtp_loss(self.mtp, self.target, ids, features.hidden, logits)
            self.trainees["mtp"].step(first, self.n_step, progress)
        with self.timed("dflash_ms"):
            n_anchor = max(1, self.recipe.n_anchor * ids.shape[1] // self.recipe.time)
            second = dflash_loss(self.dflash, self.target, ids, features, logits, n_anchor)
            self.trainees["dflash"].step(second, self.n_step, progress)
        self.n_step += 1
        return first.detach(), second.detach()

    def adapt(self) -> None:
        """After the timed steps: say how long their parts took, halve a batch that is too slow."""
        if self.n_step != TIMED_STEPS[-1] + 1:
            return
        mean = {k: round(v / len(TIMED_STEPS), 1) for k, v in self.parts.items()}
        self.say(**mean)
        if sum(mean.values()) > self.args.slow_ms:
            self.recipe = self.recipe.halved()
            self.say(batch=self.recipe.batch)

    def train(self, until: float) -> None:
        """Train until the given second, with a checkpoint every minute."""
        start = self.elapsed()
        said = saved = start
        while (now := self.elapsed()) < until and self.n_step < self.args.max_steps:
            try:
                losses = self.step((now - start) / (until - start))
            except torch.OutOfMemoryError:
                self.recipe = self.recipe.halved()
                torch.cuda.empty_cache()
                self.say(out_of_memory=1, batch=self.recipe.batch)
                continue
            self.adapt()
            if self.n_step % 4 == 0:
                self.synchronize()  # the schedule follows the clock, so wait for the device
            if now - said > self.args.log_seconds or self.n_step == 1:
                said = now
                self.say_losses(*losses)
                self.read_more()
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
    parser.add_argument("--more", type=Path, help="tokens to add once this file is there")
    parser.add_argument("--slow-ms", type=float, default=160.0, help="step that halves the batch")
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
    run.read_more()
    run.train(args.seconds)
    run.save()
    run.report()


if __name__ == "__main__":
    main()
