"""Head: output matrix, and for greedy decoding the argmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import InternalError
from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor
from ..weights import Weights


@dataclass(frozen=True)
class HeadOutputs:
    """What the host may read after a pass.

    logits F32 [n_vocab, n_out]; argmax I32 [n_out] or None; check F32 [1, n_out]: the sum of each
    normalised row, and of its logits too if the host reads only their argmax. It is finite only if
    all of them are.
    """

    logits: Tensor
    argmax: Tensor | None
    check: Tensor


def build_head(
    b: Builder, weights: Weights, cur: Tensor, out_ids: Tensor | None, greedy: bool
) -> HeadOutputs:
    """Append the head for the rows out_ids I32 [n_out] of h_nextn F32 [n_embd, n_tokens].

    Source: mirrors llama.cpp src/models/qwen35moe.cpp graph (everything behind the last layer).
    """
    if out_ids is None:
        raise InternalError("the head of a pass without results")
    cur = b.name(b.get_rows(cur, out_ids), "result_norm")
    logits = b.expand(b.name(b.mul_mat(weights.output, cur), "result_output"))
    outputs = [logits]
    argmax = None
    if greedy:
        argmax = b.expand(b.name(b.argmax(logits), "result_argmax"))
        outputs.append(argmax)
    # a product may lose what is not finite in its input: quantizing a row of NaN gives zeros
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

    In two steps of some 500 numbers each: CUDA gives one block of threads to every row, and a
    single block would read the logits of a whole vocabulary for 10 us.
    """
    n_vocab, n_out = logits.ne[0], logits.ne[1]
    n_parts = max(n for n in range(1, math.isqrt(n_vocab) + 1) if n_vocab % n == 0)
    parts = b.sum_rows(b.reshape(logits, n_vocab // n_parts, n_parts, n_out))
    return b.sum_rows(b.reshape(parts, n_parts, n_out))
