"""The text that drafters are trained on: of the corpus, and of the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from target import Target
from torch import Tensor


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
        self.own = torch.zeros(0, recipe.generated_time, dtype=torch.int32, device=tokens.device)

    def windows(self, batch: int, length: int) -> Tensor:
        """Return random windows [batch, length] of the corpus."""
        device = self.tokens.device
        starts = torch.randint(self.tokens.numel() - length, (batch, 1), device=device)
        return self.tokens[starts + torch.arange(length, device=device)].long()

    def generate(self, target: Target) -> None:
        """Add one batch of the model's own continuations, half of them greedy."""
        r = self.recipe
        ids = self.windows(r.generated_batch, r.generated_time)
        n = (r.generated_batch,)
        n_prompt = torch.randint(16, r.generated_time // 2, n, device=ids.device)
        greedy = torch.rand(n, device=ids.device) < r.greedy_share
        warm = 0.3 + 0.7 * torch.rand(n, device=ids.device)
        text = target.generate(ids, n_prompt, torch.where(greedy, 0.0, warm))
        self.own = torch.cat([self.own, text.to(torch.int32)])

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


def read_tokens(path: Path, device: str) -> Tensor:
    """Return the ids of a file of tokenize_text.py, int32."""
    return torch.from_numpy(np.fromfile(path, "<u2").astype("<i4")).to(device)
