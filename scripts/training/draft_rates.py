"""How many tokens drafters get right on held-out text: as written, and as the model continues it.

A drafted token counts as right if it is the target's likeliest one there; given the text, a chain
or a block is accepted up to its first wrong token, as in greedy decoding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from drafters import Dflash, Mtp
from target import Features, Target
from torch import Tensor

MTP_STEPS = 6


def rates(right: Tensor) -> dict[str, Any]:
    """Return acceptance by position, given that all before were accepted, and the mean length.

    right: [n, depth], whether the drafted token is right.
    """
    kept = right.float().cumprod(-1)
    total = kept.sum(0)
    before = torch.cat([total.new_full((1,), float(len(right))), total[:-1]])
    return {
        "by_position": [round(x, 3) for x in (total / before.clamp(min=1)).tolist()],
        "mean_accepted": round(kept.sum(-1).mean().item(), 3),
    }


def mtp_right(target: Target, mtp: Mtp, ids: Tensor, f: Features, first: int) -> Tensor:
    """Return [n, MTP_STEPS] for every position from first on whose chain ends inside the text."""
    with target.autocast():
        steps = mtp(target, ids, f.hidden, MTP_STEPS)
    wanted = target.logits(f.hidden).argmax(-1)
    time = ids.shape[1] - MTP_STEPS
    right = [
        target.logits(row).argmax(-1)[:, first:time] == wanted[:, first + s : time + s]
        for s, row in enumerate(steps)
    ]
    return torch.stack(right, -1).flatten(0, 1)


def dflash_right(
    target: Target, dflash: Dflash, ids: Tensor, f: Features, first: int
) -> dict[str, Tensor]:
    """Return [n, block - 1] for blocks at many anchors: the plain logits, and the Markov chain."""
    size = dflash.shape.block_size
    at = torch.arange(max(first, 1), ids.shape[1] - size, 8, device=ids.device)
    anchors = at.expand(ids.shape[0], -1)
    with target.autocast():
        blocks = dflash(target, ids, f, anchors, torch.full_like(anchors, size))
    plain = target.logits(blocks.hidden)
    likeliest = target.logits(f.hidden).argmax(-1)
    wanted = torch.stack([likeliest[:, at + j - 1] for j in range(1, size)], -1).flatten(0, 1)
    previous, chain = ids[:, at], []
    for j in range(1, size):
        with target.autocast():
            _, bias = dflash.markov(previous)
        previous = (plain[:, :, j] + bias).argmax(-1)
        chain.append(previous)
    return {
        "dflash": plain[:, :, 1:].argmax(-1).flatten(0, 1) == wanted,
        "dspark": torch.stack(chain, -1).flatten(0, 1) == wanted,
    }


@torch.no_grad()
def evaluate(
    target: Target, mtp: Mtp, dflash: Dflash, tokens: Tensor, shrink: int = 1
) -> dict[str, Any]:
    """Return the rates of both drafters on held-out tokens [n], by kind of text."""
    time, n = (512, 192) if shrink == 1 else (128, 4)
    starts = torch.linspace(0, tokens.numel() - time - 1, n, device=tokens.device).long()
    real = tokens[starts[:, None] + torch.arange(time, device=tokens.device)].long()
    first = time // 3
    half = torch.full((n,), first, device=tokens.device)
    texts = {"text": real}
    for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
        texts[name] = target.generate(real, half, torch.full((n,), temperature).to(tokens.device))
    found: dict[str, Any] = {}
    for name, ids in texts.items():
        # The target runs over all of it in one pass, as a verification does.
        padded = F.pad(ids, (0, -time % 64))
        right: dict[str, list[Tensor]] = {"mtp": [], "dflash": [], "dspark": []}
        for part in padded.split(48):
            f = target.features(part)
            right["mtp"].append(mtp_right(target, mtp, part, f, first))
            for kind, rows in dflash_right(target, dflash, part, f, first).items():
                right[kind].append(rows)
        for kind, parts in right.items():
            found[f"{kind} {name}"] = rates(torch.cat(parts))
    return found
