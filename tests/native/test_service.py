"""A service: many requests share one engine, and each is answered as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.clients import GREEDY, Client, alone, serving, together
from helpers.faults import poison
from helpers.patience import PATIENCE_S, until
from helpers.shared import prompt

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import QueueFull, RequestError, ServiceClosed
from moegraph.loop import scheduler
from moegraph.loop.costs import Tally
from moegraph.loop.requests import Request, Step
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
SLOTS = {"pin_layers": 0, "cache_slots": 48, "policy": "lru", "deterministic": True}
MODES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "stream": {**SLOTS, "miss": "stream"},
    "fetch": {**SLOTS, "miss": "stream", "host_pin": "all"},
}
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(seed=5, top_k=0, top_p=1.0, min_p=0.0, typical_p=0.7),
    SamplingParams(temperature=0.0, repeat_penalty=1.3),
)
LENGTHS = (1, 5, 40, 130, 33, 200, 12, 75)


def test_the_scheduler_knows_of_a_pass_that_has_ended(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it earns for prompts follows from what the pass took, which is learned late."""
    tallies, unlearned = list[Tally](), list[object]()
    end_round, decoded = Tally.end_round, scheduler.Scheduler.decoded

    def end(tally: Tally, *n_rows: int) -> float | None:
        tallies.append(tally)
        return end_round(tally, *n_rows)

    def count(books: scheduler.Scheduler[Any], n_rows: int) -> None:
        unlearned.extend(tally._unlearned for tally in tallies[-1:])
        decoded(books, n_rows)

    monkeypatch.setattr(Tally, "end_round", end)
    monkeypatch.setattr(scheduler.Scheduler, "decoded", count)
    engine = open_engine()
    assert len(list(engine.generate(prompt(engine, 9), max_tokens=6, ignore_eos=True))) == 6
    assert unlearned and not any(unlearned)


@pytest.fixture
def shipped_engine() -> Iterator[Engine]:
    """Load the shipped model, which has a vocabulary, in reference mode."""
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=512, n_seq=3, cpu_reference=True)
    with Engine.load("tiny", config) as engine:
        yield engine


@pytest.mark.parametrize(("settings", "n_seq"), list(zip(MODES.values(), (3, 1, 3))), ids=MODES)
def test_in_reference_mode_each_answer_is_that_of_the_request_alone(
    open_engine: Open, settings: dict[str, Any], n_seq: int
) -> None:
    engine = open_engine(n_seq=n_seq, cpu_reference=True, **settings)
    with serving(engine) as service:
        with together(service):
            clients = [
                Client(service, prompt(engine, n, seed=i), max_tokens=20 + 30 * (i % 3),
                       sampling=SAMPLINGS[i % len(SAMPLINGS)])
                for i, n in enumerate(LENGTHS)
            ]  # fmt: skip
        for client in clients:
            client.wait()
        service.drain()
        counts = service.status().counts
    assert n_seq == 1 or counts.pass_rows > counts.passes + 10
    single = open_engine(cpu_reference=True)
    for client in clients:
        assert (client.tokens, client.reason) == (alone(single, client.request)[0], "length")
        assert client.last.usage.n_generated == len(client.tokens) == client.request.max_tokens


def test_stops_end_tokens_and_texts_are_those_of_the_request_alone(shipped_engine: Engine) -> None:
    engine, encode = shipped_engine, shipped_engine.tokenizer.encode
    requests = [
        {"prompt": encode("def fibonacci(n):"), "max_tokens": 60, "stop": ("return",)},
        {"prompt": encode("import os\n"), "max_tokens": 40},
        {"prompt": encode("class Point:"), "max_tokens": 50, "stop": ("self", "(")},
        {"prompt": encode("x = 1"), "max_tokens": 0},
    ]
    with serving(engine) as service:
        clients = [Client(service, **one, text=True, ignore_eos=False) for one in requests]
        for client in clients:
            client.wait()
    for client in clients:
        expected = alone(engine, client.request)
        assert (client.tokens, client.text, client.reason) == expected
    stops = [client.last.stop for client in clients]
    assert stops[0] == "return" and stops[2] in ("self", "(") and stops[1] is stops[3] is None
    assert clients[3].tokens == [] and clients[3].last.usage.n_read == 4


