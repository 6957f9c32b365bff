"""Ctrl-C, native failures, NaN and cancellation at random points of any call: who holds what.

A call that ends early leaves each of its sequences as it was, as it would be, or empty, and says
which. Whatever comes next has the bits of what the sequence says that it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.interrupts import Interrupt
from helpers.sequence_machine import LONGEST, N_CTX, N_VOCAB, NAMES, SETTINGS, Machine
from helpers.tree_shapes import TREES, path

from moegraph.engine import Engine
from moegraph.errors import MoegraphError, RequestError
from moegraph.events import CancelToken
from moegraph.ggml.lib import C, ffi
from moegraph.runner import NotFinite

Open = Callable[..., Engine]
Held = list[list[int]]
OURS = (
    "moegraph/runner", "moegraph/experts", "moegraph/resident", "moegraph/passes/passes.py",
    "moegraph/graphs/inputs.py", "moegraph/graphs/cache.py",
)  # fmt: skip


class Late(CancelToken):
    """A token that is set at the k-th look."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def is_set(self) -> bool:
        self._at -= 1
        return self._at <= 0


class Interrupted(Machine):
    """A machine whose calls may end at any line.

    n_interrupts: calls that did.
    """

    n_interrupts = 0

    def call(self, call: Callable[[], Any], **after: list[int]) -> Any:
        """Call with something that may go wrong; then each sequence holds what it did, or nothing.

        after: what a sequence may hold as well, by 's' and its number. Returns the result, or None.
        """
        before, result = [list(tokens) for tokens in self.held], None
        interrupt = Interrupt(int(self.rng.choice([self.rng.integers(0, 60),
                                                   self.rng.integers(0, 900)])), *OURS)  # fmt: skip
        way = self.rng.random()
        try:
            if way < 0.3:
                interrupt.begin()
                result = call()
            elif way < 0.5:
                with self.fault():
                    result = call()
            else:
                result = call()
        except RequestError:
            raise  # the machine asks for nothing wrong
        except MoegraphError as error:
            self.n_faults += 1
            result = error.output if isinstance(error, NotFinite) else None
        except KeyboardInterrupt:
            self.n_interrupts += 1
        finally:
            interrupt.end()
        self.engine.passes.clean_up()  # as any call does first
        if self.engine.runner.pending is not None:
            self.engine.collect()  # an interrupt came while it waited
        self.adopt(before, {int(name[1:]): tokens for name, tokens in after.items()})
        return result

    def adopt(self, before: Held, after: dict[int, list[int]]) -> None:
        """Take over what sequences hold, if it is one of what they may."""
        for slot in range(self.n_seq):
            now = list(self.engine.held(slot))
            assert now in ([], before[slot], after.get(slot, [])), f"sequence {slot}"
            self.held[slot] = now
        for entry in self.snapshots:
            entry[2] = entry[0].is_valid
            if entry[2]:
                assert self.held[entry[0].slot][: len(entry[1])] == entry[1]
        self.check()

    def agree(self, output: Any, slots: list[int], n: int) -> None:
        """Compare results of n rows with those of the sequences that hold them."""
        logits = output.logits.reshape(len(slots), n, -1)
        for seq, slot in enumerate(slots):
            if len(self.held[slot]) >= n:
                np.testing.assert_array_equal(logits[seq], self.expected(self.held[slot])[-n:])

    def forward(self) -> None:
        slots, n = self.some_slots(), int(self.rng.choice([1, 1, 3]))
        tokens = self.rng.integers(0, N_VOCAB, (len(slots), n))
        cancel: Any = None
        if self.rng.random() < 0.3:
            cancel = [Late(int(self.rng.integers(1, 6))) for _ in slots]
        after = {f"s{s}": self.held[s] + tokens[i].tolist() for i, s in enumerate(slots)}
        output = self.call(
            lambda: self.engine.forward(tokens, slots, all_rows=True, cancel=cancel), **after
        )
        if output is not None:
            self.agree(output, slots, n)

    def forward_with_nan(self) -> None:
        slots = self.some_slots()
        tensor = next(iter(self.engine.state.states[0].layer_states.values()))[1]
        nan = np.array([np.nan], np.float32)
        C.ggml_backend_tensor_set(tensor, ffi.from_buffer(nan), slots[0] * tensor.nb[1], 4)
        tokens = self.rng.integers(0, N_VOCAB, (len(slots), 1))
        after = {f"s{s}": self.held[s] + tokens[i].tolist() for i, s in enumerate(slots)}
        verifies, engine = self.rng.random() < 0.4, self.engine

        def run() -> Any:
            if not verifies:
                return engine.forward(tokens, slots)
            engine.passes.verify(tokens, slots, greedy=False)
            return engine.collect()

        self.call(run, **({} if verifies else after))
        engine.reset(slots[0])
        self.adopt(self.held, {})

    def verify(self) -> None:
        slots, n = self.some_slots(), int(self.rng.integers(1, 6))
        tokens = self.rng.integers(0, N_VOCAB, (len(slots), n))
        lengths = self.rng.integers(1, n + 1, len(slots)).tolist()
        parents = [TREES[self.rng.integers(0, len(TREES))](n, self.rng) for _ in slots]
        passes, held = self.engine.passes, [list(tokens) for tokens in self.held]
        dropped = slots[0] if self.rng.random() < 0.2 else None

        def run() -> Any:
            passes.verify(tokens, slots, parents, lengths, greedy=False)
            if dropped is not None and len(slots) > 1:
                passes.reset(dropped)
            return passes.collect()

        output = self.call(run)
        assert all(now == was or slot == dropped
                   for slot, (now, was) in enumerate(zip(self.held, held)))  # fmt: skip
        if output is None:
            return
        can = [i for i, slot in enumerate(slots) if slot in self.engine.runner.commits.pending]
        paths = {slots[i]: path(parents[i], int(self.rng.integers(-1, lengths[i]))) for i in can}
        after = {}
        for i in can:
            rows, slot = paths[slots[i]], slots[i]
            after[f"s{slot}"] = self.held[slot] + tokens[i, rows].tolist()
            if rows:
                wanted = self.expected(after[f"s{slot}"])[-len(rows) :]
                got = output.logits.reshape(len(slots), n, -1)[i, rows]
                np.testing.assert_array_equal(got, wanted)
        self.call(lambda: passes.commit(paths), **after)

    def snapshot(self) -> None:
        slot = int(self.rng.integers(0, self.n_seq))
        snapshot = self.call(lambda: self.engine.copies.snapshot(slot))
        if snapshot is not None:
            self.snapshots.append([snapshot, list(self.held[slot]), True])
        if len(self.snapshots) > 6:
            self.snapshots.pop(int(self.rng.integers(0, 6)))[0].close()

    def restore(self) -> None:
        valid = [entry for entry in self.snapshots if entry[2]]
        if valid:
            snapshot, tokens, _ = valid[self.rng.integers(0, len(valid))]
            after = {f"s{snapshot.slot}": tokens}
            self.call(lambda: self.engine.copies.restore(snapshot), **after)

    def reset(self) -> None:
        slot = int(self.rng.integers(0, self.n_seq))
        self.call(lambda: self.engine.reset(slot))

    def end_one_in_flight(self) -> None:
        slots = self.some_slots()
        tokens = self.rng.integers(0, N_VOCAB, (len(slots), 1))
        after = {f"s{s}": self.held[s] + tokens[i].tolist() for i, s in enumerate(slots)}

        def run() -> None:
            self.engine.submit(tokens, slots, False, False, None)
            self.engine.reset(slots[0])
            if len(slots) > 1:
                self.engine.collect()

        self.call(run, **after)

    def step(self) -> None:
        """Take a random step."""
        steps = (self.forward, self.verify, self.snapshot, self.restore, self.reset,
                 self.end_one_in_flight, self.forward_with_nan)  # fmt: skip
        chances = np.array([5, 6, 2, 2, 0.5, 1, 1])
        steps[self.rng.choice(len(steps), p=chances / chances.sum())]()
        for slot in range(self.n_seq):
            if len(self.held[slot]) > LONGEST:
                self.engine.reset(slot)
                self.adopt(self.held, {})


@pytest.mark.parametrize(
    ("n_seq", "seed", "settings"), list(zip((3, 1, 3, 1), range(4), SETTINGS)), ids=NAMES
)
def test_sequences_hold_what_they_say_wherever_a_call_ends(
    open_engine: Open, settings: dict, n_seq: int, seed: int
) -> None:
    chosen = {"cpu_reference": True, "n_ctx": N_CTX, "deterministic": True}
    engine = open_engine("legacy32", n_seq=n_seq, **chosen, **settings)
    machine = Interrupted(engine, open_engine("legacy32", **chosen), seed)
    for _ in range(60):
        machine.step()
    assert machine.n_interrupts > 5
    for snapshot, _, _ in machine.snapshots:
        snapshot.close()
    for slot in range(n_seq):
        engine.reset(slot)
    assert engine.state.pool.n_free == engine.state.pool.n_pages
