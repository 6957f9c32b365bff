"""gemma4, beside the contract of families: what files may lack, long contexts, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.shared import PRESETS, write_model
from modelgen.tensors import Plan, Tensor
from oracle.client import Step
from regression.compare import assert_logits_equal, nmse
from regression.harness import THREADS, Models, Upstream, open_engine, our_logits, random_ids

from moegraph.arch import open_model
from moegraph.errors import ConfigError
from moegraph.ggml.device import Capabilities
from moegraph.graphs import paged
from moegraph.text.tokenizer import Tokenizer

NAME = "gemma4"
TEXTS = (
    "def f(a, b):\n    return a + b  # the list of values\n",
    "  two spaces,\ttabs,\n\n\nlines\n\n\n\n\n\nand a caf\u00e9, \u4e2d\u6587, \U0001f600",
    "a \u2581 of its own <0x41> <bos> <|turn> <|channel>",
)


def test_files_may_lack_what_is_optional(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer has a projection of V or a scale of its output, and logits have no bound."""
    real = Plan._gemma4

    def fewer(plan: Plan, il: int) -> Iterator[Tensor]:
        return (
            t for t in real(plan, il) if "attn_v." not in t.name and "output_scale" not in t.name
        )

    monkeypatch.setattr(Plan, "_gemma4", fewer)
    shape = replace(PRESETS[NAME].shape, logit_softcap=0.0, merged_gate_up=False, tied=False)
    (path,) = write_model(tmp_path / "m.gguf", shape, PRESETS[NAME].mix)
    with open_engine(path) as engine:
        ids = random_ids(engine.hparams.n_vocab, 60)
        theirs = upstream.logits(path, ids, n_ctx=1024, threads=THREADS)
        assert_logits_equal(our_logits(engine, ids), theirs, "60 rows")


def test_single_rows_after_a_long_prompt_are_upstreams(models: Models, upstream: Upstream) -> None:
    """From 512 positions on, llama.cpp divides the sum of a single row, with a window too."""
    path = models.path(NAME)
    with open_engine(path, n_ubatch=128) as engine:
        ids = random_ids(engine.hparams.n_vocab, 603)
        steps = [Step(ids[:600]), *(Step([token]) for token in ids[600:])]
        results = upstream.oracle.run(path, steps, n_ctx=1024, n_ubatch=128, threads=THREADS)
        assert_logits_equal(our_logits(engine, ids[:600], 128), results[0].logits, "the prompt")
        for at, result in enumerate(results[1:], 600):
            ours = engine.forward_logits([ids[at]], pos0=at)
            assert_logits_equal(ours, result.logits, f"row {at}")


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


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has the CPU device claim other abilities, such as those of CUDA."""
    real = Capabilities.of.__func__  # type: ignore[attr-defined]

    def claim(**changes: bool) -> None:
        of = classmethod(lambda cls, dev: replace(real(cls, dev), **changes))
        monkeypatch.setattr(Capabilities, "of", of)

    return claim


@pytest.mark.parametrize("miss", ["stream", "cpu"])
def test_a_device_that_adds_experts_late_sums_all_of_them_first(
    miss: str, models: Models, upstream: Upstream, other_device: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A norm follows their sum, so what is added after it would be wrong."""
    path = models.path(NAME)
    monkeypatch.setattr(paged, "MAX_ATTN_HEAD", 0)  # attention over pages has other bits
    other_device(exact_sums=False)
    with open_engine(path, cache_slots=20, pin_layers=0, miss=miss) as engine:
        ids = random_ids(engine.hparams.n_vocab, 60)
        more = upstream.decode_steps(path, ids[:40], ids[40:], n_ctx=1024, threads=THREADS)
        our_logits(engine, ids[:40])
        ours = [engine.forward_logits([token], pos0=at) for at, token in enumerate(ids[40:], 40)]
        assert_logits_equal(np.concatenate(ours), more, "single rows")
        engine.reset()
        found = engine.prefill(ids).require_logits()
        assert nmse(found, more[-1:]) < 1e-3


def test_no_kernel_computes_experts_beside_a_gpu(
    models: Models, other_device: Callable[..., None]
) -> None:
    other_device(exact_sums=False, cpu_threads=False)
    with pytest.raises(ConfigError, match="--miss cpu: no kernel computes experts of gemma4"):
        with open_engine(models.path(NAME), cache_slots=20, miss="cpu"):
            pass
