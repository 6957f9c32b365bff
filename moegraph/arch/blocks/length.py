"""KV lengths: a graph whose attention has a mask can be launched for any length up to its own.

Only a few tensors of such a graph depend on the length: the mask, the views of the KV caches, and
the rows that are gathered from them. They can be shortened between two launches, if nothing has
recorded the graph. So a device that captures nothing needs no new graph when a context grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...ggml.ops import Builder, Tensor


@dataclass(frozen=True)
class Span:
    """A tensor whose extent along an axis, and some strides, are multiples of the KV length.

    n: the extent for one position. strides: (i, bytes): stride i for one position. most: the
    largest length, in layers with a window; 0: any.
    """

    tensor: Tensor
    axis: int
    n: int
    strides: tuple[tuple[int, int], ...]
    most: int = 0


def spans(b: Builder, n_kv: int, tensor: Tensor, axis: int, *strides: int) -> Tensor:
    """Note that ne[axis] and nb[i] for each of `strides` are multiples of n_kv; return the tensor.

    n_kv: the KV length of the graph.
    """
    parts = tuple((i, tensor.nb[i] // n_kv) for i in strides)
    b.spans.append(Span(tensor, axis, tensor.ne[axis] // n_kv, parts))
    return tensor


def bound(b: Builder, start: int, most: int) -> None:
    """Note that the length of the spans from `start` on is at most `most`."""
    b.spans[start:] = [replace(span, most=most) for span in b.spans[start:]]


def set_length(found: Sequence[Span], n_kv: int) -> None:
    """Change the KV length of a graph; n_kv: at most the one that it was built for."""
    for span in found:
        n_here = min(n_kv, span.most or n_kv)
        span.tensor.ne[span.axis] = span.n * n_here
        for i, n_bytes in span.strides:
            span.tensor.nb[i] = n_bytes * n_here
