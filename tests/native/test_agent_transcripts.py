"""Conversations as agents have them: only what changed since the nearest saved place is computed.

Clients send the whole conversation with every request: system prompt and tools, then turns. The
template drops the reasoning of earlier answers, and now and then a client edits the middle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.reading import read

from moegraph.engine import Engine
from moegraph.passes import prefixes
from moegraph.passes.prefixtree import n_common

Open = Callable[..., Engine]
ONE = {"cpu_reference": True, "n_ctx": 2048, "n_ubatch": 256}
SYSTEM, N_REQUESTS = 200, 20


class Client:
    """An agent's conversation: its prompts, and where later ones may part from them."""

    def __init__(self, seed: int, n_vocab: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.n_vocab = n_vocab
        system = np.random.default_rng(0).integers(0, n_vocab, SYSTEM).tolist()
        self.turns: list[list[int]] = [system]

    def words(self, least: int, most: int) -> list[int]:
        return self.rng.integers(0, self.n_vocab, self.rng.integers(least, most)).tolist()

    def ask(self) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the next prompt, and marks: system prompt, the last message, the answer."""
        if len(self.turns) > 4 and self.rng.random() < 0.15:  # an edit in the middle
            at = int(self.rng.integers(1, len(self.turns) - 1))
            self.turns[at] = [*self.turns[at][:3], *self.words(5, 20)]
        before = [token for turn in self.turns for token in turn]
        self.turns.append(self.words(10, 40))
        asked = [*before, *self.turns[-1]]
        return np.array([*asked, 1, 2, 3], dtype=np.int32), (SYSTEM, len(before), len(asked))

    def answer(self, reasoning: list[int], said: list[int]) -> list[int]:
        """Take an answer; return what the sequence holds of it, reasoning too."""
        self.turns.append([1, 2, *said])  # the template leaves the reasoning out
        return [*reasoning, *said]


class Saved:
    """What has been kept, by the rules alone: the longest beginning of a prompt that was."""

    def __init__(self) -> None:
        self.places: list[np.ndarray] = []

    def longest(self, ids: np.ndarray) -> int:
        known = [len(p) for p in self.places if len(p) < len(ids) and n_common(p, ids) == len(p)]
        return max(known, default=0)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note the bytes in use, and the limit, after everything that is kept."""
    seen: list[tuple[int, int]] = []
    save = prefixes.Prefixes.save

    def noted(self: prefixes.Prefixes, *args: object) -> bool:
        done = save(self, *args)
        seen.append((self.n_bytes, self._limit()))
        return done

    monkeypatch.setattr(prefixes.Prefixes, "save", noted)
    monkeypatch.setattr(prefixes, "_WORTH", 1)
    return seen


def converse(engine: Engine, alone: Engine, n_clients: int, saved: Saved | None) -> list[int]:
    """Have agents talk in turn; return how many tokens were computed in each request.

    saved: None if places may have been dropped.
    """
    clients = [Client(seed, engine.hparams.n_vocab) for seed in range(n_clients)]
    n_seq, computed = engine.state.n_seq, []
    used = list(range(n_seq))
    for turn in range(N_REQUESTS):
        client = clients[turn % n_clients]
        ids, marks = client.ask()
        seq = engine.prefixes.choose(ids, used)
        used = [*(other for other in used if other != seq), seq]
        engine.prefixes.free(8, [other for other in used if other != seq])
        logits, n = read(engine, seq, ids, *marks)
        if saved is not None:
            assert n >= saved.longest(ids), turn
            saved.places += [ids[:mark] for mark in marks]
        if turn % 7 == 0:
            alone.reset()
            wanted = alone.prefill(ids).require_logits()[-1]
            np.testing.assert_array_equal(logits, wanted)
        computed.append(len(ids) - n)
        held = client.answer(client.words(5, 30), client.words(5, 15))
        engine.prefill(held, seq)
        engine.state.pool.check()
    return computed


@pytest.mark.parametrize(("n_seq", "n_clients"), [(1, 1), (2, 3)])
def test_agents_compute_what_changed_and_no_more(
    open_engine: Open, limits: list[tuple[int, int]], n_seq: int, n_clients: int
) -> None:
    engine = open_engine(**ONE, n_seq=n_seq, n_kv=-1 if n_seq == 1 else 4096, cache_ram=256)
    computed = converse(engine, open_engine(**ONE), n_clients, Saved())
    # but for edits, a request computes its message, the answer before it, and a few marks
    assert np.median(computed) < 70 and len(limits) > 30
    assert all(n_bytes <= limit for n_bytes, limit in limits)


def test_a_small_cache_keeps_to_its_limit_and_stays_right(
    open_engine: Open, limits: list[tuple[int, int]]
) -> None:
    engine = open_engine(**ONE, n_seq=2, n_kv=4096, cache_ram=2)
    computed = converse(engine, open_engine(**ONE), 3, None)
    assert all(n_bytes <= limit == 2 << 20 for n_bytes, limit in limits)
    assert max(n_bytes for n_bytes, _ in limits) > 1 << 20
    assert np.median(computed) < 250
