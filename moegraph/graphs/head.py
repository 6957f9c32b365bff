"""Head: output matrix, and for greedy decoding the argmax."""

from __future__ import annotations

from dataclasses import dataclass

from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor
from ..weights import Weights


@dataclass(frozen=True)
class HeadOutputs:
    """What the host may read after a pass.

    logits F32 [n_vocab, n_out]; argmax I32 [n_out] or None; check F32 [1, n_out]: the sum of each
    normalised row, finite only if the whole row is.
    """

    logits: Tensor
    argmax: Tensor | None
    check: Tensor


def build_head(
    b: Builder, weights: Weights, cur: Tensor, out_ids: Tensor, greedy: bool
) -> HeadOutputs:
    """Append the head for the rows out_ids I32 [n_out] of h_nextn F32 [n_embd, n_tokens].

    Source: mirrors llama.cpp src/models/qwen35moe.cpp graph (everything behind the last layer).
    """
    cur = b.name(b.get_rows(cur, out_ids), "result_norm")
    logits = b.expand(b.name(b.mul_mat(weights.output, cur), "result_output"))
    outputs = [logits]
    argmax = None
    if greedy:
        argmax = b.expand(b.name(b.argmax(logits), "result_argmax"))
        outputs.append(argmax)
    check = b.expand(b.name(b.sum_rows(cur), "result_check"))
    outputs.append(check)
    for tensor in outputs:
        C.ggml_set_output(tensor)
    return HeadOutputs(logits, argmax, check)
