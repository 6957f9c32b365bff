"""Who may use an engine: one generation at a time, in one thread, until it is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.shared import greedy_tokens, prompt

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import EngineBusy, RequestError

ROW = np.zeros((1, 1), np.int32)


def elsewhere(call: Callable[[], Any]) -> Any:
    """Return what a call returns in another thread, or raise what it raises there."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again below
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


@pytest.fixture
def engine(open_engine) -> Engine:
    return open_engine(mode="layered")


def events(engine: Engine, seed: int, n: int = 12) -> Any:
    """Start a generation from a random prompt; the first `next` computes it."""
    return engine.generate(prompt(engine, 20, seed), max_tokens=n, text=False, ignore_eos=True)


def tokens(stream: Any) -> list[int]:
    return [event.token for event in stream]


def test_a_second_generation_is_refused_and_the_first_one_gets_its_own_tokens(engine) -> None:
    first, second = (tokens(events(engine, seed)) for seed in (1, 2))
    a, b = events(engine, 1), events(engine, 2)
    got = []
    for event in a:
        got.append(event.token)
        if event.finish_reason is None:
            with pytest.raises(EngineBusy, match="another generation is running; close it first"):
                next(b)
    assert got == first
    # a refusal leaves the generation as it was: it only has to wait
    assert tokens(b) == second


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_generation_that_ends_early_gives_the_engine_free(engine, how: str) -> None:
    expected = tokens(events(engine, 2))
    a = events(engine, 1)
    next(a)
    if how == "close":
        a.close()
    else:
        del a
    assert engine.held(0) == [] and engine.state.n_past == [0]
    assert tokens(events(engine, 2)) == expected


def test_nothing_else_goes_while_a_generation_runs(engine) -> None:
    expected = tokens(events(engine, 1))
    a = events(engine, 1)
    got = [next(a).token]
    for call in (
        lambda: engine.forward(ROW),
        lambda: engine.submit(ROW, 0, False, True, None),
        lambda: engine.forward_logits([1]),
        lambda: engine.forward_nodes([1]),
        engine.collect,
        engine.reset,
    ):
        with pytest.raises(EngineBusy):
            call()
    assert got + tokens(a) == expected
    engine.reset()


def test_one_pass_may_be_in_flight(engine) -> None:
    with pytest.raises(RequestError, match="no pass is in flight; submit one first"):
        engine.collect()
    expected = engine.forward(ROW, greedy=True).argmax
    engine.reset()
    engine.submit(ROW, 0, False, True, None)
    for call in (lambda: engine.submit(ROW, 0, False, True, None), lambda: engine.forward(ROW),
                 lambda: engine.forward_nodes([1], 1)):  # fmt: skip
        with pytest.raises(RequestError, match="a pass is in flight; collect its results first"):
            call()
    assert engine.held(0) == [0]
    np.testing.assert_array_equal(engine.collect().argmax, expected)
    engine.submit(ROW, 0, False, True, None)
    engine.reset()
    with pytest.raises(RequestError, match="no pass is in flight"):
        engine.collect()


