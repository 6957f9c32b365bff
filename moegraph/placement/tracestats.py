"""Statistics of a routing trace: overlap, entropy, and the hit rates of a plain LRU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

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
    head = trace.routers().part(0, LRU_TOKENS)
    return TraceStats(
        trace.sha256, trace.n_tokens, _overlap(head), _entropy(head), tuple(_global_lru(head))
    )


def _overlap(trace: Trace) -> float:
    """Return the mean share of experts in common with the token before."""
    if trace.n_tokens < 2:
        return 0.0
    chosen = np.zeros((trace.n_tokens, *trace.shape.sizes[:2]), dtype=np.bool_)
    np.put_along_axis(chosen, trace.ids.astype(np.intp), True, axis=2)
    return float((chosen[1:] & chosen[:-1]).sum(axis=2).mean() / trace.shape.n_expert_used)


def _entropy(trace: Trace) -> float:
    """Return the normalised entropy of a layer's choices, 0 to 1, the mean of all."""
    counts = trace.counts()
    p = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    bits = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1)
    return float((bits / np.log(max(trace.shape.n_expert, 2))).mean())


def _global_lru(trace: Trace) -> list[float]:
    """Return the hit rates of one LRU over the experts of all layers, in quarters of the trace.

    It does not protect the working set. With fewer than n_layer * n_expert_used experts it hits
    nothing.
    """
    n_layer, n_expert, k = trace.shape.sizes
    capacity = int(LRU_SHARE * n_layer * n_expert)
    order: OrderedDict[int, None] = OrderedDict()
    rates = []
    keys = trace.ids.astype(np.int64) + n_expert * np.arange(n_layer)[:, None]
    for part in np.array_split(keys.reshape(trace.n_tokens, n_layer * k), 4):
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
