"""The scheduler, on a model of an engine: who runs when, and for how long others wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.scheduled import Machine
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moegraph.errors import QueueFull
from moegraph.kinds import SweepStep
from moegraph.loop.scheduler import At, Begin, Decode, Piece, Read, Restore, Scheduler


def test_requests_decode_together() -> None:
    machine = Machine(n_slots=4)
    for name in "abcd":
        machine.add(name, 10, 20)
    machine.run()
    widths = [len(names) for _, what, names in machine.log if what == "decode"]
    assert widths.count(4) >= 10 and max(widths) == 4


def test_a_slot_stays_free_for_the_oldest_prompt() -> None:
    machine = Machine(n_slots=3)
    machine.add("first", 9000, 50)
    for _ in range(3):
        machine.turn()
    machine.add("long", 3000, 3)
    for i in range(50):
        machine.add(f"{i}", 10, 1000)
    machine.run()
    begins = {names[0]: now for now, what, names in machine.log if what == "begin"}
    # a short one took the slot beside the sweep, and no other one the last
    is_read = machine.tokens["first"][0]
    assert begins["0"] < is_read <= begins["long"] < is_read + 5 * machine.pass_s
    assert min(begins[f"{i}"] for i in range(1, 50)) > begins["long"]


def test_prompts_begin_in_the_order_of_arrival() -> None:
    machine = Machine(n_slots=2)
    for i in range(9):
        machine.add(f"{i}", 100 + i, 5)
    machine.run()
    begun = [names[0] for _, what, names in machine.log if what == "begin"]
    assert begun == [f"{i}" for i in range(9)]


@pytest.mark.parametrize("step_s", [0.0001, 0.003, 0.0099])
@pytest.mark.parametrize("n_decoding", [1, 3])
def test_a_long_prompt_at_most_doubles_the_time_between_tokens(
    step_s: float, n_decoding: int
) -> None:
    machine = Machine(step_s=step_s)
    for i in range(n_decoding):
        machine.add(f"{i}", 10, 2000)
    for _ in range(20):
        machine.turn()
    n_before = len(machine.tokens["0"])
    machine.add("long", 20_000, 2)
    machine.run()
    at = machine.tokens["0"]
    gaps = [b - a for a, b in zip(at, at[1:])][n_before:]
    # the first step of a length is run to measure it
    assert sorted(gaps)[-3] <= 1.83 * machine.pass_s
    assert max(gaps) <= 2 * machine.pass_s + 1e-9
    # and the prompt gets a third of the time
    begun = max(now for now, what, names in machine.log if (what, names) == ("begin", ("long",)))
    assert machine.tokens["long"][0] - begun < 3.2 * 2000 * step_s + 5 * machine.pass_s


def test_a_short_prompt_begins_beside_a_sweep_and_a_long_one_waits() -> None:
    machine = Machine()
    machine.add("long", 5000, 5)
    machine.turn()
    machine.turn()
    machine.add("other", 5000, 5)
    machine.add("short", 20, 5)
    machine.run()
    order = {what + names[0]: now for now, what, names in reversed(machine.log)}
    assert order["pieceshort"] < machine.tokens["long"][0] <= order["beginother"]


def chat_beside(n_prompt: int, pieces: Callable[[int], float], n_decoding: int = 2) -> Machine:
    """Read a prompt beside one of 20,000 rows that takes six seconds alone."""
    machine = Machine(n_slots=8)
    machine.piece_s = pieces
    for i in range(n_decoding):
        machine.add(f"{i}", 10, 5000)
    for _ in range(20):
        machine.turn()
    machine.add("long", 20_000, 5)
    for _ in range(50):
        machine.turn()
    since = machine.now
    machine.add("chat", n_prompt, 50)
    while not machine.tokens["chat"]:
        machine.turn()
    assert not machine.tokens["long"]
    machine.log.append((machine.now - since, "waited", ("chat",)))
    machine.run()
    return machine


@pytest.mark.parametrize("n_decoding", [0, 2])
@pytest.mark.parametrize("n_prompt", [33, 200, 512])
@pytest.mark.parametrize("pieces", [
    lambda n: 0.002 + 0.0001 * n,  # nothing is missing
    lambda n: 0.15,  # all that is missing is sent, however few the rows
])  # fmt: skip
def test_a_chat_beside_a_long_prompt_begins_within_a_second(
    n_prompt: int, pieces: Callable[[int], float], n_decoding: int
) -> None:
    machine = chat_beside(n_prompt, pieces, n_decoding)
    waited = next(seconds for seconds, what, _ in machine.log if what == "waited")
    assert waited < 1.0
    # the long prompt goes on meanwhile, and is delayed by what the pieces take, twice at most
    cost = sum(
        pieces(512) for _, what, names in machine.log if (what, names[0]) == ("piece", "chat")
    )
    begun = next(now for now, what, names in machine.log if (what, names) == ("begin", ("long",)))
    alone_s = 6.0 if not n_decoding else 3.1 * 6.0
    assert machine.tokens["long"][0] - begun < alone_s + 3 * cost + 1.0


def test_short_prompts_do_not_keep_a_long_one_waiting_for_ever() -> None:
    machine = Machine(n_slots=2, n_waiting=400)
    machine.add("first", 3000, 3)
    machine.add("long", 3000, 3)
    for i in range(300):
        machine.add(f"{i}", 10, 30)
    machine.run()
    n_before = sum(times[0] < machine.tokens["long"][0] for times in machine.tokens.values())
    assert n_before < 60


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    machine = Machine(n_slots=2, n_waiting=3)
    for i in range(5):
        machine.add(f"{i}", 100, 30)
    with pytest.raises(QueueFull, match="5 requests run or wait already") as caught:
        machine.add("no", 1, 1)
    assert caught.value.retry_after_s == 1.0  # nothing was measured yet
    machine.scheduler.costs.note_request(30.0)
    with pytest.raises(QueueFull) as caught:
        machine.add("no", 1, 1)
    assert caught.value.retry_after_s == pytest.approx(15.0)
    machine.turn()
    with pytest.raises(QueueFull):  # one that runs counts as before
        machine.add("no", 1, 1)
    while "0" in machine.scheduler.requests():
        machine.turn()
    machine.add("yes", 1, 1)


def test_with_no_room_to_wait_an_idle_service_still_takes_a_request() -> None:
    machine = Machine(n_slots=2, n_waiting=0)
    machine.add("a", 100, 2)
    machine.add("c", 100, 2)  # there is a slot for it
    with pytest.raises(QueueFull):
        machine.add("b", 100, 2)
    machine.run()
    machine.add("b", 100, 2)


def test_a_long_prompt_is_read_while_all_others_wait_for_their_grammars() -> None:
    machine = Machine(step_s=0.5)
    machine.add("a", 10, 1000)
    for _ in range(40):
        machine.turn()
    machine.add("long", 400, 2)
    for _ in range(500):
        if isinstance(machine.scheduler.next(lambda name: machine.n_rest[name]), Decode):
            machine.scheduler.waited()
        else:
            machine.turn()
    assert machine.tokens["long"]


def test_a_request_may_end_anywhere() -> None:
    machine = Machine(n_slots=2)
    for name in "abc":
        machine.add(name, 1000, 100)
    machine.turn()
    machine.end("a")  # while its sweep is under way
    machine.end("c")  # while it waits
    machine.end("unknown")
    machine.run()
    assert len(machine.tokens["b"]) == 100 and not machine.scheduler.requests()
    assert machine.tokens["a"] == machine.tokens["c"] == []


def test_if_memory_runs_out_the_oldest_go_on_and_the_others_come_back_in_order() -> None:
    machine = Machine(n_slots=4)
    machine.n_rows = 1000
    for i in range(6):
        machine.add(f"{i}", 100, 500)
    machine.run()
    ended = sorted(machine.tokens, key=lambda name: machine.tokens[name][-1])
    assert ended == [f"{i}" for i in range(6)]
    what = [what for _, what, _ in machine.log]
    assert what.count("preempt") == what.count("restore") >= 2
    assert all(len(times) == 500 for times in machine.tokens.values())


def test_what_does_not_fit_waits_until_something_ends() -> None:
    scheduler = Scheduler[str](3, 10)
    scheduler.add("a")
    assert scheduler.next(lambda _: 9) == Begin("a")
    scheduler.put("a", At.DECODES)
    scheduler.costs.note_round((), 1, 0.01)
    scheduler.decoded(1)
    scheduler.add("b")
    assert scheduler.next(lambda _: 9, lambda _: False) == Decode(("a",))
    assert scheduler.next(lambda _: 9) == Begin("b")
    scheduler.hold()
    scheduler.decoded(1)
    assert scheduler.next(lambda _: 9) == Decode(("a",))
    scheduler.end("a")
    assert scheduler.next(lambda _: 9) == Begin("b")
    scheduler.put("b", At.DECODES)
    scheduler.add("c")
    # what passes earned before nobody waited for a token is gone
    assert scheduler.next(lambda _: 9) == Decode(("b",))
    scheduler.hold()
    scheduler.put("b", At.MOVED)
    assert scheduler.next(lambda _: 9) == Restore("b")


def test_an_answer_whose_context_is_shifted_waits_behind_the_others() -> None:
    scheduler = Scheduler[str](n_slots=2, n_waiting=4)
    scheduler.add("endless")
    scheduler.put("endless", At.DECODES)
    scheduler.add("short")
    scheduler.decoded(1)
    scheduler.hold()  # there was no memory for it
    assert scheduler.next(lambda key: 10) == Decode(("endless",))
    scheduler.put("endless", At.WAITS)
    assert scheduler.next(lambda key: 10) == Begin("short", ("endless",))


def test_a_sweep_shares_its_time() -> None:
    scheduler = Scheduler[str](4, 10)
    for name, at in (("a", At.DECODES), ("b", At.WAITS), ("c", At.WAITS)):
        scheduler.add(name)
        scheduler.put(name, at)
    scheduler.costs.note_round((), 1, 0.05)
    scheduler.costs.upcoming = SweepStep("attention", 32, 32)
    scheduler.costs.note([scheduler.costs.upcoming], 0.001)
    scheduler.began(500, ["b"])
    found = []
    for _ in range(64):
        scheduler.decoded(1)
        found.append(scheduler.next(lambda _: 2000))
    # "c" waits behind little, so prompts go first, but for a tenth of a second; two passes of 64
    # have no step before them, to be measured
    assert found[0] == Read("b", pytest.approx(0.1)) and found.count(Decode(("a",))) == 2
    scheduler.end("a")
    scheduler.put("c", At.PIECES)
    assert isinstance(scheduler.next(lambda _: 9), Piece)
    scheduler.took_piece(0.1)
    assert isinstance(scheduler.next(lambda _: 9), Read)
    scheduler.swept(400, 0.2)
    assert isinstance(scheduler.next(lambda _: 9), Piece)


class Requests(RuleBasedStateMachine):
    """Requests come, run and end at random; each is served, and no one waits for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(n_slots=3, n_waiting=6)
        self.machine.n_rows = 450
        self.n = 0
        self.ended: set[str] = set()

    @rule(n_prompt=st.integers(1, 400), n_tokens=st.integers(1, 30))
    def add(self, n_prompt: int, n_tokens: int) -> None:
        try:
            self.machine.add(f"{self.n}", n_prompt, n_tokens)
        except QueueFull:
            assert len(self.machine.scheduler.requests()) == 9
        self.n += 1

    @rule(n=st.integers(1, 30))
    def work(self, n: int) -> None:
        for _ in range(n):
            self.machine.turn()

    @precondition(lambda self: self.machine.scheduler.requests())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.machine.scheduler.requests()))
        self.machine.end(key)
        self.ended.add(key)

    @invariant()
    def slots_suffice(self) -> None:
        assert self.machine.scheduler.n_running <= 3
        assert len(self.machine.swept) <= 1
        assert self.machine.n_used <= 450

    def teardown(self) -> None:
        self.machine.run()
        assert not self.machine.scheduler.requests()
        for name, left in self.machine.left.items():
            assert left == 0 or name in self.ended


TestRequests = Requests.TestCase
TestRequests.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
