"""The expert cache under any order of calls, beside a model that knows which bytes are where.

A device that fetches by itself is part of the model: it has the tables and victim_lists that it was
sent last, and writes over slots before the host knows of it.
"""

from __future__ import annotations

import numpy as np
from helpers.cache_rules import check_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moegraph.experts.cache import ExpertCache
from moegraph.experts.policy import POLICIES, parse_policy
from moegraph.experts.slots import count


class CacheMachine(RuleBasedStateMachine):
    """Steps, background uploads that end late or fail, refills, tables taken at any time.

    Rows whose experts a device fetches, and such that nobody hears the end of.
    """

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        n_slots=st.lists(st.integers(0, 12), min_size=2, max_size=3),
        is_wide=st.booleans(),
    )
    def start(self, name: str, n_slots: list[int], is_wide: bool) -> None:
        self.n_expert, self.n_used = (40, 20) if is_wide else (12, 3)
        n_slots = [n * self.n_expert // 12 for n in n_slots]
        self.cache = ExpertCache(self.n_expert, n_slots, parse_policy(name), self.n_used)
        self.slots = n_slots
        # what each slot really holds, and what is on its way into it
        self.bytes = [list(range(n)) if n == self.n_expert else [-1] * n for n in n_slots]
        self.coming: dict[tuple[int, int], int] = {}
        self.used: set[tuple[int, int]] = set()
        self.given: set[tuple[int, int]] = set()  # (layer, slot) in this step
        self.device = self.cache.tables.copy()
        self.victim_lists: list[list[tuple[int, int]]] = [[] for _ in n_slots]
        self.n_ids = self.n_admitted = 0
        self.n_listed = self.n_used

    def layer(self, at: int) -> int:
        return at % len(self.slots)

    @rule()
    def begin_pass(self) -> None:
        self.cache.begin_pass()
        self.used.clear()
        self.given.clear()

    @rule(at=st.integers(0, 2))
    def preload(self, at: int) -> None:
        for expert, slot in self.cache.layers[self.layer(at)].preload([11, 5, 2, 7]):
            assert self.bytes[self.layer(at)][slot] == -1
            self.bytes[self.layer(at)][slot] = expert

    @rule(at=st.integers(0, 2), ids=st.lists(st.integers(0, 11), min_size=1, max_size=4),
          background=st.booleans())  # fmt: skip
    def route(self, at: int, ids: list[int], background: bool) -> None:
        self.choose(self.layer(at), [7 * e % self.n_expert for e in ids], background)

    def choose(self, il: int, ids: list[int], background: bool) -> None:
        table = self.cache.tables[il].copy()
        missing = self.cache.layers[il].access(ids)
        self.n_ids += len(ids)
        assert missing == [e for e in dict.fromkeys(ids) if table[e] < 0]
        for expert in missing:
            lowest = self.lowest_score(il, ids)
            layer = self.cache.layers[il]
            slot = (layer.reserve_slot if background else layer.admit)(expert, ids)
            if slot is None:
                continue
            self.given.add((il, slot))
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
        return self.cache.layers[il].policy.score[expert]

    def lowest_score(self, il: int, ids: list[int]) -> float:
        may = [e for e in self.bytes[il]
               if e >= 0 and e not in ids and (il, e) not in self.used]  # fmt: skip
        return min((self.score(il, e) for e in may), default=0.0)

    @rule(at=st.integers(0, 2), seed=st.integers(0, 99), n_rows=st.integers(1, 5))
    def batch(self, at: int, seed: int, n_rows: int) -> None:
        ids = np.stack([self.row(seed + i) for i in range(n_rows)]).astype(np.int32)
        layer = self.cache.layers[self.layer(at)]
        layer.access_batch(ids, count(layer.il, ids, layer.n_expert))
        self.n_ids += ids.size

    def row(self, seed: int) -> list[int]:
        """Return n_expert_used different experts; every other seed keeps to half of them."""
        n = max(self.n_expert // 2, self.n_used) if seed % 2 else self.n_expert
        return np.random.default_rng(seed).permutation(n)[: self.n_used].tolist()

    @rule(seed=st.integers(0, 999), fails_at=st.integers(0, 9), n_late=st.integers(0, 2),
          n_rows=st.sampled_from([1, 1, 2, 5]))  # fmt: skip
    def rows_that_fetch(self, seed: int, fails_at: int, n_late: int, n_rows: int) -> None:
        """One pass over all layers; from fails_at on nothing runs, and n_late before are unseen."""
        while self.coming:
            self.upload_ends(0, True)
        n_ids = n_rows * self.n_used
        for il, layer in enumerate(self.cache.layers):
            if layer.can_fetch and len(layer.victims) < min(n_ids, layer.n_slots):
                self.cache.dirty.add(il)
        self.n_listed = n_ids
        self.take_tables()
        self.begin_pass()
        layers = range(len(self.slots))
        rows = {
            il: [e for i in range(n_rows) for e in self.row(seed + 31 * il + i)] for il in layers
        }
        victims = [il for il in layers if self.cache.layers[il].can_fetch]
        fetched = {il: self.fetch(il, rows[il]) for il in victims if il < fails_at}
        self.cache.begin_fetch(fetched, n_ids)
        for il in layers[: fails_at if fails_at >= len(layers) else max(0, fails_at - n_late)]:
            if il in fetched:
                self.note(il, rows[il], fetched.pop(il))
            else:
                self.choose(il, rows[il], False)
        assert set(self.cache._journal.in_flight) == set(fetched)
        if fetched or fails_at < len(layers):
            lost = {(il, slot) for il in fetched for slot, _ in self.victim_lists[il][:n_ids]}
            self.step_fails(lost)

    @rule()
    def step_failed(self) -> None:
        self.step_fails(set())

    def step_fails(self, lost: set[tuple[int, int]]) -> None:
        """Nothing that this step gave away, that was loading or in `lost` is there any more."""
        self.cache.rollback()
        for il, slot in lost | self.given | {(il, s) for (il, _), s in self.coming.items()}:
            self.bytes[il][slot] = -1
        self.coming.clear()
        self.used.clear()
        self.given.clear()

    def fetch(self, il: int, ids: list[int]) -> list[int]:
        """Do what the device does, with what it was sent; return what it fetched."""
        held, table = self.bytes[il], self.device[il].copy()
        places = [slot for slot, holds in self.victim_lists[il][: len(ids)] if holds not in ids]
        missing = list(dict.fromkeys(e for e in ids if table[e] < 0))
        for expert, place in zip(missing, places):
            table[expert] = place
            held[place] = expert
        computed = [e for e in ids if table[e] >= 0]
        assert [held[table[e]] for e in computed] == computed, "the device computed with others"
        layer = self.cache.layers[il]
        if layer.n_slots >= len(set(ids)):
            assert len(places) >= len(missing), "there is a slot for each"
        return missing[: len(places)]

    def note(self, il: int, ids: list[int], fetched: list[int]) -> None:
        """Tell the cache, which finds the same by itself."""
        layer = self.cache.layers[il]
        missing = layer.access(ids)
        self.n_ids += len(ids)
        n_fetched = layer.commit_fetched(missing, ids)
        assert missing[:n_fetched] == fetched
        self.n_admitted += n_fetched
        if il in self.cache.dirty:
            self.write(il)  # at once, while the device goes on

    @precondition(lambda self: self.coming)
    @rule(at=st.integers(0, 50), arrives=st.booleans())
    def upload_ends(self, at: int, arrives: bool) -> None:
        il, expert = sorted(self.coming)[at % len(self.coming)]
        if not arrives:
            self.step_fails(set())
            return
        slot = self.coming.pop((il, expert))
        self.cache.layers[il].mark_resident(expert)
        self.n_admitted += 1
        self.bytes[il][slot] = expert

    @rule()
    def take_tables(self) -> None:
        for il in list(self.cache.dirty):
            self.write(il)
        assert (self.device == self.cache.tables).all(), "a change was not marked dirty"
        for held, victims in zip(self.bytes, self.victim_lists):
            assert [held[slot] for slot, _ in victims] == [e for _, e in victims]

    def write(self, il: int) -> None:
        self.device[il] = self.cache.tables[il]
        if self.cache.layers[il].can_fetch:
            self.victim_lists[il] = list(self.cache.layers[il].plan_victims(self.n_listed))
            self.check_victims(il)
        self.cache.dirty.discard(il)

    def check_victims(self, il: int) -> None:
        """Free slots come first, then the lowest scores; there is room for a row."""
        held, victims = self.bytes[il], self.victim_lists[il]
        slots = [slot for slot, _ in victims]
        assert len(set(slots)) == len(slots)
        n_loading = sum(layer == il for layer, _ in self.coming)
        assert len(slots) >= min(self.n_listed, self.slots[il] - n_loading)
        n_free = sum(expert == -1 for expert in held)
        assert [e < 0 for _, e in victims] == [at < n_free for at in range(len(victims))]
        scores = [self.score(il, e) for _, e in victims if e >= 0]
        rest = [self.score(il, e) for slot, e in enumerate(held)
                if e >= 0 and slot not in slots]  # fmt: skip
        assert scores == sorted(scores)
        assert not rest or not scores or scores[-1] <= min(rest), "a better victim was there"

    @invariant()
    def tables_name_the_bytes_that_are_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_cache(self.cache)
        for il, held in enumerate(self.bytes):
            for expert, slot in enumerate(self.cache.tables[il]):
                assert (slot >= 0) == (expert in held)
                assert slot < 0 or held[slot] == expert
        stats = self.cache.stats
        assert stats.hits.sum() + stats.misses.sum() == self.n_ids
        assert stats.admitted.sum() == self.n_admitted


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
