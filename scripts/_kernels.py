"""What the GPU does during some work, as PyTorch's profiler sees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Span = tuple[float, float]
_NAME = re.compile(r"(?:void )?(?:[\w:]*::)?(\w+)")


def profiled(work: Callable[[], object], n_kernels: int = 12) -> dict[str, Any]:
    """Do the work and return milliseconds by what ran on the GPU.

    busy: at least one kernel ran. copying: at least one copy ran. either: one of both. span: from
    the first to the last of them. kernels: [ms, launches] of the kernels that took most time, and
    of copies by kind. PyTorch must be installed.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.init()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    kernels: list[Span] = []
    copies: list[Span] = []
    by_name: dict[str, list[float]] = {}
    for event in found.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CPU:
            continue
        name, start = event.name(), event.start_ns() / 1e6
        span = start, start + event.duration_ns() / 1e6
        is_copy = name.startswith(("Memcpy", "Memset"))
        (copies if is_copy else kernels).append(span)
        match = _NAME.match(name)
        short = name if is_copy or match is None else match[1]
        row = by_name.setdefault(short, [0.0, 0])
        row[0] += span[1] - span[0]
        row[1] += 1
    every = kernels + copies
    most = sorted(by_name.items(), key=lambda item: -item[1][0])[:n_kernels]
    return {
        "busy": _covered(kernels),
        "copying": _covered(copies),
        "either": _covered(every),
        "span": max((e for _, e in every), default=0) - min((s for s, _ in every), default=0),
        "kernels": {name: [round(ms, 2), n] for name, (ms, n) in most},
    }


def _covered(spans: Sequence[Span]) -> float:
    """Return how much time lies in at least one span."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return round(total, 2)
