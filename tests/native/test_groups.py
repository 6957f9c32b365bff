"""Groups of sequences in several stages at once: the same bits, and nothing of one is lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from helpers.clients import Client, alone, serving, together
from helpers.faults import faulty, poison
from helpers.patience import PATIENCE_S
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.engine.service import Service
from moegraph.errors import NativeError, RequestError
from moegraph.ggml.lib import C
from moegraph.kinds import Kind
from moegraph.loop.groupchoice import GroupChoice
from moegraph.loop.scheduler import Scheduler
from moegraph.passes.grouppasses import GroupPasses
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
TWO, THREE = "cpu,cpu", "cpu,cpu,cpu"
SLOTS = {"pin_layers": 0, "cache_slots": 48, "policy": "lru"}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {**SLOTS, "miss": "stream"},
    "cpu": {**SLOTS, "miss": "cpu"},
    "fetch": {**SLOTS, "miss": "stream", "host_pin": "all"},
}
N_SEQ = 7


def begun(engine: Engine, n_seq: int = N_SEQ) -> np.ndarray:
    """Give each sequence a text of its own; return their next tokens, [n_seq]."""
    rows = np.zeros(n_seq, np.int32)
    for seq in range(n_seq):
        ids = prompt(engine, 5 + 7 * seq, seed=seq)
        rows[seq] = engine.prefill(ids, seq).require_logits()[-1].argmax()
    return rows


def singly(engine: Engine, rows: np.ndarray, n: int) -> np.ndarray:
    """Return the logits of n passes over all sequences, [n, n_seq, n_vocab]."""
    found = []
    for _ in range(n):
        engine.passes.submit(rows[:, None], range(len(rows)), False, False, None, Kind.DECODE)
        found.append(engine.passes.collect().require_logits())
        rows = found[-1].argmax(1).astype(np.int32)
    return np.array(found)


class Groups:
    """Decodes groups in turn; found: the logits of each sequence, in order."""

    def __init__(self, engine: Engine, rows: np.ndarray, sizes: list[int]) -> None:
        assert isinstance(engine.passes, GroupPasses)
        self.passes, self.rows = engine.passes, rows
        ends = np.cumsum(sizes)
        self.waiting = deque(
            list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)
        )
        self.pending: deque[list[int]] = deque()
        self.found: list[list[np.ndarray]] = [[] for _ in rows]

    def submit(self) -> None:
        slots = self.waiting.popleft()
        self.passes.submit_group(self.rows[slots][:, None], slots, False, None)
        self.pending.append(slots)

    def collect(self) -> None:
        slots = self.pending.popleft()
        logits = self.passes.collect_group().require_logits()
        for row, slot in enumerate(slots):
            self.found[slot].append(logits[row])
            self.rows[slot] = logits[row].argmax()
        self.waiting.append(slots)

    def run(self, n: int) -> None:
        """Run so many passes of each group, with as many in flight as may be."""
        for _ in range(n * len(self.waiting)):
            while len(self.pending) == self.passes.most or not self.waiting:
                self.collect()
            self.submit()
        while self.pending:
            self.collect()


@pytest.mark.parametrize(
    ("preset", "device", "sizes", "mode"),
    [
        ("legacy32", TWO, [4, 3], "whole"),
        ("mini35b", THREE, [3, 2, 2], "stream"),
        ("legacy32", THREE, [6, 1], "cpu"),
        ("legacy32", TWO, [4, 3], "fetch"),
    ],
)
def test_rows_have_the_bits_of_one_group(
    open_engine: Open, preset: str, device: str, sizes: list[int], mode: str
) -> None:
    settings = {"n_seq": N_SEQ, "deterministic": True, **MODES[mode]}
    one, cut = (open_engine(preset, device=d, **settings) for d in ("cpu", device))
    wanted = singly(one, begun(one), 9)
    groups = Groups(cut, begun(cut), sizes)
    groups.run(5)
    singles = singly(cut, groups.rows, 1)  # one group, and groups again
    groups.rows = singles[0].argmax(1).astype(np.int32)
    groups.run(3)
    found = np.array(groups.found).transpose(1, 0, 2)
    np.testing.assert_array_equal(found[:5], wanted[:5])
    np.testing.assert_array_equal(singles[0], wanted[5])
    np.testing.assert_array_equal(found[5:], wanted[6:])
    assert isinstance(cut.passes, GroupPasses)
    counts = cut.passes.pipeline.counts
    assert counts.passes == 8 * len(sizes)
    assert 0.0 <= counts.bubbles < 1.0 and all(busy > 0.0 for busy in counts.busy_s)


@pytest.mark.parametrize(
    ("mode", "n_calls"), [("whole", 1), ("whole", 4), ("stream", 2), ("stream", 11), ("fetch", 7)]
)
def test_a_fault_in_one_group_does_not_lose_the_other(
    open_engine: Open, mode: str, n_calls: int
) -> None:
    """A launch fails, in any stage; only the sequences of that pass are emptied."""
    settings = {"n_seq": 4, "deterministic": True, "device": TWO, **MODES[mode]}
    cut, whole = open_engine(**settings), open_engine(**settings)
    rows = begun(cut, 4)
    wanted = singly(whole, begun(whole, 4), 4)
    groups = Groups(cut, rows, [2, 2])
    groups.run(1)
    lost: list[int] = []
    with faulty("mg_launch", n_calls, C.GGML_STATUS_FAILED):
        for _ in range(3):
            for step in (groups.submit, groups.submit, groups.collect, groups.collect):
                before = list(groups.pending[0]) if groups.pending else []
                slots = list(groups.waiting[0]) if groups.waiting else []
                try:
                    if step == groups.submit and not groups.waiting:
                        continue
                    if step == groups.collect and not groups.pending:
                        continue
                    step()
                except NativeError:
                    lost += before if step == groups.collect else slots
    kept = [seq for seq in range(4) if seq not in lost]
    assert sorted(lost) in ([0, 1], [2, 3])
    for seq in range(4):
        n_held = len(cut.held(seq))
        assert n_held == (0 if seq in lost else 5 + 7 * seq + 4), seq
    for seq in kept:
        np.testing.assert_array_equal(np.array(groups.found[seq]), wanted[:, seq])
    # the engine goes on, with all sequences
    for seq in lost:
        cut.reset(seq)
    again = begun(open_engine(**settings), 4)
    for seq in range(4):
        cut.reset(seq)
    np.testing.assert_array_equal(begun(cut, 4), again)


class Always(GroupChoice):
    """Takes groups wherever they can be."""

    def n_groups(self, n_rows: int) -> int:
        return 2 if n_rows > 1 else 1


SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(seed=5, top_k=0, top_p=1.0, min_p=0.0, typical_p=0.7),
    SamplingParams(temperature=0.0, repeat_penalty=1.3),
)


@pytest.fixture
def prompts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have prompts cost nothing, so that they are read first and all requests decode together."""
    credit = property(lambda self: 1.0, lambda self, seconds: None)
    monkeypatch.setattr(Scheduler, "_credit_s", credit, raising=False)


