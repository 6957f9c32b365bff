"""Rows of several sequences in one chunk: one sequence after the other, without padding.

Products, norms and experts are per row, so they take the rows as they are. Convolution, delta rule
and attention are per sequence: for these the rows are *spread* over a rectangle of T places for
each of S sequences, of which a sequence uses the first ones, and *gathered* from it afterwards.

Each number of rows has graphs of its own. So that few graphs serve many prompts, there may be more
rows than the sequences have: the last ones are copies of the first row, and nobody reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ggml.ops import Builder, Tensor


@dataclass(frozen=True)
class JointRows:
    """Where the rows of a chunk are in the rectangle.

    places: I32 [T * S], the row of each place, and any row where a sequence has none. rows: I32
    [n_tokens], the place of each row. lengths: I32 [S], rows of each sequence. real: I32
    [n_tokens], the row that each row is a copy of. The rows of a single sequence are in their
    places already.
    """

    places: Tensor
    rows: Tensor
    lengths: Tensor
    real: Tensor


def fill(b: Builder, x: Tensor, joint: JointRows) -> Tensor:
    """Append a copy of rows x F32 [m, n_tokens] in which the last ones are copies of the first."""
    return b.get_rows(x, joint.real)


def spread(b: Builder, x: Tensor, joint: JointRows) -> Tensor:
    """Append a copy of rows x F32 [m, n_tokens] to their places: F32 [m, T * S]."""
    return x if joint.lengths.ne[0] == 1 else b.get_rows(x, joint.places)


def gather(b: Builder, x: Tensor, joint: JointRows) -> Tensor:
    """Append a copy of the rows from their places: F32 [m, T * S] to [m, n_tokens]."""
    return x if joint.lengths.ne[0] == 1 else b.get_rows(x, joint.rows)
