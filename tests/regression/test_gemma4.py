"""gemma4: whatever is resident, upstream's bits, and memory as planned."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.shared import greedy_tokens
from regression.compare import assert_logits_equal
from regression.harness import THREADS, Models, Upstream, open_engine, our_logits, random_ids

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.placement.footprint import needed_bytes
from moegraph.text.tokenizer import Tokenizer

NAME = "gemma4"
RESIDENCY: dict[str, dict[str, Any]] = {
    "resident": {},
    "a part": {"mode": "layered", "cache_slots": 40, "policy": "lru", "miss": "stream"},
    "streamed": {"mode": "layered", "cache_slots": 0, "miss": "stream"},
    "on the CPU": {"mode": "layered", "cache_slots": 0, "miss": "cpu"},
}


@pytest.mark.parametrize("settings", RESIDENCY.values(), ids=list(RESIDENCY))
def test_whatever_is_resident_upstreams_logits_and_text(
    settings: dict[str, Any], models: Models, upstream: Upstream
) -> None:
    path = models.path(NAME)
    with open_engine(path, spec="lookup", **settings) as engine:
        ids = random_ids(engine.hparams.n_vocab, 150)
        theirs = upstream.logits(path, ids, n_ctx=1024, threads=THREADS)
        assert_logits_equal(our_logits(engine, ids), theirs, "one chunk")
        more = upstream.decode_steps(path, ids[:100], ids[100:], n_ctx=1024, threads=THREADS)
        our_logits(engine, ids[:100])
        for at, row in enumerate(more, 100):
            ours = engine.forward_logits(ids[at : at + 1], pos0=at)
            assert_logits_equal(ours, row[None], f"row {at}")
        prompt = ids[:40] * 3  # repeats itself: look-up drafts
        ((text,), _) = upstream.oracle.greedy(path, [prompt], 24, n_ctx=1024, threads=THREADS)
        events = engine.generate(prompt, max_tokens=24, text=False)
        assert [event.token for event in events if event.token is not None] == text


def test_what_is_planned_covers_what_is_taken(models: Models) -> None:
    path = models.path(NAME)
    with open_model(path) as model:
        assert model.warnings == ()
        needed = needed_bytes(model, EngineConfig(device="cpu", n_ctx=512), 512)
    with open_engine(path, n_ctx=512) as engine:
        memory = engine.memory()
        assert (memory["state_bytes"], memory["kv_bytes"]) == (0, needed.kv)


TEXTS = (
    "def f(a, b):\n    return a + b  # the list of values\n",
    "  two spaces,\ttabs,\n\n\nlines\n\n\n\n\n\nand a caf\u00e9, \u4e2d\u6587, \U0001f600",
    "a \u2581 of its own <0x41> <bos> <|turn> <|channel>",
)


@pytest.mark.parametrize("text", TEXTS)
def test_text_becomes_upstreams_tokens_and_comes_back(
    text: str, models: Models, upstream: Upstream
) -> None:
    path = models.path(NAME)
    with open_model(path) as model, Tokenizer(model) as tokenizer:
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert ids == upstream.oracle.tokenize(path, text)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
        assert tokenizer.encode(text)[0] == tokenizer.bos == 2
        assert tokenizer.eog_ids >= {1, model.hparams.n_vocab - 8}  # <eos>, <turn|>


def test_two_sequences_have_the_bits_of_each_alone(models: Models, upstream: Upstream) -> None:
    """Rows are gathered from pages; drafted ones are moved when they are accepted."""
    path = models.path(NAME)
    with open_engine(path, n_seq=2, spec="lookup", cache_slots=60) as engine:
        prompts = [random_ids(engine.hparams.n_vocab, n, n) * 3 for n in (40, 70)]
        theirs, _ = upstream.oracle.greedy(path, prompts, 24, n_ctx=1024, threads=THREADS)
        for prompt, expected in zip(prompts, theirs, strict=True):
            assert greedy_tokens(engine, prompt, 24) == expected