def test_a_full_queue_refuses_and_says_when_to_come_back(open_engine: Open) -> None:
    engine, go_on = open_engine(n_seq=1), threading.Event()
    with serving(engine, n_waiting=2) as service:
        running = Client(
            service, [1, 2], max_tokens=400, on_step=lambda step: go_on.wait(PATIENCE_S)
        )
        until(lambda: running.steps)
        waiting = [Client(service, [3], max_tokens=1) for _ in range(2)]
        with pytest.raises(QueueFull) as caught:
            Client(service, [4], max_tokens=1)
        assert caught.value.retry_after_s >= 1.0
        running.ticket.cancel()
        go_on.set()
        for client in waiting:
            assert client.wait().reason == "length"
        Client(service, [4], max_tokens=1).wait()
        assert service.status().counts.refused == 1


@pytest.mark.parametrize("n_seq", [2])
def test_what_was_read_without_reuse_serves_no_later_request(open_engine: Open, n_seq: int) -> None:
    engine = open_engine(n_seq=n_seq, cpu_reference=True)
    ids = prompt(engine, 150)
    with serving(engine) as service:
        first = Client(service, ids, max_tokens=3, reuse=False).wait()
        later = Client(service, [*ids, *first.tokens, 1], max_tokens=3).wait()
    assert later.last.usage.n_cached == 0 and engine.prefixes.store.n_places == 0


@pytest.mark.parametrize("when", ["waiting", "reading", "decoding"])
def test_a_cancellation_or_deadline_touches_no_other(open_engine: Open, when: str) -> None:
    engine = open_engine(n_seq=2, cpu_reference=True, n_ctx=2048)
    ids, long = prompt(engine, 20), prompt(engine, 1900, seed=1)
    is_there, go_on, is_full = threading.Event(), threading.Event(), when == "waiting"

    def stay(step: Step) -> None:
        if step.tokens or when == "reading":
            is_there.set()
            go_on.wait(PATIENCE_S)

    with serving(engine) as service:
        with together(service):
            more = {"on_step": stay} if is_full else {}
            others = [Client(service, ids, max_tokens=150, **more)]
            if is_full:
                others.append(Client(service, ids[:10], max_tokens=150, on_step=stay))
        for how, deadline_s in (("cancelled", None), ("deadline", 0.05)):
            client = Client(
                service, ids[:5] if when == "decoding" else long, max_tokens=2000,
                deadline_s=deadline_s, on_step=stay,
            )  # fmt: skip
            if how == "cancelled":
                assert is_there.wait(PATIENCE_S)
                client.ticket.cancel()
                client.ticket.cancel()
                go_on.set()
            assert client.wait().reason == how, client.last
            assert when == "decoding" or not client.tokens
            client.ticket.cancel()
        for other in others:
            other.wait()
        again = Client(service, long, max_tokens=3).wait()
    single = open_engine(cpu_reference=True, n_ctx=2048)
    for client in (*others, again):
        assert (client.tokens, client.reason) == (alone(single, client.request)[0], "length")


def test_a_nan_in_one_sequence_touches_no_other(open_engine: Open) -> None:
    """Rows that are read whole are right too: nothing else is computed before they are."""
    engine = open_engine(n_seq=3, cpu_reference=True)
    poisoned = threading.Event()

    def spoil(step: Any) -> None:
        if len(clients[1].tokens) == 5 and not poisoned.is_set():
            poisoned.set()
            slots = service._loop.answers.slots()
            poison(engine, next(s.id for s in slots if s.request and s.request.name == "bad"))

    clients: list[Client] = []
    with serving(engine) as service:
        for i, name in enumerate(("a", "bad", "c")):
            sampling = SAMPLINGS[(0, 2)[i % 2]]
            more = {"on_step": spoil} if name == "bad" else {}
            clients.append(
                Client(service, prompt(engine, 40 + i, seed=i), max_tokens=60, name=name,
                       sampling=sampling, **more)
            )  # fmt: skip
        for client in clients:
            client.wait()
        assert clients[1].reason == "error" and "not finite" in str(clients[1].last.error)
        assert service.failure is None
        again = Client(service, clients[1].request.prompt, max_tokens=3).wait()
    single = open_engine(cpu_reference=True)
    for client in (clients[0], clients[2], again):
        assert (client.tokens, client.reason) == (alone(single, client.request)[0], "length")


