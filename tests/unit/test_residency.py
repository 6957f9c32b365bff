"""The coordinator of a pass alone, beside a device that is made up and holds what it was sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from helpers.cache_rules import check_cache
from helpers.interrupts import interrupted
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moegraph.experts import cost
from moegraph.experts.cache import ExpertCache
from moegraph.experts.cost import MissSplit, MissWays
from moegraph.experts.policy import POLICIES, Lfu, Lru, Policy
from moegraph.experts.residency import PassTerms, Remedy, Residency
from moegraph.experts.slots import Ranking
from moegraph.kinds import MAX_FETCH_ROWS, Kind

N_EXPERT, N_USED = 16, 4
EXPERTS = "moegraph/experts"
Ids = npt.NDArray[np.int32]


def ways(on_cpu: bool = False, fetches: bool = False) -> MissWays:
    limits = (math.inf if fetches else -1.0,) * MAX_FETCH_ROWS
    return MissWays(MissSplit.fixed(N_USED, on_cpu), on_cpu, limits)


def residency_of(
    n_slots: list[int], chosen: MissWays | None = None, policy: Policy | None = None, **more: Any
) -> Residency:
    """Return a residency whose slots hold the experts of the lowest ids."""
    cache = ExpertCache(N_EXPERT, n_slots, policy or Lru(), N_USED)
    for layer in cache.layers:
        layer.preload()
    return Residency(cache, chosen or ways(), **more)


def ids(*experts: int) -> Ids:
    return np.array(experts, dtype=np.int32)


def rows(*chosen: list[int]) -> Ids:
    return np.array(chosen, dtype=np.int32).reshape(-1)


def token(residency: Residency, *experts: int) -> Remedy | None:
    """Decode one row that chooses these experts in layer 0; return what happens to the missing."""
    residency.begin_pass(Kind.DECODE, 1)
    remedy = residency.routed(0, ids(*experts))
    residency.results_arrived()
    return remedy


class Device:
    """Holds the bytes that it was sent, and checks that every chosen expert is computed once.

    bytes [n_layer][n_slots]: the expert in each slot; -1 none, -2 a mixture.
    """

    def __init__(self, residency: Residency) -> None:
        self.residency, self.seconds = residency, 1.0
        self.bytes = [list(layer.owner) for layer in residency.cache.layers]
        self.tables = residency.cache.tables.copy()
        self.victims: dict[int, list[tuple[int, int]]] = {}
        self.under_way: list[tuple[int, int, int]] = []  # layer, expert, slot
        self.unread: dict[int, list[int]] = {}  # what graphs fetched, and the host does not know

    def steps(self, kind: Kind, chosen: list[list[list[int]]]) -> Iterator[None]:
        """Run a pass of rows that choose [n_layer][n_tokens] ids; yield where it may fail."""
        residency, n_tokens = self.residency, len(chosen[0])
        terms = residency.begin_pass(kind, n_tokens)
        yield
        self.begin(terms)
        fetch_layers = terms.mode.fetch_layers
        residency.begin_fetch(fetch_layers)
        yield
        for il in fetch_layers:
            seen = [expert for row in chosen[il] for expert in row]
            self.unread[il] = self.fetch(il, seen, il in terms.mode.short_layers)
        yield
        for il, choice in enumerate(chosen):
            ids = np.array(choice, dtype=np.int32).reshape(-1)
            if il in fetch_layers:
                there = {e for e in set(ids.tolist()) if self.tables[il, e] >= 0}
                done = residency.fetched(il, ids)
                assert done.experts == self.unread.pop(il)
                rest = done.rest.staged if done.rest else []
                assert sorted([*there, *done.experts, *rest]) == sorted(set(ids.tolist()))
                assert not rest or il in terms.mode.short_layers
                if done.row:
                    self.write(done.row)
            else:
                yield from self.complete(il, ids, residency.routed(il, ids))
            yield
        residency.results_arrived(self.seconds)

    def begin(self, terms: PassTerms) -> None:
        assert terms.waits == bool(self.under_way)
        for il, expert, slot in self.under_way:
            self.bytes[il][slot] = expert
        self.under_way.clear()
        for row in terms.rows:
            self.write(row)

    def write(self, row: Any) -> None:
        il, table, victims = row
        self.tables[il] = table
        if victims is not None:
            assert [self.bytes[il][slot] for slot, _ in victims] == [e for _, e in victims]
            self.victims[il] = list(victims)

    def fetch(self, il: int, chosen: list[int], is_short: bool) -> list[int]:
        """Do what a graph does, with the tables that it has; return what it fetched."""
        held, table = self.bytes[il], self.tables[il].copy()
        layer = self.residency.cache.layers[il]
        listed = {e for _, e in self.victims[il] if e >= 0}
        first = [e for _, e in self.victims[il][: 2 * N_USED] if e >= 0]
        score = layer.policy.score
        others = [score[e] for e in layer.resident - listed]
        lowest = min(others, default=np.inf)
        assert all(score[e] <= lowest for e in first), "the list is old"
        victims = self.victims[il][: len(chosen)]
        usable = [slot for slot, holds in victims if holds not in chosen]
        missing = list(dict.fromkeys(expert for expert in chosen if table[expert] < 0))
        assert is_short or len(usable) >= len(missing)
        for expert, slot in zip(missing, usable):
            table[expert] = slot
            held[slot] = expert
        computed = [expert for expert in chosen if table[expert] >= 0]
        assert [held[table[expert]] for expert in computed] == computed
        return missing[: len(usable)]

    def complete(self, il: int, ids: Ids, remedy: Remedy | None) -> Iterator[None]:
        """Compute a layer whose missing experts the host handles."""
        here = {e for e in set(ids.tolist()) if self.tables[il, e] >= 0}
        assert all(self.bytes[il][self.tables[il, e]] == e for e in here)
        remedy = remedy or Remedy([], [], [], [])
        added = [e for e, _ in remedy.admitted] + remedy.staged + remedy.on_cpu
        assert sorted([*here, *added]) == sorted(set(ids.tolist())), "one is missing or twice there"
        assert {e for e, _ in remedy.promoted} <= set(remedy.on_cpu)
        for pairs in (remedy.admitted, remedy.promoted):
            self.spoil(il, pairs)
        yield
        self.upload(il, remedy.admitted)
        self.under_way += [(il, expert, slot) for expert, slot in remedy.promoted]

    def spoil(self, il: int, pairs: list[tuple[int, int]]) -> None:
        for _, slot in pairs:
            self.bytes[il][slot] = -2

    def upload(self, il: int, pairs: list[tuple[int, int]]) -> None:
        for expert, slot in pairs:
            self.bytes[il][slot] = expert

    def roll_back(self) -> None:
        """Wait for the device and clean up after a failure."""
        for il, expert, slot in self.under_way:
            self.bytes[il][slot] = expert
        self.under_way.clear()
        self.residency.rollback()
        self.unread.clear()
        # what nobody has a claim on any more
        for layer, held in zip(self.residency.cache.layers, self.bytes):
            for slot, owner in enumerate(layer.owner):
                held[slot] = held[slot] if owner >= 0 else -1

    def check(self) -> None:
        """Check that what the tables say is there is there."""
        cache = self.residency.cache
        check_cache(cache)
        for il, held in enumerate(self.bytes):
            for expert in np.flatnonzero(cache.tables[il] >= 0).tolist():
                assert held[cache.tables[il, expert]] == expert
            if il not in cache.dirty:
                assert (self.tables[il] == cache.tables[il]).all(), "a change was not sent"


class ResidencyMachine(RuleBasedStateMachine):
    """Passes of all kinds and widths, of which any may fail anywhere."""

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        n_slots=st.lists(st.integers(0, N_EXPERT), min_size=2, max_size=3),
        fetches=st.booleans(),
        on_cpu=st.sampled_from(["none", "some", "all"]),
    )
    def start(self, name: str, n_slots: list[int], fetches: bool, on_cpu: str) -> None:
        seconds = [float(n) for n in range(N_USED + 1)]
        split = MissSplit(seconds, seconds, 1.0)
        chosen = ways(on_cpu == "all", fetches)
        if on_cpu == "some":
            # what passes of several rows miss lies on both sides of the limit
            limits = (4.0 if fetches else -1.0,) * 32
            chosen = replace(chosen, split=split, cpu=True, fetch_limits=limits)
        self.residency = residency_of(
            n_slots, chosen, POLICIES[name](), fetchable=range(len(n_slots))
        )
        self.device = Device(self.residency)
        # the clock says something else in each pass
        self.patches = patch.multiple(cost, _JUDGED=1, _SETTLING=0, _FIRST_PRICE=0, _LEAST_PRICE=0)
        self.patches.start()

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.patches.stop()

    @rule(
        kind=st.sampled_from(Kind),
        n_tokens=st.sampled_from([1, 1, 1, 2, 5, 9, 20, 40]),
        seed=st.integers(0, 10**6),
        fails_at=st.integers(0, 40),
    )
    def run(self, kind: Kind, n_tokens: int, seed: int, fails_at: int) -> None:
        rng = np.random.default_rng(seed)
        chosen = [
            [rng.permutation(N_EXPERT)[:N_USED].tolist() for _ in range(n_tokens)]
            for _ in self.residency.cache.layers
        ]
        before, self.device.seconds = self.residency.cache.tables.copy(), rng.uniform(1, 2)
        for at, _ in enumerate(self.device.steps(kind, chosen)):
            if at == fails_at:
                self.device.roll_back()
                return
        if kind is Kind.PREFILL and n_tokens > 32:
            # a prompt moves nothing; what was promoted before it has arrived
            assert ((self.residency.cache.tables == before) | (before < 0)).all()

    @invariant()
    def what_is_said_to_be_there_is_there(self) -> None:
        if hasattr(self, "device"):
            self.device.check()


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("way", ["stream", "cpu", "fetch"])
def test_a_pass_interrupted_before_any_line_is_undone(way: str) -> None:
    """Ctrl-C in any line of the coordinator, then a pass that computes with the right experts."""
    chosen = [[[0, 9, 10, 11]], [[3, 12, 13, 14]]]
    for line in range(0, 2000, 3):
        residency = residency_of([6, 7], ways(way == "cpu", way == "fetch"), fetchable=range(2))
        device = Device(residency)
        for _ in device.steps(Kind.PREFILL, [[[5, 6, 7, 8]] * 40] * 2):
            pass
        for _ in device.steps(Kind.DECODE, [[[1, 2, 8, 9]]] * 2):
            pass
        pass_ = device.steps(Kind.DECODE, chosen)
        came = interrupted(line, lambda pass_=pass_: list(pass_), EXPERTS)
        device.roll_back()
        device.check()
        for _ in device.steps(Kind.DECODE, chosen):
            pass
        device.check()
        if not came:
            assert line > 60
            return
    raise AssertionError("it did not come to an end")


@pytest.mark.parametrize("fetches", [False, True])
def test_what_passes_do_follows_from_their_kind_and_size(fetches: bool) -> None:
    residency = residency_of(
        [8, 8, N_EXPERT, 0, 2],
        ways(on_cpu=True, fetches=fetches),
        fetchable=range(5),
    )
    able = frozenset({0, 1}) if fetches else frozenset()

    def mode(kind: Kind, n_tokens: int) -> tuple[frozenset[int], int, bool, bool]:
        found = residency.miss_mode(kind, n_tokens)
        assert residency.begin_pass(kind, n_tokens).mode == found, "decided once"
        assert found.short_layers <= found.fetch_layers
        n_short = len(found.short_layers)
        return found.fetch_layers, n_short, found.admits, found.cpu

    none: frozenset[int] = frozenset()
    assert mode(Kind.DECODE, 1) == (able, 0, True, True)
    assert mode(Kind.DECODE, 2) == (able, 0, True, True), "eight slots for eight ids"
    assert mode(Kind.DECODE, 3) == (able, len(able), True, True)
    assert mode(Kind.DECODE, 32) == (able, len(able), True, True)
    assert mode(Kind.DECODE, 33) == (none, 0, True, False), "33 sequences, no prompt"
    assert mode(Kind.VERIFY, 64) == (none, 0, True, False), "drafts are no prompt"
    assert mode(Kind.VERIFY, 1) == (able, 0, True, True)
    assert mode(Kind.PREFILL, 33) == (none, 0, False, False)


def test_of_many_missing_experts_the_unwanted_ones_cost_no_search(monkeypatch) -> None:
    """The host decides while a layer waits: 65 us of 112 were searches, at 16 rows of a 35B."""
    searches: list[int] = []
    lowest = Ranking.lowest
    monkeypatch.setattr(Ranking, "lowest", lambda *args: [searches.append(1), *lowest(*args)][1:])
    chosen = replace(ways(), cpu=True, split=MissSplit([0.0, 1.0], [0.0, 1.0]))
    residency = residency_of([6], chosen, Lfu())
    token(residency, 0, 1, 2, 3)
    before = len(searches)
    residency.begin_pass(Kind.VERIFY, 4)
    remedy = residency.routed(0, ids(*range(16)))
    assert remedy and len(remedy.staged) + len(remedy.on_cpu) == 10 and len(remedy.on_cpu) > 3
    assert not remedy.admitted and not remedy.promoted
    assert len(searches) - before <= 6 and residency.cache.stats.declined.sum() == 10


def test_what_a_prompt_has_on_the_device_gets_slots_if_the_policy_prefers_it() -> None:
    residency = residency_of([6, 6, N_EXPERT], ways(fetches=True), Lfu(hysteresis=1), fetchable=[1])
    residency.begin_pass(Kind.PREFILL, 40)
    for il in (0, 1, 2):
        residency.routed(il, ids(*[9, 8, 7, 1] * 40))
    slots = [residency.preferred(il, [9, 8, 7, 2]) for il in (0, 1, 2)]
    assert [list(found) for found in slots] == [[7, 8, 9], [7, 8, 9], []]
    residency.keep(0, [(7, slots[0][7]), (9, slots[0][9])])
    layer = residency.cache.layers[0]
    assert layer.resident >= {7, 9, 1} and residency.n_kept == 2
    assert list(residency.preferred(0, range(12))) == [8] and not residency.preferred(0, [7])


def test_a_prompt_that_fails_leaves_empty_slots_where_it_kept_experts() -> None:
    residency = residency_of([6], policy=Lfu(hysteresis=1))
    residency.begin_pass(Kind.PREFILL, 40)
    residency.routed(0, ids(*[9, 8, 7, 1] * 40))
    pairs = list(residency.preferred(0, [9, 8]).items())
    slots = [slot for _, slot in pairs]
    residency.keep(0, pairs)
    residency.rollback()
    layer = residency.cache.layers[0]
    assert [layer.owner[slot] for slot in slots] == [-1, -1] and len(layer.resident) == 4
    check_cache(residency.cache)
