"""Other settings: ours differs from upstream exactly as much as upstream differs from itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from regression.compare import Difference, assert_logits_equal, nmse
from regression.harness import (
    THREADS,
    Models,
    Upstream,
    held_out_text,
    open_engine,
    our_logits,
    random_ids,
)

# Long enough for the split of flash attention over threads (from 512 positions on).
N_TEXT, N_RANDOM = 400, 240

BASE = {"n_ctx": 1024, "n_ubatch": 512, "threads": THREADS}
# Settings that we have, too.
SHARED = {
    "ubatch 7": {"n_ubatch": 7},
    "ubatch 64": {"n_ubatch": 64},
    "one thread": {"threads": 1},
    "one thread, ubatch 1": {"threads": 1, "n_ubatch": 1},
}
# Takes four times the CPU time of one thread: only the trained model has it.
SLOW = {"ubatch 1": {"n_ubatch": 1}}
OTHERS = {
    **SHARED,
    "no flash attention": {"flash_attn": False},
    "repacked weights": {"extra_bufts": True},
}
# One model for each family of kernels.
NAMES = ("tiny", "legacy32", "kquant40", "iq64", "float32")


def prompt(upstream: Upstream, path: Path, n_vocab: int) -> list[int]:
    """Return text followed by random ids."""
    return upstream.oracle.tokenize(path, held_out_text())[:N_TEXT] + random_ids(n_vocab, N_RANDOM)


@pytest.mark.parametrize("name", NAMES)
def test_every_shared_setting_gives_upstreams_bits_at_that_setting(
    name: str, models: Models, upstream: Upstream
) -> None:
    """So ours at one and upstream at another differ as upstream's two do, no more and no less."""
    path = models.path(name)
    found = []
    for label, change in {**SHARED, **(SLOW if name == "tiny" else {})}.items():
        cfg = {**BASE, **change}
        with open_engine(path, n_threads=cfg["threads"]) as engine:
            ids = prompt(upstream, path, engine.hparams.n_vocab)
            ours = our_logits(engine, ids, cfg["n_ubatch"])
        theirs = upstream.logits(path, ids, **cfg)
        assert_logits_equal(ours, theirs, f"{name} {label}")
        found.append(nmse(theirs, upstream.logits(path, ids, **BASE)))
    assert any(found), "the settings made no difference at all: they were not applied"


@pytest.mark.parametrize("name", NAMES)
def test_reference_mode_is_no_farther_from_upstream_than_upstream_from_itself(
    name: str, models: Models, upstream: Upstream
) -> None:
    """Upstream has no such setting: the yardstick is its largest difference between settings."""
    path = models.path(name)
    with open_engine(path, cpu_reference=True) as engine:
        ids = prompt(upstream, path, engine.hparams.n_vocab)
        ours = our_logits(engine, ids, 512)
    theirs = upstream.logits(path, ids, **BASE)
    own = max(nmse(theirs, upstream.logits(path, ids, **{**BASE, **c})) for c in OTHERS.values())
    diff = Difference(nmse(ours, theirs), own)
    assert own > 0 and diff.within, f"{name}: {diff}"
