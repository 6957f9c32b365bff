"""What both drafters are trained for: the target's own distributions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from drafters import Dflash, Mtp
from target import Features, Target
from torch import Tensor

# By step of the chain.
MTP_WEIGHTS = (1.0, 0.8, 0.6)


def depth_weights(size: int, device: str) -> Tensor:
    """Return the weight of each row of a block, [block]: earlier rows decide more; row 0 none."""
    depth = torch.arange(size, device=device).float()
    return torch.where(depth > 0, torch.exp(-(depth - 1) / (size / 2)), depth)


def soft_loss(logits: Tensor, target_logits: Tensor, weight: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, against the target's distribution."""
    wanted = target_logits.float().softmax(-1)
    loss = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    return (loss * weight).sum() / weight.sum()


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
