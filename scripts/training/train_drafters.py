"""Train an MTP block and a DFlash drafter for a model, together, within a wall-clock budget.

    python train_drafters.py MODEL.gguf CORPUS_DIR OUT_DIR [--seconds 300]

Reads train.u16 of tokenize_text.py and own.u16 of own_text.py. Every step runs the model over a
batch and trains both drafters on the same features, against the model's own distributions. Writes
OUT_DIR/mtp.safetensors, OUT_DIR/dflash.safetensors (float16) and OUT_DIR/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from drafters import Dflash, Mtp, Named, dflash_loss, mtp_loss
from safetensors.torch import save_file
from target import Target
from torch import Tensor
from train_tiny import Optimizer, read_tokens, windows

Sizes = tuple[tuple[int, int], tuple[int, int], int]
# (rows, length) of a batch, of each fourth batch, and anchors of a row. OWN: share of rows that
# the model wrote.
SIZES = ((48, 512), (12, 2048), 24)
DRY = ((4, 64), (2, 128), 3)
OWN, LONG_EVERY = 0.7, 4


def next_batch(corpus: Tensor, own: Tensor, step: int, sizes: Sizes) -> Tensor:
    """Return the ids [batch, time] of a step: mixed, or long windows of the corpus."""
    (batch, time), long, _ = sizes
    if step % LONG_EVERY == LONG_EVERY - 1:
        return windows(corpus, *long)
    n_own = round(batch * OWN)
    return torch.cat([windows(own, n_own, time), windows(corpus, batch - n_own, time)])


def save(module: Named, path: Path) -> None:
    """Write the parameters in float16 by GGUF name."""
    state = {n: module.weight(n).detach().half().cpu() for n in module.names()}
    save_file({k: v.contiguous() for k, v in state.items()}, path)


def train(args: argparse.Namespace, sizes: Sizes) -> None:
    """Train both drafters and write all files."""
    torch.manual_seed(1)
    is_cuda = args.device == "cuda"
    target = Target(args.model, args.device, torch.bfloat16 if is_cuda else torch.float32)
    corpus, own = (
        read_tokens(args.corpus / f"{name}.u16", args.device) for name in ("train", "own")
    )
    mtp, dflash = Mtp(target).to(args.device), Dflash(target).to(args.device)
    optimizers = Optimizer(mtp, 1.2e-3, 100, 0.05), Optimizer(dflash, 2e-3, 100, 0.05)
    log: list[dict[str, float]] = []
    start, step = time.time(), 0
    while (progress := (time.time() - start) / args.seconds) < 1:
        ids = next_batch(corpus, own, step, sizes)
        features = target.features(ids)
        with torch.no_grad():
            logits = target.logits(features.hidden)
        first = mtp_loss(mtp, target, ids, features.hidden, logits)
        optimizers[0].step(first, step, progress)
        n_anchor = max(1, sizes[2] * ids.shape[1] // sizes[0][1])
        second = dflash_loss(dflash, target, ids, features, logits, n_anchor)
        optimizers[1].step(second, step, progress)
        if step % 50 == 0:
            losses = {"mtp": round(first.item(), 4), "dflash": round(second.item(), 4)}
            log.append({"step": step, "seconds": round(time.time() - start, 1), **losses})
            print(json.dumps(log[-1]), flush=True)
        step += 1
    save(mtp, args.out / "mtp.safetensors")
    save(dflash, args.out / "dflash.safetensors")
    seconds = round(time.time() - start, 1)
    report = {"steps": step, "own_tokens": len(own), "seconds": seconds, "log": log}
    (args.out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="wall-clock budget")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry", action="store_true", help="small batches, to try this out")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args, DRY if args.dry else SIZES)


if __name__ == "__main__":
    main()
