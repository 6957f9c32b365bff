"""A prompt that is cancelled: its events say how much of it was read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moegraph.engine import Engine
from moegraph.events import CancelToken
from moegraph.sampling import SamplingParams


@pytest.mark.parametrize("n_chunks", [1, 2])
def test_only_the_tokens_that_were_read_are_counted(
    open_engine: Callable[..., Engine], n_chunks: int
) -> None:
    engine = open_engine(n_ubatch=16)
    cancel, greedy = CancelToken(), SamplingParams(temperature=0.0)

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "prefill" and done == 16 * n_chunks:
            cancel.set()

    prompt = [5] * 100
    options = {"cancel": cancel, "progress": progress, "text": False, "max_tokens": 4}
    (event,) = engine.generate(prompt, greedy, **options)
    assert event.finish_reason == "cancelled"
    assert (event.n_prompt, event.n_read, event.n_computed) == (100, 16 * n_chunks, 16 * n_chunks)
    assert event.prefill_tps == pytest.approx(16 * n_chunks / event.prefill_s)


def test_tokens_of_an_earlier_request_are_read_and_not_computed(
    open_engine: Callable[..., Engine],
) -> None:
    engine = open_engine(n_ubatch=16)
    options = {"text": False, "max_tokens": 1, "reuse": True}
    (first,) = engine.generate([5] * 20, **options)
    (second,) = engine.generate([5] * 30, **options)
    assert (first.n_read, first.n_computed) == (20, 20)
    assert (second.n_read, second.n_computed) == (30, 10)
