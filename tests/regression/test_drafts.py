"""Drafts of the MTP block equal those of upstream's context for it, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.mtp import MtpModel
from regression.harness import KV_TYPES, Models, Upstream, random_ids

from moegraph.runner import Batch

N_DRAFT = 8
# Rows of the prompt, then of verify passes whose rows are all accepted.
PARTS = (200, 4, 1, 2, 8, 1, 1, 4)


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("name", ["mini35b", "float32", "glm47flash", "glm4moe", "qwen3next-fused"])
def test_logits_of_chains_equal_upstream(
    models: Models, upstream: Upstream, name: str, kv: str
) -> None:
    path, ids = models.path(name), random_ids(1000, sum(PARTS))
    settings = {"type_k": kv, "type_v": kv}
    parts = [part.tolist() for part in np.split(np.array(ids), np.cumsum(PARTS)[:-1])]
    wanted = upstream.oracle.draft(path, parts, N_DRAFT, threads=1, **settings)
    with MtpModel(path, 256, n_ubatch=256, **settings) as model:
        model.read(parts[0])
        for part, logits in zip(parts, wanted, strict=True):
            if part is not parts[0]:
                accept(model, part)
            draft = model.drafter.draft(0, int(logits[0].argmax()), N_DRAFT, 1)
            np.testing.assert_array_equal(model.logits(N_DRAFT), logits[1:])
            np.testing.assert_array_equal(draft.tokens[:, 0], logits[1:].argmax(axis=1))


def accept(model: MtpModel, tokens: list[int]) -> None:
    """Verify drafted tokens and take all of them."""
    rows = list(range(len(tokens)))
    model.runner.submit(Batch.verify(np.array([tokens], dtype=np.int32), (0,)))
    model.runner.collect()
    model.runner.commit({0: rows})
    model.drafter.committed([(0, model.state.n_past[0] - len(rows), tokens)])
