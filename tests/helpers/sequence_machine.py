"""Sequences that come, grow, branch, go back and fail at random, and what each must hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from helpers.cache_rules import check_cache, check_pool
from helpers.faults import FAULTS, faulty
from helpers.tree_shapes import TREES, path
from moegraph.engine import Engine
from moegraph.errors import MoegraphError, RequestError

N_VOCAB, N_CTX, LONGEST = 1000, 512, 60
SETTINGS: list[dict[str, Any]] = [
    {"mode": "whole"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "stream", "policy": "lru"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "stream", "policy": "lru", "host_pin": "all"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "cpu", "policy": "lru"},
]
NAMES = ["whole", "stream", "fetch", "cpu"]
CALLS = (
    "mg_launch", "mg_launch", "mg_launch", "mg_wait_ids", "mg_upload_launch", "mg_graph_alloc",
    "ggml_backend_tensor_alloc", "ggml_backend_buft_alloc_buffer", "ggml_init",
)  # fmt: skip


class Machine:
    """An engine, and what each of its sequences must hold."""

    longest = LONGEST

    def __init__(self, engine: Engine, alone: Engine, seed: int) -> None:
        self.engine, self.alone = engine, alone
        self.n_seq = engine.state.n_seq
        self.rng = np.random.default_rng(seed)
        self.held: list[list[int]] = [[] for _ in range(self.n_seq)]
        self.snapshots: list[list[Any]] = []  # snapshot, its tokens, whether it can be restored
        self.n_faults = 0

    def empty(self, *slots: int, to: int = 0) -> None:
        """Note that sequences lost what they held after `to` positions."""
        for slot in slots:
            del self.held[slot][to:]
            for entry in self.snapshots:
                if entry[0].slot == slot and len(entry[1]) > to:
                    entry[2] = False

    def some_slots(self) -> list[int]:
        return self.rng.permutation(self.n_seq)[: self.rng.integers(1, self.n_seq + 1)].tolist()

    def fault(self) -> Any:
        """Return a context in which a native call may fail."""
        if self.rng.random() < 0.5:
            return nullcontext()
        name = str(self.rng.choice(CALLS))
        return faulty(name, int(self.rng.choice([1, 1, 2, 3, 5, 9, 20])), FAULTS[name][0])

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Call with a fault that may come; return the result, or None if there was an error."""
        with self.fault():
            try:
                return call()
            except RequestError:
                raise  # the machine asks for nothing wrong
            except MoegraphError:
                self.n_faults += 1
                return None

    def forward(self) -> None:
        slots, n = self.some_slots(), int(self.rng.choice([1, 1, 2, 7]))
        tokens = self.rng.integers(0, N_VOCAB, (len(slots), n))
        output = self.attempt(lambda: self.engine.forward(tokens, slots, all_rows=True))
        if output is None:  # before the first graph, or after it
            lost = [slot for slot in slots if self.held[slot] and not self.engine.held(slot)]
            if lost:
                self.empty(*slots)
            return
        logits = output.logits.reshape(len(slots), n, -1)
        for seq, slot in enumerate(slots):
            self.held[slot] += tokens[seq].tolist()
            np.testing.assert_array_equal(logits[seq], self.expected(self.held[slot])[-n:])

    def verify(self) -> None:
        slots, n = self.some_slots(), int(self.rng.integers(1, 6))
        tokens = self.rng.integers(0, N_VOCAB, (len(slots), n))
        lengths = self.rng.integers(1, n + 1, len(slots)).tolist()
        parents = [TREES[self.rng.integers(0, len(TREES))](n, self.rng) for _ in slots]
        passes = self.engine.passes

        def run() -> Any:
            passes.verify(tokens, slots, parents, lengths, greedy=False)
            return passes.collect()

        output = self.attempt(run)
        if output is None:
            return
        taken: dict[int, list[int]] = {}
        paths: dict[int, list[int]] = {}
        for seq, slot in enumerate(slots):
            rows = paths[slot] = path(parents[seq], int(self.rng.integers(-1, lengths[seq])))
            taken[slot] = tokens[seq, rows].tolist()
            if rows:
                wanted = self.expected(self.held[slot] + taken[slot])[-len(rows) :]
                got = output.logits.reshape(len(slots), n, -1)[seq, rows]
                np.testing.assert_array_equal(got, wanted)
        at_once = self.rng.random() < 0.5
        for some in [paths] if at_once else [{slot: rows} for slot, rows in paths.items()]:

            def commit(some: dict[int, list[int]] = some) -> bool:
                passes.commit(some)
                return True

            changed = [slot for slot, rows in some.items() if rows]
            if self.attempt(commit):
                for slot in changed:
                    self.held[slot] += taken[slot]
            elif any(self.held[slot] and not self.engine.held(slot) for slot in changed):
                self.empty(*changed)

    def snapshot(self) -> None:
        slot = int(self.rng.integers(0, self.n_seq))
        snapshot = self.attempt(lambda: self.engine.copies.snapshot(slot))
        if snapshot is not None:
            self.snapshots.append([snapshot, list(self.held[slot]), True])
        if len(self.snapshots) > 6:
            self.snapshots.pop(int(self.rng.integers(0, 6)))[0].close()

    def restore(self) -> None:
        if not self.snapshots:
            return
        snapshot, tokens, is_valid = self.snapshots[self.rng.integers(0, len(self.snapshots))]
        if is_valid:
            self.engine.copies.restore(snapshot)
            assert self.held[snapshot.slot][: len(tokens)] == tokens
            self.empty(snapshot.slot, to=len(tokens))
        else:
            with pytest.raises(RequestError, match="has lost positions before"):
                self.engine.copies.restore(snapshot)

    def end_one_in_flight(self) -> None:
        slots = self.some_slots()
        tokens = self.rng.integers(0, N_VOCAB, (len(slots), 1))
        self.engine.submit(tokens, slots, False, False, None)
        self.engine.reset(slots[0])
        for seq, slot in enumerate(slots):
            self.held[slot].append(int(tokens[seq, 0]))
        self.empty(slots[0])
        if len(slots) > 1:
            logits = self.engine.collect().logits
            for seq, slot in list(enumerate(slots))[1:]:
                np.testing.assert_array_equal(logits[seq], self.expected(self.held[slot])[-1])

    def reset(self) -> None:
        slot = int(self.rng.integers(0, self.n_seq))
        self.engine.reset(slot)
        self.empty(slot)

    def expected(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after each token of a sequence by itself."""
        self.alone.reset()
        parts = [
            self.alone.forward(tokens[at : at + 64], all_rows=True).logits
            for at in range(0, len(tokens), 64)
        ]
        return np.concatenate(parts)

    def check(self) -> None:
        """Compare the books with what the sequences must hold."""
        engine, state = self.engine, self.engine.state
        assert [engine.held(slot) for slot in range(self.n_seq)] == self.held
        assert state.n_past == [len(tokens) for tokens in self.held]
        assert [entry[0].is_valid for entry in self.snapshots] == [e[2] for e in self.snapshots]
        check_pool(state.pool)
        # a roll-back that was interrupted is made good before the next pass
        for part in engine.runner.parts:
            if part.mode == "layered" and not part._is_unfinished:
                check_cache(part.cache)

    def run(self, n_turns: int) -> None:
        """Take random steps."""
        steps = (self.forward, self.verify, self.snapshot, self.restore, self.reset,
                 self.end_one_in_flight)  # fmt: skip
        chances = np.array([5, 5, 2, 2, 0.5, 1])
        for _ in range(n_turns):
            steps[self.rng.choice(len(steps), p=chances / chances.sum())]()
            for slot in range(self.n_seq):
                if len(self.held[slot]) > self.longest:
                    self.engine.reset(slot)
                    self.empty(slot)
            self.check()
