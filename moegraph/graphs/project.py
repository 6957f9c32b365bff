"""Several projections of the same input."""

from __future__ import annotations

from collections.abc import Sequence

from ..ggml.ops import Builder, Tensor
from ..resident.weights import LayerWeights


def project(b: Builder, w: LayerWeights, names: Sequence[str], cur: Tensor) -> list[Tensor]:
    """Append the product of cur F32 [n_embd, n_tokens] with each named matrix.

    Each result is F32 [rows of the matrix, n_tokens]. For one row, matrices that are adjacent in
    memory become one product, and the results are views of it; every element is the same dot
    product. For several rows such views would not be contiguous, so each matrix has its own
    product. CUDA runs these as one kernel if they follow one another.
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
