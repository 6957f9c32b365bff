"""Wherever a beginning of a prompt comes from, the logits after it are those of a cold engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.reading import read
from helpers.shared import prompt
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.passes import prefixes

ONE = {"cpu_reference": True, "n_ctx": 1024, "n_ubatch": 128, "n_threads": 1}
LONG = 560
GIB = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def every_mark() -> Iterator[None]:
    """Let short prompts have marks near each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_WORTH", 0)
        yield


class Pair:
    """An engine of three sequences that keeps prompts in memory and on disk, and a cold one.

    text, others: two texts that differ everywhere. cold: logits after ids, as bytes, computed from
    the start.
    """

    def __init__(self, model: Path, folder: Path, stack: ExitStack, device: str) -> None:
        self.engine, alone = (
            stack.enter_context(closing(Engine.load(model, EngineConfig(**ONE, **each))))
            for each in ({"device": device, "n_seq": 3, "n_kv": 0}, {"device": "cpu"})
        )
        self.engine.keep_prefixes(folder, GIB)
        self.text, self.others = (prompt(alone, LONG, seed=seed) for seed in (1, 2))
        assert (self.text != self.others).all()

        @cache
        def cold(ids: bytes) -> np.ndarray:
            alone.reset()
            return alone.prefill(np.frombuffer(ids, np.int32)).require_logits()[-1]

        self.cold = cold

    def begin(self) -> None:
        """Forget everything."""
        for seq in range(3):
            self.engine.reset(seq)
        self.engine.prefixes.store._max_bytes = None
        self.engine.prefixes.store.clear()
        disk = self.engine.prefixes.store.disk
        disk.wait()
        for entry in list(disk._entries.values()):
            disk._drop(entry)

    def spill(self) -> None:
        """Have the disk alone keep what the memory has."""
        self.engine.prefixes.store.shrink(0, [])
        self.engine.prefixes.store.disk.wait()
        assert self.engine.prefixes.store.n_places == 0

    def ask(self, seq: int, ids: np.ndarray, *marks: int) -> int:
        """Have a sequence hold ids; compare the logits after them; return how many were reused."""
        logits, n = read(self.engine, seq, ids, *marks)
        assert self.engine.held(seq) == ids.tolist()
        np.testing.assert_array_equal(logits, self.cold(ids.tobytes()))
        return n


@pytest.fixture(scope="module", params=["cpu", "cpu,cpu"])
def pair(
    request: pytest.FixtureRequest, model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:  # fmt: skip
    """Yield a pair, on one device and on two."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("kept")
        yield Pair(model_path("legacy32"), folder, stack, request.param)


MARKS = 24, 40
NEAR = [mark + by for mark in MARKS for by in (-1, 0, 1)]


@pytest.mark.parametrize("where", ["device", "host", "disk", "no rows"])
def test_every_length_around_marks(pair: Pair, where: str) -> None:
    """A text with two marks, of which the sequence holds and the prompt has any length near them.

    Another sequence holds all of it (device), or copies are in memory or on disk, or memory has
    states alone.
    """
    pair.begin()
    engine, text, others = pair.engine, pair.text[:60], pair.others
    pair.ask(0, text, *MARKS)
    if where != "device":
        engine.reset(0)
    for node in engine.prefixes.store.tree.nodes() if where == "no rows" else ():
        node.rows = None
    near = NEAR if len(engine.stages) == 1 else NEAR[1::2]
    for n_held, n_asked, differs in product([0, *near], near, (False, True)):
        if where == "disk":
            pair.spill()
        engine.reset(1)
        held = np.concatenate([text[:n_held], others[: 3 * differs]])
        if len(held):
            engine.prefill(held, 1)
        n_rows = n_held if where == "no rows" else n_asked
        wanted = max([0, *(mark for mark in MARKS if mark <= min(n_asked, n_rows))])
        if n_held <= n_asked and not differs:
            wanted = max(wanted, n_held)  # it goes on where it is
        n = pair.ask(1, np.concatenate([text[:n_asked], others[5:9]]))
        assert n == wanted, (n_held, n_asked, differs)
    if where == "device":
        pair.ask(0, pair.text[:70])  # nobody wrote to its rows


BRANCH = st.sampled_from([20, 21, 64, 255, 256, 257, 300, 511, 512, 513])
SEQ = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(
        st.just("ask"), SEQ, BRANCH, st.integers(0, 1), st.integers(1, 3),
        st.lists(BRANCH.map(int), max_size=3),
    ),
    st.tuples(st.just("reset"), SEQ),
    st.tuples(st.just("spill")),
    st.tuples(st.just("room"), st.sampled_from([None, 1 << 18, 1 << 19, 1 << 20])),
)  # fmt: skip


@settings(max_examples=8)
@example(
    [  # a run of the disk is divided in memory
        ("ask", 0, 300, 0, 1, [256]),
        ("spill",),
        ("reset", 0),
        ("ask", 0, 64, 1, 1, [64]),
        ("reset", 0),
        ("ask", 1, 300, 0, 1, []),
    ]
)
@example([  # the disk has the beginning of a run of the memory
    ("ask", 1, 256, 0, 1, []), ("ask", 0, 64, 1, 1, [64]), ("spill",), ("ask", 1, 256, 0, 3, [300]),
    ("spill",), ("reset", 0), ("reset", 1), ("ask", 2, 256, 0, 3, []),
])  # fmt: skip
@given(st.lists(STEPS, min_size=3, max_size=12))
def test_any_order_of_prompts_and_losses(pair: Pair, steps: list[tuple[Any, ...]]) -> None:
    """Prompts part from one text at marks and pages and beside them; memory comes and goes."""
    pair.begin()
    kept = pair.engine.prefixes.store
    for name, *what in steps:
        if name == "ask":
            seq, branch, which, n_tail, marks = what
            tail = pair.others[which * 100 : which * 100 + 20 * n_tail]
            ids = np.concatenate([pair.text[:branch], tail])
            known = pair.engine.prefixes.n_saved(ids) if kept._max_bytes is None else 0
            assert pair.ask(seq, ids, *(mark for mark in marks if mark < len(ids))) >= known
        elif name == "reset":
            pair.engine.reset(*what)
        elif name == "spill":
            pair.spill()
        else:
            [kept._max_bytes] = what
    check_pool(pair.engine.state.pool)
