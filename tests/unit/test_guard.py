"""The guard over the expert cache, on a machine that is made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from moegraph.experts.guard import FIRST_LOOK, CacheGuard, Counters

CHOSEN = 320  # a token's choices: 40 layers of 8


@dataclass
class Machine:
    """Decodes tokens: some misses a token, each moved or not, each with its price.

    hit_rate, frozen: share of the choices that hit, with the cache active and bypassed.
    """

    hit_rate: float
    frozen: float
    base_s: float = 5e-3
    cold_s: float = 100e-6
    move_s: float = 40e-6
    noise: Callable[[int], float] = lambda token: 1.0
    decoded_s: float = 0.0
    counters: Counters = field(default_factory=lambda: Counters(0, 0, 0))
    switches: int = 0

    def guard(self) -> CacheGuard:
        return CacheGuard(lambda: self.counters, self.move_s)

    def decode(self, guard: CacheGuard, n_tokens: int) -> None:
        for token in range(n_tokens):
            before = guard.bypassed
            guard.begin_pass(True)
            rate = self.frozen if guard.bypassed else self.hit_rate
            hits = round(rate * CHOSEN)
            missing, c = CHOSEN - hits, self.counters
            moved = 0 if guard.bypassed else missing
            self.counters = Counters(c.chosen + CHOSEN, c.hits + hits, c.moved + moved)
            cost = missing * self.cold_s + moved * self.move_s
            seconds = (self.base_s + cost) * self.noise(token)
            self.decoded_s += seconds
            guard.end_pass(seconds)
            self.switches += guard.bypassed != before


def test_a_cache_that_pays_is_never_bypassed_and_hardly_probed() -> None:
    machine = Machine(hit_rate=0.7, frozen=0.5)
    guard = machine.guard()
    machine.decode(guard, 10_000)
    assert not guard.bypassed and not guard.messages and guard.n_probes > 0
    assert guard.report()["n_bypassed_tokens"] <= 0.02 * 10_000


def test_a_cache_that_hardly_moves_anything_is_not_even_probed() -> None:
    machine = Machine(hit_rate=0.99, frozen=0.9)
    guard = machine.guard()
    machine.decode(guard, 4_000)
    assert guard.report() == {"bypassed": False, "n_probes": 0, "n_bypassed_tokens": 0}
    machine.decode(guard, 4_000)
    assert guard.n_probes == 1 and not guard.messages, "copies may have become slow since the start"


def test_a_cache_that_never_hits_is_bypassed_soon_and_said_once() -> None:
    machine = Machine(hit_rate=0.0, frozen=0.0, move_s=0.0)
    guard = machine.guard()
    machine.decode(guard, 2 * FIRST_LOOK)
    assert guard.bypassed
    machine.decode(guard, 20_000)
    assert guard.report()["bypassed"]
    (line,) = guard.messages
    assert "hits nothing" in line and "bypassed" in line and "ms a token" in line


def test_uploads_that_cost_more_than_they_save_are_stopped() -> None:
    machine = Machine(hit_rate=0.5, frozen=0.45, move_s=300e-6)
    guard = machine.guard()
    machine.decode(guard, 5_000)
    assert guard.report()["bypassed"] and "costs more than it saves" in guard.messages[0]
    assert guard.report()["n_bypassed_tokens"] > 4_500


def test_a_cache_that_begins_to_pay_comes_back() -> None:
    machine = Machine(hit_rate=0.5, frozen=0.45, move_s=300e-6)
    guard = machine.guard()
    machine.decode(guard, 1_000)
    assert guard.report()["bypassed"]
    machine.move_s, machine.hit_rate = 10e-6, 0.9
    machine.decode(guard, 10_000)
    assert not guard.report()["bypassed"] and "active again" in guard.messages[-1]


@pytest.mark.parametrize("seed", range(8))
def test_equal_ways_with_noise_do_not_alternate(seed: int) -> None:
    rng = random.Random(seed)
    noise = [rng.lognormvariate(0.0, 0.3) * (30 if rng.random() < 0.02 else 1) for _ in range(4096)]
    machine = Machine(
        hit_rate=0.5, frozen=0.5 - 0.2 * 0.4, move_s=40e-6, cold_s=250e-6,
        noise=lambda token: noise[token % 4096],
    )  # fmt: skip
    guard = machine.guard()
    machine.decode(guard, 40_000)
    # a probe is two switches; intervals double up to 4096
    assert machine.switches <= 2 * (7 + 40_000 // 4096 + 2)
    assert len(guard.messages) <= 12


def test_a_pause_of_the_reader_decides_nothing() -> None:
    """Somebody scrolls back: two tokens of each window take a minute."""
    paused = Machine(
        hit_rate=0.5, frozen=0.2, noise=lambda token: 10_000.0 if token % 16 < 1 else 1.0
    )
    guard = paused.guard()
    paused.decode(guard, 5_000)
    assert not guard.report()["bypassed"]


def growing(hit_rate: float, frozen: float, move_s: float) -> Machine:
    """Return a machine whose tokens take eleven times as long after 40,000 of them."""
    return Machine(hit_rate, frozen, move_s=move_s, noise=lambda token: 1.0 + token / 4000)


def test_a_context_that_grows_does_not_bring_back_a_cache_that_does_not_pay() -> None:
    machine = growing(0.7, 0.69, 60e-6)
    guard = machine.guard()
    machine.decode(guard, 40_000)
    assert guard.report()["bypassed"] and len(guard.messages) == 1
    assert 40_000 - guard.n_bypassed_tokens <= 2 * FIRST_LOOK + 0.02 * 40_000
    machine.frozen, machine.noise = 0.1, lambda token: 11.0
    machine.decode(guard, 100)
    assert not guard.report()["bypassed"], "slots that go stale are noticed as soon as ever"
