"""Train an MTP block and a DFlash drafter for a model, together, within a wall-clock budget.

    python train_drafters.py MODEL.gguf CORPUS_DIR OUT_DIR [--seconds 300]

Reads train.u16 of tokenize_text.py. First moegraph continues pieces of it with the model, because
drafters meet its own text: own.u16, 4,096 rows of 640 ids, half of them greedy, the others sampled
at temperatures of 0.3 to 1. Every step runs the model over a batch and trains both drafters on the
same features, against the model's own distributions. Writes
OUT_DIR/mtp.safetensors, OUT_DIR/dflash.safetensors (float16) and OUT_DIR/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from drafters import Dflash, Mtp, dflash_loss, mtp_loss
from safetensors.torch import save_file
from target import Target
from torch import Tensor
from train_tiny import Optimizer, read_tokens, windows

from moegraph import Engine, EngineConfig, SamplingParams
from moegraph.engine.service import Service
from moegraph.loop.requests import Request, Step

# (rows, length) of a batch, of each fourth batch, and anchors of a row. OWN: share of rows that
# the model wrote.
SHORT, LONG, N_ANCHOR = (48, 512), (12, 2048), 24
OWN, LONG_EVERY = 0.7, 4
N_SEQ, ROWS, TIME = 32, 4096, 640


def continued(service: Service, row: np.ndarray, seed: int) -> list[int]:
    """Return a row whose end the model has written; waits until it is there."""
    rng = np.random.default_rng(seed)
    n_prompt = int(rng.integers(16, len(row) // 2))
    params = SamplingParams(
        temperature=0.0 if rng.random() < 0.5 else float(rng.uniform(0.3, 1.0)), top_k=0, top_p=1.0
    )
    tokens: list[int] = row[:n_prompt].tolist()
    done = threading.Event()

    def take(step: Step) -> None:
        tokens.extend(step.tokens)
        if step.finish_reason:
            done.set()

    request = Request(tokens[:], params, len(row) - n_prompt, ignore_eos=True, reuse=False)
    service.submit(request, take)
    done.wait()
    return tokens


def write_own(model: Path, corpus: Path) -> None:
    """Let the model continue pieces of the corpus."""
    ids, rng = np.fromfile(corpus / "train.u16", "<u2"), np.random.default_rng(3)
    starts = rng.integers(0, len(ids) - TIME, ROWS)
    rows = ids[starts[:, None] + np.arange(TIME)].astype("<u2")
    config = EngineConfig(n_ctx=TIME + 8, n_seq=N_SEQ, spec="off", profile="none")
    with Engine.load(model, config) as engine, ThreadPoolExecutor(N_SEQ) as pool:
        service = Service(engine)
        service.start()
        rows[:] = [*pool.map(lambda at: continued(service, rows[at], at), range(ROWS))]
        service.close()
    rows.tofile(corpus / "own.u16")


def next_batch(corpus: Tensor, own: Tensor, step: int) -> Tensor:
    """Return the ids [batch, time] of a step: mixed, or long windows of the corpus."""
    if step % LONG_EVERY == LONG_EVERY - 1:
        return windows(corpus, *LONG)
    batch, time = SHORT
    n_own = round(batch * OWN)
    return torch.cat([windows(own, n_own, time), windows(corpus, batch - n_own, time)])


def train(args: argparse.Namespace) -> None:
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
        ids = next_batch(corpus, own, step)
        features = target.features(ids)
        with torch.no_grad():
            logits = target.logits(features.hidden)
        first = mtp_loss(mtp, target, ids, features.hidden, logits)
        optimizers[0].step(first, step, progress)
        n_anchor = max(1, N_ANCHOR * ids.shape[1] // SHORT[1])
        second = dflash_loss(dflash, target, ids, features, logits, n_anchor)
        optimizers[1].step(second, step, progress)
        if step % 50 == 0:
            losses = {"mtp": round(first.item(), 4), "dflash": round(second.item(), 4)}
            log.append({"step": step, "seconds": round(time.time() - start, 1), **losses})
            print(json.dumps(log[-1]), flush=True)
        step += 1
    for name, module in (("mtp", mtp), ("dflash", dflash)):
        state = {n: module.weight(n).detach().half().cpu().contiguous() for n in module.names()}
        save_file(state, args.out / f"{name}.safetensors")
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
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.corpus / "own.u16").is_file():
        write_own(args.model, args.corpus)
    train(args)


if __name__ == "__main__":
    main()