def test_closing_ends_every_request_once(open_engine: Open) -> None:
    engine = open_engine(n_seq=2, n_ctx=2048)
    with serving(engine) as service:

        def stay(step: Step) -> None:
            until(lambda: service._is_closing)

        clients = [
            Client(service, prompt(engine, n), max_tokens=500, on_step=stay)
            for n in (9, 1500, 8, 7)
        ]
        until(lambda: clients[0].steps)
    for client in clients:
        assert client.wait(0).reason == "error"
        assert isinstance(client.last.error, ServiceClosed)
    assert engine.forward(prompt(engine, 10)).logits is not None


def test_draining_finishes_what_was_accepted(open_engine: Open) -> None:
    engine, go_on = open_engine(n_seq=2), threading.Event()
    with serving(engine) as service:
        clients = [
            Client(
                service,
                prompt(engine, n),
                max_tokens=30,
                on_step=lambda step: go_on.wait(PATIENCE_S),
            )
            for n in (9, 150, 8, 7)
        ]
        assert not service.drain(0.0)
        with pytest.raises(ServiceClosed):
            Client(service, [1])
        go_on.set()
        assert service.drain() and all(client.is_done for client in clients)
        assert service.failure is None


def test_a_caller_that_raises_ends_its_own_request(open_engine: Open) -> None:
    engine = open_engine(n_seq=2)

    def fail(step: Any) -> None:
        raise ValueError("no")

    with serving(engine) as service:
        good = Client(service, [1, 2], max_tokens=50)
        bad = Client(service, [3], max_tokens=1000, on_step=fail)
        assert bad.wait().reason == "cancelled"
        assert good.wait().reason == "length"


def test_work_that_does_not_end_is_a_failure_until_it_does(open_engine: Open) -> None:
    engine, go_on = open_engine(n_seq=1), threading.Event()
    with serving(engine, stuck_s=0.05) as service:
        client = Client(service, [1], max_tokens=3, on_step=lambda step: go_on.wait(PATIENCE_S))
        until(lambda: service.failure)
        assert "busy" in str(service.failure)
        go_on.set()
        client.wait()
        service.drain()
        assert service.failure is None


class Evens:
    """A grammar that allows even tokens only; the answer may be n tokens long."""

    is_slow = False

    def __init__(self, n_vocab: int, fails_at: int = 1 << 30) -> None:
        self._allowed = np.arange(n_vocab) % 2 == 0
        self._fails_at = fails_at
        self.taken: list[int] = []

    def allowed(self) -> np.ndarray:
        return self._allowed

    def accept(self, token: int) -> None:
        if len(self.taken) == self._fails_at:
            raise RequestError("the grammar has grown too complex")
        assert token % 2 == 0
        self.taken.append(token)

    def roll_back(self, n: int) -> None:
        del self.taken[len(self.taken) - n :]

    def n_accepted(self, tokens: list[int]) -> int:
        return next((i for i, token in enumerate(tokens) if token % 2), len(tokens))


@pytest.mark.parametrize("sampling", SAMPLINGS[1:3])
def test_grammars_bind_their_own_requests(open_engine: Open, sampling: SamplingParams) -> None:
    engine = open_engine(n_seq=4, cpu_reference=True)
    n_vocab = engine.hparams.n_vocab
    grammars = [Evens(n_vocab), Evens(n_vocab, fails_at=7), Evens(n_vocab)]
    with serving(engine) as service:
        clients = [
            Client(service, prompt(engine, 30 + n, seed=n), max_tokens=25, sampling=sampling,
                   constraint=grammars[n] if n < 2 else None)
            for n in range(4)
        ]  # fmt: skip
        for client in clients:
            client.wait()
    assert all(token % 2 == 0 for token in clients[0].tokens)
    assert grammars[0].taken == clients[0].tokens[:-1]
    assert clients[1].reason == "error" and "too complex" in str(clients[1].last.error)
    assert len(clients[1].tokens) == 8  # it is told while the next row is computed
    single = open_engine(cpu_reference=True)
    for client in clients[2:]:
        assert client.tokens == alone(single, client.request)[0]
    events = single.generate(
        clients[0].request.prompt, sampling, 25, text=False, ignore_eos=True,
        constraint=grammars[2],
    )  # fmt: skip
    assert [event.token for event in events] == clients[0].tokens


