"""A text that goes on when the context is full: what a fresh sequence of the kept tokens gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clients import Client, serving, together
from regression.harness import Models, open_engine, random_ids
from regression.test_families import drafts_of
from regression.test_pictures import picture, prompt_of

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ConfigError
from moegraph.passes import prefixes

N_CTX = 100
REFERENCE = {"n_ctx": N_CTX, "n_threads": 1, "cpu_reference": True}


def drawn(engine: Engine, ids: Sequence[int], n: int, **more: Any) -> list[tuple[int, np.ndarray]]:
    """Return n tokens, each with its logits."""
    first, *rest = engine.generate(ids, max_tokens=n, text=False, keep_logits=True, **more)
    assert all(one.logits is not None and len(one.logits) == 1 for one in rest)
    return [(one.token, one.logits[-1]) for one in (first, *rest)]  # type: ignore[index, misc]


def fresh(engine: Engine, ids: Sequence[int], n: int, n_keep: int) -> list[tuple[int, np.ndarray]]:
    """Return n tokens and logits by a new sequence whenever the context is full."""
    held, found = list(ids), list[tuple[int, np.ndarray]]()
    while len(found) < n:
        if found:
            del held[n_keep : n_keep + (N_CTX - n_keep) // 2]
        more = drawn(engine, held, min(N_CTX + 1 - len(held), n - len(found)))
        held += [token for token, _ in more]
        found += more
    return found


@pytest.mark.parametrize("name", ["tiny", "gemma4", "mini35b", "olmoe"])
def test_the_text_is_that_of_fresh_sequences_alone_in_company_and_with_drafts(
    name: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "_WORTH", 1)
    path, n_keeps, lengths = models.path(name), (0, 17, None, 90), (130, 120, 110, 95)
    # of three sequences two have room, so that one moves to host memory
    settings = {**REFERENCE, "context_shift": True, "n_keep": -1, "n_seq": 3, "n_kv": 512}
    if name == "olmoe":
        settings |= {"device": "cpu,cpu", "n_kv": 0}  # which has passes of several groups
    else:
        settings |= {"spec": "lookup"} if name == "tiny" else drafts_of(name, tmp_path / "drafter")
    with open_engine(path, **REFERENCE) as engine:
        prompts = [random_ids(engine.hparams.n_vocab, 30 + i, seed=i) for i in range(4)]
        kept = [len(ids) if n is None else n for ids, n in zip(prompts, n_keeps)]
        expected = [fresh(engine, *one) for one in zip(prompts, lengths, kept)]
    with open_engine(path, **settings) as engine, serving(engine) as service:
        with together(service):
            clients = [
                Client(service, ids, max_tokens=len(one), n_keep=n_keep)
                for ids, n_keep, one in zip(prompts, n_keeps, expected)
            ]
        for client, ids, one in zip(clients, prompts, expected, strict=True):
            assert client.wait().tokens == [token for token, _ in one]
            usage = client.last.usage
            assert (usage.n_prompt, usage.n_read, client.reason) == (len(ids), len(ids), "length")
            assert 0 < len(ids) + usage.n_generated - 1 - usage.n_dropped <= N_CTX
        service.drain()
        status = service.status()
        assert status.group_passes or (status.spec and status.spec.drafted)
        assert status.group_passes or status.counts.pass_rows > status.counts.passes
    with open_engine(path, **REFERENCE, context_shift=True) as engine:
        for (token, logits), (wanted, row) in zip(
            drawn(engine, prompts[0], lengths[0]), expected[0], strict=True
        ):
            assert token == wanted
            np.testing.assert_array_equal(logits, row)


@pytest.mark.parametrize(
    ("n_keep", "cut"),
    [
        (0, (0, 105)),  # the end is in the second picture, and the third one moves
        (40, (20, 135)),  # the first picture is cut too
        (62, (62, 135)),  # the first one stays
        (-1, (180, 190)),
    ],
)
def test_a_picture_goes_as_a_whole(n_keep: int, cut: tuple[int, int], models: Models) -> None:
    settings = {**REFERENCE, "n_ctx": 200}
    with open_engine(models.path("mini35b"), **settings) as engine:
        hp = engine.hparams
        text, n = random_ids(hp.n_vocab, 100), hp.n_embd
        parts: list[Any] = [text[:20], picture(n, 6, 7, 1), text[20:45], picture(n, 6, 3, 2)]
        ids, pictures = prompt_of([*parts, text[45:55], picture(n, 5, 4, 3), text[55:100]])
        assert len(ids) == 180
        before = drawn(engine, ids, 201 - len(ids), pictures=pictures)
        held = [*ids, *(token for token, _ in before)]
        first, end = cut
        left = [
            (at - (end - first if at >= end else 0), one)
            for at, one in pictures
            if not first <= at < end
        ]
        after = drawn(engine, held[:first] + held[end:], 5, pictures=left)
    with open_engine(models.path("mini35b"), **settings, context_shift=True, n_keep=n_keep) as e:
        found = drawn(e, ids, len(before) + 5, pictures=pictures)
    for (token, logits), (wanted, row) in zip(found, [*before, *after], strict=True):
        assert token == wanted
        np.testing.assert_array_equal(logits, row)


def test_without_the_setting_a_text_ends_as_before(models: Models) -> None:
    with open_engine(models.path("tiny"), **REFERENCE) as engine:
        *_, last = engine.generate(random_ids(512, 90), text=False, ignore_eos=True)
        assert (last.n_generated, last.finish_reason) == (11, "length")
    with pytest.raises(ConfigError, match="--context-shift"):
        EngineConfig(n_keep=4).validate()
