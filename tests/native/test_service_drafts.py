"""Requests of a service that draft: each is answered as without drafts, whoever else is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.clients import Client, alone, serving
from helpers.scripted_drafts import AnyController
from helpers.shared import prompt

from moegraph.draft.plan import Plan, SpecStats
from moegraph.engine import Engine
from moegraph.errors import NativeError
from moegraph.loop import answer, scheduler
from moegraph.loop.requests import Request, Step
from moegraph.passes.speculation import Speculation
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
RESIDENCIES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "60": {"cache_slots": 77, "pin_layers": 0, "miss": "stream"},
}
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3, temperature=0.9),
    SamplingParams(seed=4, top_k=0, typical_p=0.8),  # every row is read whole
)


@dataclass
class SharedController(AnyController):
    """Chooses by chance for several sequences too."""

    n_shared: int = 0
    stats: SpecStats | None = None

    def choose_for(self, n_seqs: int, n_left: int, without: Any = ()) -> Plan:
        self.n_shared += 1
        return self.choose(n_left, without)

    def observe_shared(self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int) -> None:
        assert n_seqs > 1 and seconds >= 0.0


def drafting(open_engine: Open, seed: int = 0, **settings: Any) -> Engine:
    """Open an engine in reference mode that drafts with its MTP block, in any shape."""
    engine = open_engine(
        "mini35b", cpu_reference=True, spec="mtp", n_draft=7, n_seq=3, n_ctx=256, **settings
    )
    controller = SharedController(["mtp"], seed=seed)
    drafters = engine._loaded.drafters
    engine.speculation = Speculation(drafters, controller, engine.hparams.n_vocab, 8)
    return engine


@pytest.mark.parametrize("settings", RESIDENCIES.values(), ids=RESIDENCIES)
def test_texts_are_those_without_drafts(open_engine: Open, settings: dict[str, Any]) -> None:
    engine = drafting(open_engine, **settings)
    plain = open_engine("mini35b", cpu_reference=True, n_ctx=256)
    with serving(engine) as service:
        clients = [
            Client(
                service, prompt(engine, n, seed=n), max_tokens=20 + 9 * (i % 3),
                sampling=SAMPLINGS[i % 3], n_logprobs=(None, 0, 3)[i % 3],
            )
            for i, n in enumerate((70, 20, 5, 100, 33, 12, 40))
        ]  # fmt: skip
        for client in clients:
            client.wait()
        # a conversation goes on
        more = [*clients[0].request.prompt, *clients[0].tokens, 5, 6, 7]
        clients.append(Client(service, more, max_tokens=20).wait())
    for client in clients:
        assert (client.tokens, client.reason) == (alone(plain, client.request)[0], "length")
    used = [client.last.usage for client in clients]
    assert sum(usage.n_drafted for usage in used) > 100
    assert engine.speculation.controller.n_shared > 25
    steps = engine.speculation.controller.steps
    assert {step.seconds > 0.0 for step in steps} == {True, False}  # alone, and in company


def test_accepted_drafts_give_several_tokens_in_a_step(open_engine: Open) -> None:
    """A grammar that allows one token at a time: what it allows is what is drafted."""
    engine = drafting(open_engine)
    answer = prompt(engine, 40, seed=9).tolist()

    class Drafter:
        """Knows the answer."""

        name, max_draft, n_bytes, target_layers, joins = "mtp", 6, 0, (), False

        def __getattr__(self, name: str) -> Any:
            return lambda *args: {} if name == "prompt_readers" else None

        def draft(self, slot: int, anchor: int, n: int, *_: Any) -> Any:
            from moegraph.draft.drafter import Draft

            at = answer.index(anchor) + 1
            return Draft(np.array(answer[at : at + n], np.int32).reshape(-1, 1))

    controller = SharedController(["mtp"], ("chain",))
    engine.speculation = Speculation([Drafter()], controller, engine.hparams.n_vocab, 8)
    with serving(engine) as service:
        clients = [
            Client(service, [i], max_tokens=30, constraint=Fixed(answer, engine.hparams.n_vocab))
            for i in range(3)
        ]
        for client in clients:
            client.wait()
    for client in clients:
        assert client.tokens == answer[:30], client.last.error
        assert max(len(step.tokens) for step in client.steps) > 2
        assert client.last.usage.n_accepted > 10


class Fixed:
    """A grammar of one text."""

    is_slow = False

    def __init__(self, text: list[int], n_vocab: int) -> None:
        self._text, self._n_vocab, self._at = text, n_vocab, 0

    def allowed(self) -> np.ndarray:
        found = np.zeros(self._n_vocab, dtype=bool)
        found[self._text[self._at]] = True
        return found

    def accept(self, token: int) -> None:
        assert token == self._text[self._at]
        self._at += 1

    def roll_back(self, n: int) -> None:
        self._at -= n

    def n_accepted(self, tokens: list[int]) -> int:
        wanted = self._text[self._at : self._at + len(tokens)]
        return next((i for i, (a, b) in enumerate(zip(tokens, wanted)) if a != b), len(wanted))


def test_texts_drafted_at_random_end_and_greedy_ones_are_those_without_drafts(
    open_engine: Open,
) -> None:
    engine = drafting(open_engine)
    engine.speculation.rejects = True
    plain = open_engine("mini35b", cpu_reference=True, n_ctx=256)
    with serving(engine) as service:
        clients = [
            Client(service, prompt(engine, 20 + i), max_tokens=30, sampling=SAMPLINGS[i % 2])
            for i in range(4)
        ]
        for client in clients:
            assert client.wait().reason == "length" and len(client.tokens) == 30
    for client in clients[::2]:
        assert client.tokens == alone(plain, client.request)[0]
    assert sum(client.last.usage.n_drafted for client in clients[1::2]) > 10


@pytest.mark.parametrize("settings", [RESIDENCIES["60"]])
def test_drafts_after_a_prompt_that_was_read_in_pieces(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(scheduler, "_LASTS_S", 0.0)  # whatever pieces cost
    monkeypatch.setattr(scheduler, "_LONGER", 0)
    monkeypatch.setattr(answer, "_PROGRESS_S", 0.0)  # however fast the prompt is read
    engine = drafting(open_engine, **settings)
    plain = open_engine("mini35b", cpu_reference=True, n_ctx=256)
    chat: list[Client] = []
    with serving(engine) as service:

        def come(step: Step) -> None:
            if not chat:
                assert service._loop.answers.sweeping and not step.tokens
                chat.append(Client(service, prompt(engine, 70, seed=2), max_tokens=40))

        long = Client(service, prompt(engine, 220, seed=1), max_tokens=3, on_step=come).wait()
        chat[0].wait()
    assert chat[0].last.usage.n_drafted > 10
    for client in (chat[0], long):
        assert client.tokens == alone(plain, client.request)[0]


def test_a_drafter_that_fails_where_nobody_asked_it_only_ends_drafts(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of tokens when the state after one is kept; the answer does not depend on that."""
    engine = drafting(open_engine)
    ids, sampling = prompt(engine, 40, seed=3), SamplingParams(temperature=0.0)
    wanted = alone(engine, Request([int(i) for i in ids], max_tokens=30, sampling=sampling,
                                   text=False, ignore_eos=True))[0]  # fmt: skip
    drafter, save, fails = engine.speculation.drafters["mtp"], engine.prefixes.save, [0]
    committed = drafter.committed

    def fail(*args: Any) -> None:
        if fails[0] == 1:
            fails[0] = 2
            raise NativeError("no more")
        committed(*args)

    def saving(seq: int, states: Any = None) -> bool:
        fails[0] = fails[0] or 1
        try:
            return save(seq, states)
        finally:
            fails[0] = 2 if fails[0] == 1 else fails[0]

    monkeypatch.setattr(drafter, "committed", fail)
    with serving(engine) as service:
        monkeypatch.setattr(engine.prefixes, "save", saving)
        client = Client(service, ids, max_tokens=30, keep_after=frozenset(wanted[5:20])).wait()
        assert fails == [2] and service.failure is None
        assert (client.tokens, client.reason) == (wanted, "length")
        again = Client(service, ids, max_tokens=30).wait()
        assert (again.tokens, again.reason) == (wanted, "length")
