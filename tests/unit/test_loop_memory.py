"""Groups in flight, slots and pages of requests, with passes that are scripted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moegraph.errors import PoolFull
from moegraph.loop.answers import Answers, Swapping
from moegraph.loop.groups import Groups
from moegraph.resident.layout import PAGE


def answer(slot: int = -1, n_ids: int = 1, **more: Any) -> Any:
    """Stand for a request; its first token is its slot."""
    return SimpleNamespace(**{
        "slot": slot, "ids": [0] * n_ids, "swapped": None, "number": 0, "cancel": None,
        "is_over": False, "is_drawn": False, "late": None, "wants_logits": False,
        "generated": SimpleNamespace(tokens=[slot], anchor=slot, is_full=False),
        "request": SimpleNamespace(reuse=True),
        "choice": SimpleNamespace(greedy=True, prepare=lambda tree: None), **more,
    })  # fmt: skip


class Passes:
    """Notes what is asked of passes of groups."""

    most = 2

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.room = SimpleNamespace(n_free_pages=4, pages_for=lambda slot, n: n)

    def submit_group(
        self,
        rows: np.ndarray,
        slots: list[int],
        greedy: bool,
        cancels: Any,
        draws: Any,
        keeps: bool,
    ) -> None:
        self.log.append(slots)
        self.keeps = keeps

    def collect_group(self) -> None:
        self.log.append("collect")


def groups_of(passes: Passes, draw: Any) -> Groups:
    answers = SimpleNamespace(tell=lambda: None, guard=lambda one, work: work(), n_failures=0)
    return Groups(passes, answers, lambda batch: (True, None), draw)  # type: ignore[arg-type]


def drawn(batch: Any, output: Any) -> None:
    for one in batch:
        one.generated.tokens.append(0)


def test_each_call_gives_every_request_a_token_and_leaves_the_next_rows_in_flight() -> None:
    passes, batch = Passes(), [answer(slot) for slot in range(5)]
    groups = groups_of(passes, drawn)
    for n in (1, 2, 3):
        groups.decode(batch, 2)
        assert [len(one.generated.tokens) for one in batch] == [1 + n] * 5
    assert passes.log[:4] == [[0, 1, 2], [3, 4], "collect", [0, 1, 2]] and groups.is_busy
    assert [groups.has_room(batch[:n]) for n in (2, 3)] == [True, False], "two rows each"
    groups.finish_passes()
    assert not groups.is_busy and passes.log.count("collect") == 8


@pytest.mark.parametrize("end", [
    {"is_over": True}, {"is_drawn": True}, {"late": True},
    {"generated": SimpleNamespace(tokens=[1], anchor=1, is_full=True)},
], ids=lambda end: next(iter(end)))  # fmt: skip
def test_a_request_that_does_not_go_on_gets_no_row(end: dict[str, Any]) -> None:
    passes, batch = Passes(), [answer(0), answer(1, **end), answer(2)]
    groups_of(passes, drawn).decode(batch, 1)
    assert passes.log == [[0, 2], "collect", [0, 2]]


def test_what_waits_for_the_passes_in_flight_is_done_before_another_one_starts() -> None:
    passes, batch = Passes(), [answer(slot) for slot in range(4)]

    def draw(group: Any, output: Any) -> None:
        if passes.log.count("collect") == 1:
            groups.when_idle(lambda: passes.log.append(("saved", groups.is_busy)))

    groups = groups_of(passes, draw)
    groups.decode(batch, 2)
    assert passes.log == [[0, 1], [2, 3], "collect", "collect", ("saved", False)]


@pytest.mark.parametrize(("greedy", "wants", "keeps"), [
    (True, False, False), (False, False, True), (True, True, True),
])  # fmt: skip
def test_rows_of_a_group_are_kept_where_they_may_be_read(
    greedy: bool, wants: bool, keeps: bool
) -> None:
    passes, plain = Passes(), answer(0)
    other = answer(1, wants_logits=wants)
    other.choice.greedy = greedy
    groups_of(passes, drawn).decode([plain, other], 1)
    assert passes.keeps is keeps


class Memory:
    """A pool of pages, and slots that may have requests."""

    def __init__(self, n_free: int, held: dict[int, int], n_pages: int = 8) -> None:
        self.held, self.emptied, self.freed = held, list[int](), list[Any]()
        self.room = SimpleNamespace(n_free_pages=n_free)
        pool = SimpleNamespace(n_pages=n_pages, pages=lambda slot: [0] * held.get(slot, 0))
        passes = SimpleNamespace(room=self.room, reset=self.reset, held=lambda slot: [])
        self.answers = Answers(passes, (), 4, SimpleNamespace())  # type: ignore[arg-type]
        core = SimpleNamespace(
            passes=passes, copies=None, prefixes=SimpleNamespace(free=self.free),
            runner=SimpleNamespace(sequences=SimpleNamespace(pool=pool)),
        )  # fmt: skip
        self.swapping = Swapping(core, self.answers)  # type: ignore[arg-type]

    def reset(self, slot: int) -> None:
        self.emptied.append(slot)
        self.room.n_free_pages += self.held.pop(slot)

    def free(self, n_pages: int, idle: list[int]) -> bool:
        self.freed.append((n_pages, idle))
        return n_pages <= self.room.n_free_pages


def test_the_slot_unused_for_longest_is_the_first_and_numbers_stay() -> None:
    answers = Memory(4, {}).answers
    one, two, three = (answer() for _ in range(3))
    for slot, taken in enumerate((one, two, three)):
        answers.enter_slot(taken, slot)
    two.request.reuse = False
    for left in (two, one, three, two, answer()):
        answers.leave_slot(left)
    assert answers.idle_slots() == [3, 1, 0, 2] and answers.worthless == {1}
    answers.enter_slot(one, 1)  # comes back
    assert (one.number, two.number, answers.n_busy, answers.worthless) == (1, 2, 1, set())


@pytest.mark.parametrize(("n_free", "n_ids", "n_pages", "fits"), [
    (1, PAGE - 1, 8, True), (0, PAGE - 1, 8, False), (1, PAGE, 8, False), (2, PAGE, 8, True),
    (1, 5 * PAGE, 3, True),  # all there is
])  # fmt: skip
def test_a_request_fits_beside_the_next_pages_of_others(
    n_free: int, n_ids: int, n_pages: int, fits: bool
) -> None:
    memory = Memory(n_free, {0: 1, 2: 2}, n_pages)
    assert memory.swapping.fits(answer(n_ids=9 * PAGE)), "alone, it begins or fails"
    for slot in (0, 1):
        memory.answers.enter_slot(answer(), slot)
    assert memory.swapping.fits(answer(n_ids=n_ids)) is fits


def test_idle_slots_give_up_only_what_is_needed() -> None:
    memory = Memory(1, {0: 1, 1: 2, 2: 1})
    memory.answers.worthless |= {0, 1}
    memory.swapping.make_room(answer(n_ids=2 * PAGE), 2)  # which has one page
    assert memory.emptied == [] and memory.freed == [(1, [0, 1, 3])]
    memory.swapping.empty(3)  # nothing is enqueued for an empty one
    memory.swapping.make_room(answer(n_ids=3 * PAGE), 2)
    assert memory.emptied == [0] and memory.answers.worthless == {1}
    with pytest.raises(PoolFull):
        memory.swapping.make_room(answer(n_ids=8 * PAGE), 2)
