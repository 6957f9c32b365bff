"""Requests of different owners share no beginnings: on the device, in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.clients import GREEDY, Client, serving, together
from helpers.reading import read
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.loop.answer import Answer
from moegraph.loop.requests import Request
from moegraph.passes import prefixes
from moegraph.passes.prefixfile import read_head

Open = Callable[..., Engine]
ONE = {"cpu_reference": True, "n_ctx": 1024, "n_ubatch": 128, "cache_ram": 64}
GIB = 1 << 30


@pytest.fixture(autouse=True)
def every_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short prompts have marks near each other."""
    monkeypatch.setattr(prefixes, "_WORTH", 1)


def test_the_device_and_the_memory_keep_owners_apart(open_engine: Open) -> None:
    engine = open_engine(**ONE, n_seq=3, n_kv=-1)
    ids = prompt(engine, 300)
    expected, _ = read(engine, 0, ids, 200, owner="a")
    asked = ids[:290]
    for place in ("device", "memory"):
        for other in ("b", "", "aa"):
            assert engine.prefixes.n_saved(asked, other) == 0, place
            assert engine.prefixes.n_common(0, asked, other) == 0
        assert engine.prefixes.n_saved(asked, "a") == 200
        engine.reset(0)
    # one who asks for the same computes it, and keeps it for itself
    logits, n = read(engine, 1, ids, 200, owner="b")
    assert n == 0
    np.testing.assert_array_equal(logits, expected)
    assert engine.prefixes.n_saved(asked, "b") == 200 and engine.prefixes.store.n_places == 2
    # a sequence that one has left is not gone on with by another
    assert engine.prefixes.choose(ids, [2, 1], "a") == 2
    assert engine.prefixes.choose(ids, [2, 1], "b") == 1
    logits, n = read(engine, 1, ids, owner="a")
    assert n == 200
    np.testing.assert_array_equal(logits, expected)
    longer = np.append(ids, 1)
    assert engine.prefixes.resume(1, longer, "a") == len(ids)
    assert engine.prefixes.resume(1, longer, "b") == 200
    # what one gives up is kept for it, whatever another has kept
    engine.prefixes.free(9, [1])
    assert engine.prefixes.n_saved(longer, "b") == 200
    read(engine, 0, longer)
    assert engine.prefixes.save(0)
    read(engine, 1, longer, owner="b")
    engine.prefixes.free(9, [0, 1, 2])
    assert engine.prefixes.n_saved(np.append(longer, 1), "b") == len(longer)
    # an empty sequence changes its owner too
    engine.reset(2)
    read(engine, 2, prompt(engine, 20, seed=5), owner="c")
    assert engine.prefixes.n_common(2, prompt(engine, 20, seed=5), "c") == 20


def test_the_disk_keeps_owners_apart(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine(**ONE)
    engine.keep_prefixes(tmp_path, GIB)
    ids = prompt(engine, 300)
    read(engine, 0, ids, 200, owner="a")
    read(engine, 0, ids[:250], 200, owner="b")
    engine.close()
    heads = [read_head(path) for path in tmp_path.glob("*.prefix")]
    assert sorted((h.parent, h.n_tokens) for h in heads if not h.first) == [("a", 200), ("b", 200)]
    engine = open_engine(**ONE)
    engine.keep_prefixes(tmp_path, GIB)
    assert engine.prefixes.store.disk.n_places == len(heads) == 3
    longer = np.append(ids, 1)
    assert [engine.prefixes.n_saved(longer, owner) for owner in ("a", "b", "c", "")] == [
        200, 250, 0, 0,
    ]  # fmt: skip
    for owner in ("", "c", heads[0].key):
        assert engine.prefixes.resume(0, longer, owner) == 0
    assert engine.prefixes.resume(0, longer, "b") == 250
    assert engine.prefixes.resume(0, longer, "a") == 200


@pytest.mark.parametrize("n_seq", [1, 3])
def test_requests_of_different_owners_share_nothing(open_engine: Open, n_seq: int) -> None:
    engine = open_engine(**ONE, n_seq=n_seq)
    ids = prompt(engine, 300)

    def ask(owner: str, reuse: bool = True) -> Client:
        return Client(service, ids, max_tokens=3, marks=(200, 299), owner=owner, reuse=reuse)

    with serving(engine) as service:
        first = ask("a").wait()
        assert ask("b").wait().last.usage.n_cached == 0
        assert [ask(one).wait().last.usage.n_cached for one in ("a", "b")] == [299, 299]
        # what is read without reuse is its owner's too, if anything of it is kept
        new, keep = prompt(engine, 100, seed=9), frozenset(range(engine.hparams.n_vocab))
        made = Client(service, new, max_tokens=3, owner="c", reuse=False, keep_after=keep).wait()
        asked = np.append(new, made.tokens)
        found = [Client(service, asked, max_tokens=1, owner=one).wait() for one in "abd"]
        assert [client.last.usage.n_cached for client in found] == [0, 0, 0]
        assert Client(service, asked, max_tokens=1, owner="c").wait().last.usage.n_cached
        with together(service):
            both = [ask(one) for one in ("e", "e", "f")]
        cached = [client.wait().last.usage.n_cached for client in both]
    assert cached == [0, 299, 0]
    assert all(client.tokens == first.tokens for client in both)


def test_nobody_waits_for_the_same_prompt_of_another_owner(open_engine: Open) -> None:
    engine = open_engine(**ONE, n_seq=3)
    ids = prompt(engine, 300)
    with serving(engine) as service:
        one, same, other = (
            Answer(Request(ids, GREEDY, text=False, owner=owner), engine.core, None, None)
            for owner in "aab"
        )
        shares = service._loop._reading._shares
        assert shares(same, one) and not shares(other, one)
        for n, waits in ((64, False), (65, True)):  # of what is shared
            begun = Request(np.append(ids[:n], ids[n] + 1), GREEDY, text=False, owner="a")
            assert shares(Answer(begun, engine.core, None, None), one) is waits


def test_a_request_that_was_moved_to_host_memory_comes_back_as_its_owners(
    open_engine: Open,
) -> None:
    engine = open_engine(cpu_reference=True, n_ctx=1024, n_seq=4, n_kv=-1)
    with serving(engine) as service:
        with together(service):
            clients = [
                Client(service, prompt(engine, 250, seed=i), max_tokens=500, owner=f"{i}")
                for i in range(4)
            ]
        texts = [client.wait().tokens for client in clients]
        service.drain()
        assert service.status().counts.preempted
    n_known = 0
    for i, tokens in enumerate(texts):
        ids = np.concatenate([prompt(engine, 250, seed=i), tokens])
        for owner in "0123":
            found = [engine.prefixes.n_common(seq, ids, owner) for seq in range(4)]
            n_known += max(found) * (owner == f"{i}")
            assert owner == f"{i}" or max(found) < 50
    assert n_known > 250
