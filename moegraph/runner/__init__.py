"""Forward passes: rows of tokens in, logits or argmax out; KV cache and states advance.

`whole` runs a pass as one graph. `layered` runs several and reads the choice of each router.
`staged` runs it over several devices.
"""

from __future__ import annotations

from .base import Runner, reserve_graphs
from .batch import Batch
from .layered import LayeredRunner
from .results import NotFinite, Output
from .staged import AnyRunner, StagedRunner, build_ahead
from .whole import WholeRunner

__all__ = [
    "AnyRunner", "Batch", "LayeredRunner", "NotFinite", "Output", "Runner", "StagedRunner",
    "WholeRunner", "build_ahead", "reserve_graphs",
]  # fmt: skip