def test_a_generation_that_failed_gives_the_engine_free(engine, monkeypatch) -> None:
    expected = tokens(events(engine, 2))
    a = events(engine, 1)
    next(a)
    with monkeypatch.context() as patch:
        patch.setattr(engine.passes, "collect", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(a)
    assert list(a) == [] and engine.held(0) == []
    assert tokens(events(engine, 2)) == expected


def test_a_reset_drops_a_pass_over_its_own_sequence_only(open_engine) -> None:
    engine = open_engine(n_seq=3)
    for seqs in ((), (0,), (1,), (2,), (0, 1), (1, 2)):
        for seq in range(3):
            engine.reset(seq)
        engine.submit(np.zeros((2, 1), np.int32), 1, False, True, None)
        for seq in seqs:
            engine.reset(seq)
        if seqs == (1, 2):
            with pytest.raises(RequestError, match="no pass is in flight"):
                engine.collect()
        else:
            assert engine.collect().argmax.shape == (2,)
        held = [[], *([] if seq in seqs else [0] for seq in (1, 2))]
        assert [engine.held(seq) for seq in range(3)] == held


def test_another_thread_is_refused_and_disturbs_nothing(engine) -> None:
    expected = tokens(events(engine, 1))
    a = events(engine, 1)
    got = [next(a).token]
    for call in (
        lambda: next(a), a.close, lambda: events(engine, 1), lambda: engine.forward(ROW),
        engine.reset, engine.collect, engine.hand_over,
    ):  # fmt: skip
        with pytest.raises(RequestError, match="belongs to another thread; call hand_over()"):
            elsewhere(call)
    assert got + tokens(a) == expected


def test_an_engine_is_handed_over_in_the_middle_of_a_generation(engine) -> None:
    expected = tokens(events(engine, 1))
    a = events(engine, 1)
    got = [next(a).token]
    engine.hand_over()

    def use() -> None:
        got.append(next(a).token)
        engine.hand_over()

    elsewhere(use)
    got.append(next(a).token)  # this thread is the next one that calls
    with pytest.raises(RequestError, match="belongs to another thread"):
        elsewhere(lambda: next(a))
    assert got + tokens(a) == expected


def test_an_engine_may_be_loaded_in_one_thread_and_used_in_another(model_path) -> None:
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=256, n_ubatch=64)
    with Engine.load(model_path("legacy32"), config) as engine:
        assert len(elsewhere(lambda: tokens(events(engine, 1)))) == 12


def test_a_generation_dropped_in_another_thread_is_cleaned_up_in_the_right_one(engine) -> None:
    expected = tokens(events(engine, 2))
    held = [events(engine, 1)]
    next(held[0])
    resets = []
    real = engine.state.reset
    engine.state.reset = lambda seq: (resets.append(threading.get_ident()), real(seq))
    elsewhere(held.clear)
    assert resets == [] and engine.held(0) == []
    assert tokens(events(engine, 2)) == expected
    assert set(resets) == {threading.get_ident()}


def test_a_closed_engine_says_so(engine) -> None:
    live, done = events(engine, 1), events(engine, 1, n=1)
    tokens(done)
    next(live)
    engine.close()
    for call in (
        lambda: next(live), lambda: events(engine, 1), lambda: engine.generate("text"),
        lambda: engine.forward(ROW), lambda: engine.forward_logits([1]), engine.collect,
        lambda: engine.submit(ROW, 0, False, True, None), engine.reset, engine.memory,
        lambda: engine.forward_nodes([1]), engine.hand_over, lambda: engine.tokenizer,
    ):  # fmt: skip
        with pytest.raises(RequestError, match="the engine is closed"):
            call()
    live.close()
    with pytest.raises(StopIteration):
        next(done)


def test_text_is_a_prompt_too() -> None:
    with Engine.load("tiny", EngineConfig(device="cpu", n_threads=1, n_ctx=256)) as engine:
        ids = engine.tokenizer.encode("def f(x):")
        expected = greedy_tokens(engine, ids, 8)
        assert greedy_tokens(engine, "def f(x):", 8) == expected


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["a", "b"], "token ids must be integers, got text"),
        ([1.5, 2.0], "token ids must be integers, got floats"),
        ([True], "token ids must be integers, got booleans"),
        ([1, None], "token ids must be integers, got other values"),
        ([[1, 2], [3]], "token ids must be a list of integers"),
        ([2**70], "out of range"),
        (b"abc", "token ids must be integers"),
        (None, "token ids must be integers"),
    ],
    ids=str,
)
def test_ids_of_a_wrong_type_are_refused(open_engine, ids: Any, words: str) -> None:
    engine = open_engine()
    for call in (engine.generate, engine.forward, engine.forward_logits):
        with pytest.raises(RequestError, match=words):
            call(ids)
    assert engine.held(0) == []
    with pytest.raises(RequestError, match=r"shape \(1, 1, 1\)"):
        engine.forward(np.zeros((1, 1, 1), np.int32))


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1), (1, 1, 1), ()])
def test_a_prompt_that_is_no_list_is_refused(open_engine, shape: tuple[int, ...]) -> None:
    engine = open_engine()
    ids = np.ones(shape, np.int32)
    line = rf"token ids of shape \[{', '.join(map(str, shape))}\]; allowed: \[n\]"
    for call in (engine.generate, engine.prefill):
        with pytest.raises(RequestError, match=line):
            call(ids)
    assert engine.held(0) == []
