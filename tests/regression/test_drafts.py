"""Drafts of the MTP block equal those of upstream's context for it, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.mtp import MtpModel
from regression.harness import KV_TYPES, Models, Upstream, random_ids

N_DRAFT = 8


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("name", ["mini35b", "float32"])
def test_logits_of_a_chain_equal_upstream(
    models: Models, upstream: Upstream, name: str, kv: str
) -> None:
    path = models.path(name)
    ids = random_ids(1000, 200)
    settings = {"type_k": kv, "type_v": kv}
    wanted, _ = upstream.oracle.draft(path, ids, N_DRAFT, threads=1, **settings)
    with MtpModel(path, 256, n_ubatch=256, **settings) as model:
        model.read(ids)
        draft = model.drafter.draft(0, int(wanted[0].argmax()), N_DRAFT, 1)
        np.testing.assert_array_equal(model.logits(N_DRAFT), wanted[1:])
    np.testing.assert_array_equal(draft.tokens[:, 0], wanted[1:].argmax(axis=1))
