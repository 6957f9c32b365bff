"""Head: output matrix, what the host wants of the logits, and a check for NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..ggml.choose import DRAW_WORDS
from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor, shape
from ..resident.weights import HeadWeights


class Results(Enum):
    """What the host gets of the logits of a pass: all, the argmax, or what samplers need."""

    LOGITS = "logits"
    ARGMAX = "argmax"
    CANDIDATES = "candidates"


@dataclass(frozen=True)
class HeadOutputs:
    """Tensors that the host may read after a pass.

    logits F32 [n_vocab, n_out]; main: the results, one row for each row of logits: the logits,
    their argmax I32 [n_out], or their candidates I32 [n, n_out]. check F32 [1, n_out]: the sum of
    each normalised row, plus that of its logits. It is finite only if all these numbers are. Of
    candidates it is the first sum, because they have a check of their own.
    """

    logits: Tensor
    main: Tensor
    check: Tensor


def build_head(
    b: Builder, weights: HeadWeights, cur: Tensor, out_ids: Tensor | None, draws: Tensor | None,
    results: Results,
) -> HeadOutputs:  # fmt: skip
    """Append the head for the rows out_ids I32 [n_out] of h_nextn F32 [n_embd, n_tokens].

    out_ids: None for all rows. draws: I32 [DRAW_WORDS, n_out], for candidates.

    Source: mirrors the end of llama.cpp's graphs, all after the last layer.
    """
    # a view keeps both names, and CUDA multiplies what the norm has quantized
    cur = b.reshape(cur, *shape(cur)[:2]) if out_ids is None else b.get_rows(cur, out_ids)
    b.name(cur, "result_norm")
    logits = b.mul_mat(weights.output, cur)
    if weights.softcap:
        # a division in F32, as upstream's
        logits = b.tanh(b.scale(logits, float(np.float32(1) / np.float32(weights.softcap))))
        logits = b.scale(logits, weights.softcap)
    logits = b.expand(b.name(logits, "result_output"))
    main, check = logits, b.sum_rows(cur)  # a product can hide NaN: NaN quantizes to zeros
    if results is not Results.CANDIDATES:
        check = b.add(check, _sum_of_logits(b, logits))
    if results is Results.ARGMAX:
        main = b.expand(b.name(b.argmax(logits), "result_argmax"))
    elif results is Results.CANDIDATES:
        if draws is None:
            raise InternalError("the head was built for candidates of too many rows")
        main = b.expand(b.name(b.candidates(logits, draws), "result_candidates"))
    check = b.expand(b.name(check, "result_check"))
    for tensor in (logits, main, check):
        C.ggml_set_output(tensor)
    return HeadOutputs(logits, main, check)


def _sum_of_logits(b: Builder, logits: Tensor) -> Tensor:
    """Append the sums of the rows of logits [n_vocab, n_out]: F32 [1, n_out].

    In two steps of about 500 numbers each: CUDA sums each row with one thread block, which would
    take 10 us for the logits of a whole vocabulary.
    """
    n_vocab, n_out = logits.ne[0], logits.ne[1]
    n_parts = max(n for n in range(1, math.isqrt(n_vocab) + 1) if n_vocab % n == 0)
    parts = b.sum_rows(b.reshape(logits, n_vocab // n_parts, n_parts, n_out))
    return b.sum_rows(b.reshape(parts, n_parts, n_out))


def no_races(n: int) -> npt.NDArray[np.int32]:
    """Return what n rows without a temperature depend on: I32 numpy [n, DRAW_WORDS]."""
    words = np.full((n, DRAW_WORDS), -1, dtype=np.int32)
    words[:, 0] = 0
    return words


def race_words(temperature: float, keys: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return what the races of rows depend on: I32 numpy [len(keys), DRAW_WORDS]."""
    words = no_races(len(keys))
    with np.errstate(over="ignore"):
        words[:, 0] = np.float32(1.0 / temperature).view(np.int32)
    words[:, 1:3] = np.array(keys, dtype=np.uint64).view(np.int32).reshape(-1, 2)
    return words
