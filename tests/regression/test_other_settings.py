"""Other settings: ours differs from upstream at most twice as much as upstream from itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from regression.compare import Difference, nmse
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
OTHERS = {
    "ubatch 1": {"n_ubatch": 1},
    "ubatch 7": {"n_ubatch": 7},
    "ubatch 64": {"n_ubatch": 64},
    "no flash attention": {"flash_attn": False},
    "repacked weights": {"extra_bufts": True},
    "one thread": {"threads": 1},
    "one thread, ubatch 1": {"threads": 1, "n_ubatch": 1},
}
# One model for each family of kernels.
NAMES = ("tiny", "legacy32", "kquant40", "iq64", "float32")


def prompt(upstream: Upstream, path: Path, n_vocab: int) -> list[int]:
    """Return text followed by random ids."""
    return upstream.oracle.tokenize(path, held_out_text())[:N_TEXT] + random_ids(n_vocab, N_RANDOM)


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_stays_within_twice_upstreams_own_difference(
    name: str, models: Models, upstream: Upstream
) -> None:
    """Ours at the base settings against upstream at others, and, where we have it, the reverse."""
    path = models.path(name)
    with open_engine(path) as engine:
        ids = prompt(upstream, path, engine.hparams.n_vocab)
        ours = our_logits(engine, ids, 512)
    theirs = upstream.logits(path, ids, **BASE)
    found = {}
    for label, change in OTHERS.items():
        other = upstream.logits(path, ids, **{**BASE, **change})
        own = nmse(theirs, other)
        found[f"ours against upstream, {label}"] = Difference(nmse(ours, other), own)
        if set(change) <= {"n_ubatch", "threads"}:
            settings = {**BASE, **change}
            with open_engine(path, n_threads=settings["threads"]) as engine:
                changed = our_logits(engine, ids, settings["n_ubatch"])
            found[f"ours, {label}, against upstream"] = Difference(nmse(changed, theirs), own)
    wrong = [f"{label}: {diff}" for label, diff in found.items() if not diff.within]
    assert not wrong, f"{name}: " + "; ".join(wrong)
    assert any(d.upstream > 0 for d in found.values()), "the settings made no difference at all"


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
    assert diff.within, f"{name}: {diff}"
