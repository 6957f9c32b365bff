"""Statistics of a routing trace: overlap, entropy, and the hit rates of a plain LRU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..units import format_share
from .trace import Trace

# Hit rates of similar models were published for this share of the experts.
LRU_SHARE = 0.269
LRU_TOKENS = 256


@dataclass(frozen=True)
class TraceStats:
    """Figures that describe a trace, to be reported with every speed that was measured with it.

    overlap: share of experts in common with the previous token. entropy: normalised entropy of a
    layer's choices, 1 if all experts are chosen equally often; both are means over layers. lru: hit
    rates, in the quarters of the first LRU_TOKENS tokens, of one LRU over all layers that holds
    LRU_SHARE of the experts and is empty at the start.
    """

    sha256: str
    n_tokens: int
    overlap: float
    entropy: float
    lru: tuple[float, ...]

    def line(self) -> str:
        """Return all figures as one line."""
        rates = " ".join(f"{rate:.3f}" for rate in self.lru)
        return (
            f"trace {self.sha256[:16]}: {self.n_tokens} tokens, lag-1 overlap {self.overlap:.3f}, "
            f"entropy {self.entropy:.3f}, LRU of {format_share(LRU_SHARE)} of the experts hits "
            f"{rates}"
        )


def trace_stats(trace: Trace) -> TraceStats:
    """Return the statistics of a trace.

    Overlap and entropy are of the first LRU_TOKENS tokens, because they depend on the length.
    """
    head = trace.part(0, LRU_TOKENS)
    return TraceStats(
        trace.sha256, trace.n_tokens, float(overlap(head).mean()), float(entropy(head).mean()),
        tuple(global_lru(head, LRU_SHARE)),
    )  # fmt: skip


def overlap(trace: Trace, lag: int = 1) -> npt.NDArray[np.float64]:
    """Return the mean share of experts in common with the token `lag` before, [n_layer]."""
    chosen = one_hot(trace)
    if len(chosen) <= lag:
        return np.zeros(trace.shape.n_layer)
    both = (chosen[lag:] & chosen[:-lag]).sum(axis=2)
    shares: npt.NDArray[np.float64] = both.mean(axis=0) / trace.shape.n_expert_used
    return shares


def entropy(trace: Trace) -> npt.NDArray[np.float64]:
    """Return the normalised entropy of the choices of each layer, [n_layer], 0 to 1."""
    counts = trace.counts()
    p = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    bits = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1)
    shares: npt.NDArray[np.float64] = bits / np.log(max(trace.shape.n_expert, 2))
    return shares


def one_hot(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return which experts each token chose, bool [n_tokens, n_layer, n_expert]."""
    chosen = np.zeros((trace.n_tokens, *trace.shape.sizes[:2]), dtype=np.bool_)
    np.put_along_axis(chosen, trace.ids.astype(np.intp), True, axis=2)
    return chosen


def global_lru(trace: Trace, share: float, parts: int = 4) -> list[float]:
    """Return the hit rates of one LRU over the experts of all layers, in each part of the trace.

    share: share of all experts that it holds, rounded down. It starts empty and does not protect
    the working set. With fewer than n_layer * n_expert_used experts it hits nothing.
    """
    n_layer, n_expert, k = trace.shape.sizes
    capacity = int(share * n_layer * n_expert)
    order: OrderedDict[int, None] = OrderedDict()
    rates = []
    keys = trace.ids.astype(np.int64) + n_expert * np.arange(n_layer)[:, None]
    for part in np.array_split(keys.reshape(trace.n_tokens, n_layer * k), parts):
        hits = 0
        for key in part.reshape(-1).tolist():
            if key in order:
                hits += 1
                order.move_to_end(key)
                continue
            order[key] = None
            if len(order) > capacity:
                order.popitem(last=False)
        rates.append(hits / part.size if part.size else 0.0)
    return rates
