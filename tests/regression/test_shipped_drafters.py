"""The shipped model runs with its MTP block as without, and its drafters draft what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.mtp import MtpModel
from helpers.shipped import PROMPTS, TINY, merged_tiny
from oracle.client import Step
from regression.harness import Upstream, held_out_text, open_engine, our_logits

N_PROMPT, N_TEXT, N_DRAFT = 64, 96, 3


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merged_tiny(tmp_path_factory.mktemp("merged"))


def held_out_ids(path: Path, n: int) -> list[int]:
    """Return the first n ids of text that no model was trained on."""
    with open_engine(path, n_ctx=64) as engine:
        return [int(i) for i in engine.tokenizer.encode(held_out_text())[:n]]


def test_plain_results_are_those_without_the_block(merged: Path, upstream: Upstream) -> None:
    ids = held_out_ids(TINY, 200)
    with open_engine(TINY) as engine:
        wanted = our_logits(engine, ids)
    with open_engine(merged) as engine:
        np.testing.assert_array_equal(our_logits(engine, ids), wanted)
    runs = [upstream.oracle.run(path, [Step(ids)])[0].logits for path in (TINY, merged)]
    assert runs[0] is not None
    assert runs[1] is not None
    np.testing.assert_array_equal(runs[1], runs[0])


def test_drafts_of_the_block_are_accepted(merged: Path) -> None:
    """Greedy text after held-out text: chains of three are right for 0.6 tokens on average."""
    ids = held_out_ids(TINY, N_PROMPT)
    with open_engine(TINY) as engine:
        text = [e.token for e in engine.generate(ids, max_tokens=N_TEXT, text=False)]
    n_right = 0
    with MtpModel(merged, n_ctx=512) as model:
        model.read(ids)
        for at in range(N_TEXT - N_DRAFT):
            draft = model.drafter.draft(0, text[at], N_DRAFT, 1)
            right = draft.tokens[:, 0] == text[at + 1 : at + 1 + N_DRAFT]
            n_right += int(right.cumprod().sum())
            model.decode(text[at])
    assert n_right / (N_TEXT - N_DRAFT) >= 0.6


@pytest.mark.parametrize(("spec", "least"), [("mtp", 1.6), ("dflash", 1.3), ("auto", 0.0)])
def test_text_with_drafts_is_the_text_without(merged: Path, spec: str, least: float) -> None:
    """Drafts for the shipped model are of its own drafters, without a file named."""
    path = TINY if spec == "dflash" else merged
    texts = []
    for settings in ({}, {"spec": spec, "draft_max": N_DRAFT}):
        with open_engine(path, cpu_reference=True, n_threads=1, **settings) as engine:
            for prompt in PROMPTS:
                ids = engine.tokenizer.encode(prompt)
                texts.append([e.token for e in engine.generate(ids, max_tokens=64, text=False)])
            stats = engine.spec_stats()
    assert texts[: len(PROMPTS)] == texts[len(PROMPTS) :]
    assert stats is not None
    assert stats.tokens_per_step >= least