class Waiting(Evens):
    """The same, which from some token on says what is allowed only once it may."""

    def __init__(self, n_vocab: int, is_slow: bool) -> None:
        super().__init__(n_vocab)
        self.is_slow, self.may = is_slow, threading.Event()

    def allowed(self) -> np.ndarray:
        assert len(self.taken) < 5 or self.may.wait(PATIENCE_S)
        return super().allowed()


@pytest.mark.parametrize(
    ("settings", "is_slow"), [({}, True), ({"spec": "lookup", "n_draft": 4}, False)]
)
def test_others_do_not_wait_for_a_grammar(
    open_engine: Open, settings: dict[str, Any], is_slow: bool
) -> None:
    engine = open_engine("mini35b", n_seq=4, cpu_reference=True, **settings)
    slow = [Waiting(engine.hparams.n_vocab, is_slow) for _ in range(3)]
    ids = [7, 7, 7, 7, 7, 7, 7, 7]  # what repeats itself is drafted
    with serving(engine) as service:
        waiting = [Client(service, ids, max_tokens=30, constraint=one) for one in slow]
        until(lambda: all(len(client.tokens) >= 4 for client in waiting))
        Client(service, ids, max_tokens=40).wait()
        waiting[2].ticket.cancel()
        assert waiting[2].wait().reason == "cancelled"
        Client(service, prompt(engine, 50), max_tokens=5).wait()
        assert not any(client.is_done for client in waiting[:2])
        for one in slow:
            one.may.set()
        for client in waiting[:2]:
            client.wait()
    evens, single = Evens(engine.hparams.n_vocab), open_engine("mini35b", cpu_reference=True)
    events = single.generate(ids, GREEDY, 30, text=False, ignore_eos=True, constraint=evens)
    found = [event.token for event in events]
    assert waiting[0].tokens == waiting[1].tokens == found
    assert waiting[2].tokens == found[: len(waiting[2].tokens)]


@pytest.mark.parametrize("sampling", SAMPLINGS[1:3])
def test_log_probabilities_are_those_of_the_logits(
    open_engine: Open, sampling: SamplingParams
) -> None:
    engine = open_engine(n_seq=3, cpu_reference=True)
    ids = prompt(engine, 50)
    with serving(engine) as service:
        others = [Client(service, [n], max_tokens=30) for n in range(2)]
        client = Client(service, ids, max_tokens=8, sampling=sampling, n_logprobs=4).wait()
        for other in others:
            assert other.wait().last.logprobs == ()
    found = [one for step in client.steps for one in step.logprobs]
    assert [one.token for one in found] == client.tokens
    engine.reset()
    rows = engine.forward([*ids, *client.tokens[:-1]], all_rows=True).require_logits()
    for one, row in zip(found, rows[len(ids) - 1 :].astype(np.float64), strict=True):
        log_p = row - row.max() - np.log(np.exp(row - row.max()).sum())
        likeliest = np.argsort(-row, kind="stable")[:4].tolist()
        assert one.logprob == pytest.approx(log_p[one.token], abs=1e-5)
        assert [token for token, _ in one.top] == likeliest
        assert [p for _, p in one.top] == pytest.approx(log_p[likeliest].tolist(), abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"spec": "lookup", "n_draft": 4}], ids=["", "drafts"])
