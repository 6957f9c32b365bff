"""Token ids to train on: random windows of the corpus, and of what the model wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def read_tokens(path: Path, device: str) -> Tensor:
    """Return the ids of a file of tokenize_text.py or own_text.py, int32."""
    return torch.from_numpy(np.fromfile(path, "<u2").astype("<i4")).to(device)


def windows(tokens: Tensor, batch: int, length: int) -> Tensor:
    """Return random windows [batch, length] of tokens [n], int64."""
    starts = torch.randint(len(tokens) - length + 1, (batch, 1), device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()
