"""A prompt that is cancelled: its events say how much of it was read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moegraph.engine import Engine
from moegraph.events import CancelToken
from moegraph.sampling import SamplingParams


@pytest.mark.parametrize("least", [1, 40])
def test_only_the_tokens_that_were_read_are_counted(
    open_engine: Callable[..., Engine], least: int
) -> None:
    engine = open_engine(n_ubatch=16)
    cancel, greedy = CancelToken(), SamplingParams(temperature=0.0)
    told: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            told.append(done)
            if done >= least:
                cancel.set()

    prompt = [5] * 100
    options = {"cancel": cancel, "progress": progress, "text": False, "max_tokens": 4}
    (event,) = engine.generate(prompt, greedy, **options)
    assert event.finish_reason == "cancelled"
    assert (event.n_prompt, event.n_read, event.n_computed) == (100, told[-1], told[-1])
    assert least <= told[-1] < 100
    assert event.prefill_tps == pytest.approx(told[-1] / event.prefill_s)


def test_tokens_of_an_earlier_request_are_read_and_not_computed(
    open_engine: Callable[..., Engine],
) -> None:
    engine = open_engine(n_ubatch=16)
    options = {"text": False, "max_tokens": 1, "reuse": True}
    (first,) = engine.generate([5] * 20, **options)
    (second,) = engine.generate([5] * 30, **options)
    assert (first.n_read, first.n_computed) == (20, 20)
    assert (second.n_read, second.n_computed) == (30, 10)
