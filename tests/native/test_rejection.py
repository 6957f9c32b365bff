"""Texts that are drafted at random and accepted by rejection: the engine's distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import write_small
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import ConfigError
from moegraph.sampling import Sampler, SamplingParams

Open = Callable[..., Engine]
N_TEXTS, TOP_K = 300, 3


def drafting(open_engine: Open, folder: Path, source: str) -> Engine:
    settings: dict[str, Any] = {"cpu_reference": True, "rejection_sampling": True, "draft_max": 3}
    if source == "mtp":
        return open_engine("mini35b", spec="mtp", **settings)
    changes = {"markov_rank": 32} if source == "dspark" else {}
    path = write_small(folder, **changes)
    return open_engine("legacy32", spec="dflash", draft=str(path), **settings)


def expected(
    engine: Engine, ids: np.ndarray, params: SamplingParams
) -> dict[tuple[int, int], float]:
    """Return the probability of every pair of tokens after a prompt, by passes of one row."""
    found, sampler = {}, Sampler(params, engine.hparams.n_vocab)
    engine.reset()
    firsts = sampler.distribution(engine.forward_logits(ids, all_rows=False)[-1])
    for first, p in zip(*(part.tolist() for part in firsts)):
        engine.reset()
        rows = engine.forward_logits(np.append(ids, first).astype(np.int32), all_rows=False)
        for second, q in zip(*(part.tolist() for part in sampler.distribution(rows[-1]))):
            found[first, second] = p * q
    return found


@pytest.mark.parametrize(
    "source", [pytest.param("mtp", marks=pytest.mark.nightly), "dflash", "dspark"]
)
def test_texts_have_the_targets_distribution(
    open_engine: Open, tmp_path: Path, source: str
) -> None:
    engine = drafting(open_engine, tmp_path, source)
    ids = prompt(engine, 12)
    settings: dict[str, Any] = {"top_k": TOP_K, "top_p": 1.0, "min_p": 0.0, "temperature": 30.0}
    wanted = expected(engine, ids, SamplingParams(**settings))
    found = Counter[tuple[int, int]]()
    for seed in range(N_TEXTS):
        events = engine.generate(ids, SamplingParams(seed=seed, **settings), 3, text=False)
        first, second, _ = (event.token for event in events)
        found[first or 0, second or 0] += 1
    stats = engine.spec_stats()
    assert stats and stats.drafted > N_TEXTS // 2
    assert set(found) <= set(wanted) and len(wanted) == TOP_K**2
    statistic = sum((found[pair] - N_TEXTS * p) ** 2 / (N_TEXTS * p) for pair, p in wanted.items())
    assert statistic < 30, "a thousandth of the texts is that far off, with 8 degrees of freedom"
    assert engine.drain_messages() == []


def test_greedy_text_and_seeds(open_engine: Open, tmp_path: Path) -> None:
    """Greedy text is that without drafts; a seed gives the same sampled text again."""
    engine, plain = (
        drafting(open_engine, tmp_path, "mtp"),
        open_engine("mini35b", cpu_reference=True),
    )
    ids = prompt(engine, 12)

    def text(of: Engine, params: SamplingParams | None) -> list[int | None]:
        return [event.token for event in of.generate(ids, params, 20, text=False)]

    assert text(engine, None) == text(plain, None)
    sampled = [text(engine, SamplingParams(seed=4, temperature=2.0)) for _ in range(2)]
    assert sampled[0] == sampled[1]


def test_what_gives_no_probabilities_is_matched_and_says_so(open_engine: Open) -> None:
    settings = {"cpu_reference": True, "spec": "lookup"}
    engine = open_engine("mini35b", rejection_sampling=True, **settings)
    plain = open_engine("mini35b", cpu_reference=True)
    ids = np.tile(prompt(engine, 6), 4)
    params = SamplingParams(seed=1, temperature=0.1)
    texts = [
        [event.token for event in one.generate(ids, params, 12, text=False)]
        for one in (engine, plain)
    ]
    assert texts[0] == texts[1]
    (line,) = engine.drain_messages()
    assert "lookup gives no probabilities" in line and "\n" not in line


def test_trees_are_refused(open_engine: Open) -> None:
    with pytest.raises(ConfigError, match="drafts of one path"):
        open_engine("mini35b", spec="mtp", rejection_sampling=True, ddtree=True)
