"""The expert cache under any order of calls, beside a model that knows which bytes are where."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moegraph.experts.cache import ExpertCache
from moegraph.experts.policy import POLICIES, Adaptive, parse_policy


class CacheMachine(RuleBasedStateMachine):
    """Steps, background uploads that end late or fail, refills, tables taken at any time."""

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        n_slots=st.lists(st.integers(0, 12), min_size=2, max_size=3),
        static=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(self, name: str, n_slots: list[int], static: float) -> None:
        policy = Adaptive(static) if name == "adaptive" else parse_policy(name)
        self.cache = ExpertCache(12, n_slots, policy, 3)
        self.slots = n_slots
        # what each slot really holds, and what is on its way into it
        self.bytes = [list(range(12)) if n == 12 else [-1] * n for n in n_slots]
        self.coming: dict[tuple[int, int], int] = {}
        self.used: set[tuple[int, int]] = set()
        self.device = self.cache.tables.copy()
        self.n_ids = self.n_admitted = 0

    def layer(self, at: int) -> int:
        return at % len(self.slots)

    @rule()
    def begin_step(self) -> None:
        self.cache.begin_step()
        self.used.clear()

    @rule(at=st.integers(0, 2))
    def preload(self, at: int) -> None:
        for expert, slot in self.cache.preload(self.layer(at), [11, 5, 2, 7]):
            assert self.bytes[self.layer(at)][slot] == -1
            self.bytes[self.layer(at)][slot] = expert

    @rule(at=st.integers(0, 2), ids=st.lists(st.integers(0, 11), min_size=1, max_size=4),
          background=st.booleans())  # fmt: skip
    def route(self, at: int, ids: list[int], background: bool) -> None:
        il = self.layer(at)
        table = self.cache.tables[il].copy()
        missing = self.cache.look(il, ids)
        self.n_ids += len(ids)
        assert missing == [e for e in dict.fromkeys(ids) if table[e] < 0]
        for expert in missing:
            lowest = self.lowest_score(il, ids)
            call = self.cache.reserve if background else self.cache.admit
            slot = call(il, expert, ids)
            if slot is None:
                continue
            before = self.bytes[il][slot]
            assert before not in ids, "a victim was in the working set"
            if before >= 0:
                assert self.score(il, before) == lowest, "a better victim was there"
            assert (il, slot) not in self.coming.values(), "a loading slot was given away"
            assert (il, before) not in self.used, "a victim was admitted in this step"
            if background:
                self.bytes[il][slot] = -2
                self.coming[il, expert] = slot
            else:
                self.bytes[il][slot] = expert
                self.used.add((il, expert))
                self.n_admitted += 1

    def score(self, il: int, expert: int) -> float:
        return self.cache._layers[il].policy.score[expert]

    def lowest_score(self, il: int, ids: list[int]) -> float:
        n_static = self.cache._layers[il].policy.n_static
        may = [e for e in self.bytes[il][n_static:]
               if e >= 0 and e not in ids and (il, e) not in self.used]  # fmt: skip
        return min((self.score(il, e) for e in may), default=0.0)

    @precondition(lambda self: self.coming)
    @rule(at=st.integers(0, 50), arrives=st.booleans())
    def upload_ends(self, at: int, arrives: bool) -> None:
        il, expert = sorted(self.coming)[at % len(self.coming)]
        slot = self.coming.pop((il, expert))
        if arrives:
            self.cache.publish(il, expert)
            self.n_admitted += 1
        else:
            self.cache.abandon(il, expert)
        self.bytes[il][slot] = expert if arrives else -1

    @rule()
    def take_tables(self) -> None:
        for il in self.cache.dirty:
            self.device[il] = self.cache.tables[il]
        self.cache.dirty.clear()
        assert (self.device == self.cache.tables).all(), "a change was not marked dirty"

    @invariant()
    def tables_name_the_bytes_that_are_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for il, held in enumerate(self.bytes):
            for expert, slot in enumerate(self.cache.tables[il]):
                assert (slot >= 0) == (expert in held)
                assert slot < 0 or held[slot] == expert
        stats = self.cache.stats
        assert stats.hits.sum() + stats.misses.sum() == self.n_ids == np.sum(self.cache.counts)
        assert stats.admitted.sum() == self.n_admitted


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
