"""The last token of a prompt that is kept up to there: a row of the next decode pass, no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.clients import Client, alone, serving, together
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.kinds import Kind
from moegraph.runner import Batch
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "missing": {"cache_slots": 60, "pin_layers": 0, "miss": "stream"},
    "lookup": {"spec": "lookup"},
    "mtp": {"spec": "mtp"},
}
N, N_ANSWER = 300, 6


@dataclass
class Counts:
    """What has run: rows of the chunks of sweeps, sequences of decode passes, other passes."""

    chunks: list[int] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    n_others: int = 0


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Return what an engine runs from now on."""
    counts, submit, sweep = Counts(), engine.runner.submit, engine.runner.sweep

    def submitting(batch: Batch, *args: Any, **more: Any) -> Any:
        if batch.kind in (Kind.DECODE, Kind.VERIFY):
            counts.decodes.append(len(batch.slots))
        else:
            counts.n_others += 1
        return submit(batch, *args, **more)

    def sweeping(*batches: Any) -> Any:
        begun = sweep(*batches)
        counts.chunks += [chunk.n for part in begun._parts for chunk in part]
        return begun

    monkeypatch.setattr(engine.runner, "submit", submitting)
    monkeypatch.setattr(engine.runner, "sweep", sweeping)
    return counts


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_kept_prompt_has_no_chunk_and_no_pass_of_its_own(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    shape = {"n_ctx": 1024, "n_ubatch": 128, "cpu_reference": True}
    engine = open_engine("mini35b", n_seq=3, cache_ram=64, **shape, **settings)
    ids, counts = prompt(engine, N), counted(engine, monkeypatch)
    one = partial(Client, max_tokens=N_ANSWER)
    with serving(engine) as service:
        new = one(service, ids, reuse=False).wait()
        assert counts.chunks == [128, 128, 44] and counts.n_others == 0
        n_new = len(counts.decodes)
        first = one(service, ids, marks=(N - 1,)).wait()
        assert counts.chunks[3:] == [128, 128, 43] and counts.n_others == 0
        assert first.last.usage.n_cached == 0 and engine.prefixes.n_saved(ids) == N - 1
        # the pass that the chunk was for; beside other requests, there is one anyway
        assert "spec" in settings or len(counts.decodes) == 2 * n_new + 1
        # it comes again, twice at once: nothing is read
        again = [one(service, ids, marks=(N - 1,)) for _ in range(2)]
        for client in again:
            assert client.wait().last.usage.n_cached == N - 1
        assert len(counts.chunks) == 6 and counts.n_others == 0
    expected = alone(open_engine("mini35b", **shape), new.request)[0]
    assert len(expected) == N_ANSWER
    assert all(client.tokens == expected for client in (new, first, *again))


def test_beside_an_answer_it_is_a_row_of_a_pass_that_runs_anyway(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sweep reads two prompts, of which one is kept: their first tokens come one pass apart."""
    engine = open_engine("mini35b", n_seq=2, n_ctx=1024, n_ubatch=128, cpu_reference=True)
    counts = counted(engine, monkeypatch)
    with serving(engine) as service:
        one = partial(Client, service)
        with together(service):
            new = one(prompt(engine, 40, seed=1), max_tokens=N_ANSWER + 1, reuse=False)
            kept = one(prompt(engine, N, seed=2), max_tokens=N_ANSWER, marks=(N - 1,))
        for client in (new, kept):
            assert client.wait().reason == "length"
    assert counts.decodes == [2] * N_ANSWER and counts.n_others == 0
    assert sum(counts.chunks) == 40 + N - 1


def odds_of(client: Client) -> list[Any]:
    """Return the odds of all tokens, of which a step may have several."""
    return [odds for step in client.steps for odds in step.logprobs]


def test_the_first_token_is_drawn_as_from_a_prompts_results(open_engine: Open) -> None:
    """With the odds of the likeliest, at random, with a text that ends at once, and with none."""
    engine = open_engine("mini35b", n_ctx=1024, n_ubatch=128, cpu_reference=True)
    ids, warm = prompt(engine, 200), SamplingParams(temperature=1.0, seed=5)
    with serving(engine) as service:
        one = partial(Client, service, ids, n_logprobs=3, sampling=warm)
        for n in (4, 1, 0):
            new = one(max_tokens=n, reuse=False).wait()
            kept = [one(max_tokens=n, marks=(199,)).wait() for _ in range(2)]
            for client in kept:
                assert client.tokens == new.tokens and client.reason == new.reason == "length"
                assert odds_of(client) == odds_of(new)
    assert engine.held(0) == ids.tolist(), "of a prompt without an answer all is read"
    rows = [
        np.concatenate([e.logits for e in engine.generate(
            ids, max_tokens=3, reuse=reuse, marks=(199,), keep_logits=True, ignore_eos=True,
        ) if e.logits is not None])
        for reuse in (False, True)
    ]  # fmt: skip
    assert rows[0].shape[0] > 200 > rows[1].shape[0]
    np.testing.assert_array_equal(rows[1], rows[0][-len(rows[1]) :])