@contextmanager
def in_groups(engine: Engine) -> Iterator[Service]:
    with serving(engine) as service:
        groups = service._loop._decoding.groups
        assert groups is not None
        groups.choice = Always(2)
        yield service


@pytest.mark.parametrize("mode", ["whole", "stream", "fetch"])
def test_requests_in_groups_are_answered_as_if_alone(
    open_engine: Open, prompts_first: None, mode: str
) -> None:
    """Texts of many lengths, with prompts between; some are read whole, some saved."""
    engine = open_engine(n_seq=8, cpu_reference=True, device=TWO, **MODES[mode])
    assert isinstance(engine.passes, GroupPasses)

    def client_of(i: int, n: int) -> Client:
        return Client(
            service, prompt(engine, n, seed=i).tolist(), max_tokens=60 + 20 * (i % 3),
            sampling=SAMPLINGS[i % 4], n_logprobs=2 if i == 4 else None,
            keep_after=frozenset(range(0, 1024, 9)) if i == 5 else frozenset(),
            on_step=lambda step: are_there.wait(PATIENCE_S),
        )  # fmt: skip

    are_there = threading.Event()
    with in_groups(engine) as service:
        clients = [client_of(i, n) for i, n in enumerate((1, 5, 40, 130, 33, 12, 90, 200))]
        are_there.set()
        for client in clients:
            client.wait()
        service.drain()
        status = service.status()
    assert engine.passes.pipeline.counts.passes > 20
    assert status.group_passes == engine.passes.pipeline.counts.passes
    assert 0.0 <= status.stage_idle < 1.0
    single = open_engine(cpu_reference=True)
    for client in clients:
        assert (client.tokens, client.reason) == (alone(single, client.request)[0], "length")


def test_a_cancellation_or_a_nan_in_one_group_touches_no_other(
    open_engine: Open, prompts_first: None
) -> None:
    engine = open_engine(n_seq=4, cpu_reference=True, device=TWO)
    poisoned = threading.Event()

    def spoil(step: Any) -> None:
        if len(clients[1].tokens) == 5 and not poisoned.is_set():
            poisoned.set()
            slots = service._loop.answers.slots()
            poison(engine, next(s.id for s in slots if s.request and s.request.name == "bad"))

    def cancel(step: Any) -> None:
        if len(clients[2].tokens) >= 20:
            clients[2].ticket.cancel()

    clients: list[Client] = []
    with in_groups(engine) as service:
        with together(service):
            for i, name in enumerate(("a", "bad", "ends", "c")):
                on_step = {"bad": spoil, "ends": cancel}.get(name)
                more: dict[str, Any] = {"on_step": on_step} if on_step else {}
                ids = prompt(engine, 40 + i, seed=i).tolist()
                clients.append(Client(service, ids, max_tokens=90, name=name, **more))
        reasons = [client.wait().reason for client in clients]
        again = Client(service, clients[2].request.prompt, max_tokens=3).wait()
    assert reasons == ["length", "error", "cancelled", "length"]
    assert "not finite" in str(clients[1].last.error)
    single = open_engine(cpu_reference=True)
    for client in (clients[0], clients[3], again):
        assert client.tokens == alone(single, client.request)[0]


@pytest.mark.parametrize("at", [1, 8])
def test_an_interrupt_leaves_nothing_in_flight(open_engine: Open, at: int) -> None:
    settings = {"n_seq": 4, "deterministic": True, "device": TWO}
    cut = open_engine(**settings, **MODES["stream"])
    wanted = begun(cut, 4)
    groups = Groups(cut, wanted.copy(), [2, 2])
    groups.run(1)
    with faulty("mg_launch", at, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        groups.run(4)
    cut.runner.require_idle()
    assert isinstance(cut.passes, GroupPasses)
    with pytest.raises(RequestError, match="no group is in flight"):
        cut.passes.collect_group()
    for seq in range(4):
        cut.reset(seq)
    np.testing.assert_array_equal(begun(cut, 4), wanted)
