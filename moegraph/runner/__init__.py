"""Forward passes: token rows in, logits or an argmax out, KV and states advanced.

`whole` runs one graph a pass; `layered` runs several and lets Python see the choice of each router.
"""

from __future__ import annotations

from .base import Batch, Output, Runner
from .layered import LayeredRunner
from .whole import WholeRunner

__all__ = ["Batch", "LayeredRunner", "Output", "Runner", "WholeRunner"]
