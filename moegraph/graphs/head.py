"""Head: output matrix, argmax if greedy, and a check value for NaN and infinity."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor
from ..resident.weights import HeadWeights


@dataclass(frozen=True)
class HeadOutputs:
    """Tensors that the host may read after a pass.

    logits F32 [n_vocab, n_out]; argmax I32 [n_out], or None if not greedy; check F32 [1, n_out]:
    the sum of each normalised row, plus the sum of its logits if greedy. It is finite only if all
    these numbers are.
    """

    logits: Tensor
    argmax: Tensor | None
    check: Tensor


def build_head(
    b: Builder, weights: HeadWeights, cur: Tensor, out_ids: Tensor | None, greedy: bool
) -> HeadOutputs:
    """Append the head for the rows out_ids I32 [n_out] of h_nextn F32 [n_embd, n_tokens].

    out_ids: None for all rows.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp graph (all after the last layer).
    """
    cur = cur if out_ids is None else b.get_rows(cur, out_ids)
    b.name(cur, "result_norm")
    logits = b.expand(b.name(b.mul_mat(weights.output, cur), "result_output"))
    outputs = [logits]
    argmax = None
    if greedy:
        argmax = b.expand(b.name(b.argmax(logits), "result_argmax"))
        outputs.append(argmax)
    # checks the input too: a product can hide NaN, because a row of NaN quantizes to zeros
    check = b.sum_rows(cur)
    if greedy:
        check = b.add(check, _sum_of_logits(b, logits))
    check = b.expand(b.name(check, "result_check"))
    outputs.append(check)
    for tensor in outputs:
        C.ggml_set_output(tensor)
    return HeadOutputs(logits, argmax, check)


def _sum_of_logits(b: Builder, logits: Tensor) -> Tensor:
    """Append the sums of the rows of logits [n_vocab, n_out]: F32 [1, n_out].

    In two steps of about 500 numbers each: CUDA sums each row with one thread block, which would
    take 10 us for the logits of a whole vocabulary.
    """
    n_vocab, n_out = logits.ne[0], logits.ne[1]
    n_parts = max(n for n in range(1, math.isqrt(n_vocab) + 1) if n_vocab % n == 0)
    parts = b.sum_rows(b.reshape(logits, n_vocab // n_parts, n_parts, n_out))
    return b.sum_rows(b.reshape(parts, n_parts, n_out))
