"""gpt-oss: what the contract of families does not say; texts longer than the window by far."""

from __future__ import annotations

import numpy as np
import pytest
from regression.compare import assert_logits_equal
from regression.harness import THREADS, Models, Upstream, open_engine, random_ids


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("q8_0", "q4_0")])
@pytest.mark.parametrize(("n_seq", "threads"), [(1, THREADS), (2, THREADS), (1, 5)])
def test_long_texts_have_upstreams_bits(
    n_seq: int, threads: int, type_k: str, type_v: str, models: Models, upstream: Upstream
) -> None:
    """Pages that no row sees any more, YaRN beyond the first context, and sums in parts."""
    path, cfg = models.path("gptoss"), {"type_k": type_k, "type_v": type_v, "n_ctx": 1024}
    sizes = (256, 256, 210, *[1] * 60)
    own = {"n_seq": n_seq, "n_threads": threads}
    with open_engine(path, n_ubatch=256, cache_slots=60, **own, **cfg) as engine:
        ids = random_ids(engine.hparams.n_vocab, sum(sizes))
        parts = [p.tolist() for p in np.split(np.array(ids), np.cumsum(sizes)[:-1])]
        theirs = upstream.parts(path, parts, n_ubatch=256, threads=threads, **cfg)
        last = engine.prefill(ids[:722], n_seq - 1).require_logits()
        assert_logits_equal(last, theirs[721:722], "the prompt")
        rows = [engine.forward(part, n_seq - 1).require_logits().copy() for part in parts[3:]]
        assert_logits_equal(np.concatenate(rows), theirs[722:], "rows after it")
