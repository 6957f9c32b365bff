"""Several projections of one input."""

from __future__ import annotations

from collections.abc import Sequence

from ..ggml.ops import Builder, Tensor
from ..weights import LayerWeights


def project(b: Builder, w: LayerWeights, names: Sequence[str], cur: Tensor) -> list[Tensor]:
    """Multiply rows F32 [n_embd, n_tokens] by each named matrix; F32 [rows of the matrix,
    n_tokens].

    For a single row, matrices that lie behind one another in memory are one product and its results
    are views of it; each element is the same dot product either way. For more rows such views would
    not be contiguous, so each matrix has its own product; they follow one another in the graph,
    where CUDA runs them as one kernel.
    """
    parts: dict[str, Tensor] = {}
    if cur.ne[1] == 1:
        for group, matrix in w.joined.items():
            if all(name in names for name in group):
                product, offset = b.mul_mat(matrix, cur), 0
                for name in group:
                    m = w[name].ne[1]
                    parts[name] = b.view(product, (m, 1), (4 * m,), offset)
                    offset += 4 * m
    return [parts[name] if name in parts else b.expand(b.mul_mat(w[name], cur)) for name in names]