def test_the_state_after_a_token_of_an_answer_is_kept(
    open_engine: Open, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("mini35b", n_seq=2, cpu_reference=True, **settings)
    ids = prompt(engine, 50)
    single = open_engine("mini35b", cpu_reference=True)
    tokens = alone(single, Request(ids.tolist(), SAMPLINGS[0], 30, text=False, ignore_eos=True))[0]
    at = next(i for i in range(8, 25) if tokens[i] not in tokens[:i])
    with serving(engine) as service:
        first = Client(service, ids, max_tokens=30, keep_after=frozenset([tokens[at]])).wait()
        assert first.tokens == tokens
        for _ in range(2):  # the slot that holds the answer gives way
            Client(service, [1, 2], max_tokens=40).wait()
            Client(service, [3], max_tokens=40).wait()
        edited = [*ids.tolist(), *tokens[: at + 1], 7, 8, 9]
        second = Client(service, edited, max_tokens=10).wait()
    assert second.last.usage.n_cached == 50 + at + 1
    assert second.tokens == alone(single, second.request)[0]


@pytest.mark.parametrize("settings", [MODES["whole"], MODES["fetch"]], ids=["whole", "fetch"])
def test_a_prompt_of_medium_length_is_read_in_pieces_beside_a_long_one(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(scheduler, "_LASTS_S", 0.0)  # whatever pieces cost
    monkeypatch.setattr(scheduler, "_LONGER", 0)
    engine = open_engine(n_seq=3, n_ctx=2048, n_ubatch=64, cpu_reference=True, **settings)
    is_cancelled, chats, drawn = threading.Event(), list[Client](), list[int]()
    read_before = list[bool]()  # whether the long prompt was read before an answer ended

    def note(step: Step) -> None:
        read_before.extend([bool(drawn)] if step.finish_reason else [])

    with serving(engine) as service:

        def bring(step: Step) -> None:  # on the engine's thread: the prompt is under way
            drawn.extend(step.tokens)
            for n in () if chats else (33, 200, 90):
                ids = prompt(engine, n, seed=n)
                chats.append(Client(service, ids, max_tokens=6, marks=(n // 2,), on_step=note))

        long = Client(service, prompt(engine, 1800), max_tokens=3, on_step=bring)
        until(lambda: len(chats) == 3)
        for chat in chats:
            chat.wait()
        assert read_before == [False] * 3
        # what was computed up to a mark is kept
        again = Client(service, [*chats[1].request.prompt[:100], 5, 6, 7], max_tokens=4).wait()
        assert again.last.usage.n_cached == 100
        gone = Client(
            service, prompt(engine, 500, seed=9), max_tokens=4,
            on_step=lambda step: is_cancelled.wait(PATIENCE_S),
        )  # fmt: skip
        gone.ticket.cancel()
        is_cancelled.set()
        assert gone.wait().reason == "cancelled"
        long.wait()
    check_pool(engine.state.pool)
    single = open_engine(n_ctx=2048, cpu_reference=True)
    for client in (*chats, again, long):
        assert client.tokens == alone(single, client.request)[0]


def test_a_cancelled_prompt_leaves_what_its_earlier_sweeps_have_read(open_engine: Open) -> None:
    engine = open_engine(n_seq=2, n_ctx=2048, n_kv=-1, n_ubatch=64, cpu_reference=True)
    ids = prompt(engine, 1900)
    with serving(engine) as service:
        service._loop._reading._n_sweep = 512
        other = Client(service, [1, 2], max_tokens=100)
        is_there, go_on = threading.Event(), threading.Event()

        def stay(step: Step) -> None:
            if step.usage.n_read > 700 and not is_there.is_set():
                is_there.set()
                go_on.wait(PATIENCE_S)

        first = Client(service, ids, max_tokens=3, on_step=stay)
        assert is_there.wait(PATIENCE_S)
        first.ticket.cancel()
        go_on.set()
        assert first.wait().reason == "cancelled" and not first.tokens
        n_read = first.last.usage.n_read
        second = Client(service, ids, max_tokens=5, marks=(1024, 1100, 1700)).wait()
        n_cached = second.last.usage.n_cached
        # the last sweep may have lacked its last step, which computes the results
        assert n_cached in (512, 1024, 1536) and 0 <= min(n_read, 1536) - n_cached <= 512
        third = Client(service, [*ids[:1100], 5], max_tokens=2, reuse=True).wait()
        other.wait()
    check_pool(engine.state.pool)
    single = open_engine(n_ctx=2048, cpu_reference=True)
    for client in (other, second, third):
        assert client.tokens == alone(single, client.request)[0]


def test_what_the_engine_has_to_say_is_said_while_it_serves(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, said = open_engine(n_seq=1), list[str]()
    waiting = ["a file of the cache is damaged"]
    monkeypatch.setattr(
        engine, "drain_messages", lambda: [waiting.pop() for _ in range(len(waiting))]
    )
    with serving(engine, say=said.append) as service:
        Client(service, [1], max_tokens=2).wait()
        service.drain()
    assert said == ["a file of the cache is damaged"]
