"""Answers for asyncio, hidden states, routing, and a policy of one's own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers.patience import until
from helpers.shared import prompt

from moegraph import AsyncEngine, EngineConfig, SamplingParams
from moegraph.errors import ConfigError, ContextOverflow, RequestError
from moegraph.experts.policy import Recency

N = 20
GREEDY = SamplingParams(temperature=0.0)
TALKS = [[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(N)]


def load(**settings: Any) -> AsyncEngine:
    defaults = {"device": "cpu", "n_ctx": 512, "n_threads": 1, "cpu_reference": True}
    return AsyncEngine.load("tiny", EngineConfig(**{**defaults, **settings}))


@pytest.fixture(scope="module")
def alone() -> Iterator[AsyncEngine]:
    with load(mode="layered") as engine:
        yield engine


def test_20_conversations_at_once_have_the_answers_that_each_has_alone(alone: AsyncEngine) -> None:
    expected = [alone.chat(talk, sampling=GREEDY, max_tokens=8) for talk in TALKS]
    texts = [answer.whole().message() for answer in expected]

    async def talk(engine: AsyncEngine, messages: Any) -> Any:
        answer = engine.achat(messages, sampling=GREEDY, max_tokens=8)
        parts = [part async for part in answer]
        assert parts and answer.event.n_generated <= 8
        return answer.reply.message(), answer.finish_reason

    async def all_of_them(engine: AsyncEngine) -> Any:
        return await asyncio.gather(*(talk(engine, messages) for messages in TALKS))

    with load(n_seq=N) as engine:
        found = asyncio.run(all_of_them(engine))
        until(lambda: engine._service.status().counts.pass_rows == N * 7)  # it is said at times
        assert engine._service.status().counts.passes < N * 7 / 2
        with pytest.raises(RequestError, match="belongs to another thread"):
            engine.forward([1])
    assert found == [(text, one.finish_reason) for text, one in zip(texts, expected)]


def test_events_are_those_of_generate_and_leaving_ends_the_answer(alone: AsyncEngine) -> None:
    ids = alone.tokenizer.encode("def fibonacci(n):")
    kept = [(e.token, e.n_generated, e.finish_reason) for e in alone.generate(ids, max_tokens=24)]
    text = "".join(event.text for event in alone.generate(ids, max_tokens=24))

    async def run(engine: AsyncEngine) -> None:
        events = [event async for event in engine.agenerate("def fibonacci(n):", max_tokens=24)]
        assert [(e.token, e.n_generated, e.finish_reason) for e in events] == kept
        assert "".join(event.text for event in events) == text
        left = engine.agenerate(ids, max_tokens=400, ignore_eos=True)
        assert (await anext(left)).token == kept[0][0]
        await left.aclose()
        cut = asyncio.create_task(anext(engine.agenerate(ids * 20, max_tokens=1)))
        await asyncio.sleep(0)
        cut.cancel()
        with pytest.raises(ContextOverflow):
            await anext(engine.agenerate(ids * 400))
        again = [event.token async for event in engine.agenerate(ids, max_tokens=3)]
        assert again == [token for token, *_ in kept[:3]]

    with load() as engine:
        asyncio.run(run(engine))
        asyncio.run(run(engine))  # with another loop
        service = engine._service
    assert not service._thread.is_alive()


def test_hidden_states_are_the_outputs_of_the_layers(alone: AsyncEngine) -> None:
    ids, n_layer = prompt(alone, 70), alone.hparams.n_layer
    with load() as whole:
        nodes = whole.forward_nodes(ids)
    alone.reset()
    found = alone.hidden_states(ids, [0, n_layer - 2])
    assert alone.held(0) == ids.tolist()
    for il, rows in found.items():
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, nodes["l_out", il])
    with pytest.raises(RequestError, match=f"no layer {n_layer}"):
        alone.hidden_states(ids, [n_layer])


def test_routing_is_seen_of_every_row_until_the_watch_ends(alone: AsyncEngine) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    alone.reset()
    end = alone.watch_routing(lambda il, ids: seen.append((il, ids.shape)))
    n, n_used = len(list(alone.generate([1, 2, 3], max_tokens=4))), alone.hparams.n_expert_used
    end()
    alone.forward([5])
    rows = Counter[int]()
    for il, (n_rows, width) in seen:
        rows[il] += n_rows
        assert width == n_used
    assert set(rows) == set(alone.hparams.routed_layers) and set(rows.values()) == {3 + n - 1}
    with load() as whole, pytest.raises(ConfigError, match="mode='layered'"):
        whole.watch_routing(print)


class Own(Recency):
    """LRU, which notes what it is asked."""

    def __init__(self, asked: Counter[str], n_expert: int = 0) -> None:
        super().__init__(n_expert)
        self.asked = asked

    def layer(self, n_expert: int, n_slots: int, n_expert_used: int) -> Own:
        self.asked["layer"] += 1
        return Own(self.asked, n_expert)

    def touch(self, ids: Sequence[int]) -> None:
        self.asked["touch"] += 1
        super().touch(ids)

    def accepts(self, expert: int, victim: int) -> bool:
        self.asked["accepts"] += 1
        return super().accepts(expert, victim)


def test_a_policy_of_ones_own_decides_which_experts_keep_slots() -> None:
    asked = Counter[str]()
    hits, texts = [], []
    for policy in (Own(asked), "lru"):
        missing = {"mode": "layered", "pin_layers": 0, "cache_slots": 40, "miss": "stream"}
        with load(policy=policy, **missing) as engine:
            events = list(engine.generate("def fibonacci(n):", max_tokens=16))
            texts.append("".join(event.text for event in events))
            hits.append(engine.expert_stats().cache.hit_rate)
            assert asked["layer"] == engine.hparams.n_layer
    assert texts[0] == texts[1] and hits[0] == hits[1]
    assert min(asked["touch"], asked["accepts"]) > 0
    with pytest.raises(ConfigError, match="policy is 3"):
        EngineConfig(policy=3).validate()
