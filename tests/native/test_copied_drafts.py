"""What drafters keep of sequences goes with them, to host memory and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import write_small
from helpers.shared import prompt

from moegraph.draft.dflash import DFlashDrafter
from moegraph.draft.drafter import Drafter
from moegraph.engine import Engine
from moegraph.passes import prefixes
from moegraph.runner.inspect import read_tensor

Open = Callable[..., Engine]
DRAFTERS = ("mtp", "dflash", "windows")


@pytest.fixture(autouse=True)
def every_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short prompts have marks near each other."""
    monkeypatch.setattr(prefixes, "_WORTH", 1)


def drafting(open_engine: Open, folder: Path, name: str, **settings: Any) -> Engine:
    """Open an engine in reference mode that drafts, by settings alone."""
    chosen = {"cpu_reference": True, "n_draft": 7, "n_ctx": 1024, **settings}
    if name == "mtp":
        return open_engine("mini35b", spec="mtp", **chosen)
    path = write_small(folder / name, windows="sf" if name == "windows" else "ff")
    return open_engine(spec="dflash", draft=str(path), **chosen)


def text(engine: Engine, ids: np.ndarray, n: int, *marks: int) -> tuple[list[int], int]:
    """Return the ids of an answer, and how many of the prompt's were reused."""
    events = list(engine.generate(ids, max_tokens=n, text=False, reuse=True, marks=marks))
    return [event.token for event in events], events[-1].n_reused


def drafter_of(engine: Engine) -> Drafter:
    [drafter] = engine.speculation.drafters.values()
    return drafter


def kept(engine: Engine, seq: int = 0) -> list[np.ndarray]:
    """Return all K and V that a drafter has of a sequence, and where they begin."""
    drafter, state = drafter_of(engine), engine.state.states[0]
    engine.speculation.settle(seq)
    n_past = state.n_past[seq]
    if isinstance(drafter, DFlashDrafter):
        rings = drafter._rings
        span, found = rings.spans[seq], []
        assert span.n_past == n_past
        for il, kind in enumerate(rings.kind):
            first = rings.first_kept(seq, kind)
            rows = rings.rows(kind, seq, np.arange(first, n_past))
            found += [read_tensor(t[il])[rows] for t in (rings.k, rings.v)]
        return found
    il, rows = engine.hparams.n_layer, state.pool.rows(np.array(seq), np.arange(n_past))
    found = [read_tensor(t)[rows] for t in (state.k[il], state.v[il])]
    return [*found, read_tensor(state.last_out)[seq]]


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for got, want in zip(a, b, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_swapped_sequence_drafts_as_before(open_engine: Open, tmp_path: Path, name: str) -> None:
    engine = drafting(open_engine, tmp_path, name, n_seq=2, n_kv=-1)
    ids = prompt(engine, 400)
    answer, _ = text(engine, ids, 12, 300)
    held, before = engine.held(0)[:], kept(engine)
    draft = drafter_of(engine).draft(0, answer[-1], 7, 3)
    swapped = engine.copies.swap_out(0)
    copies = engine.copies
    most = copies.memory.states_bytes + len(held) * copies.row_bytes
    assert swapped.n_bytes <= most and (name == "windows" or swapped.n_bytes == most)
    text(engine, prompt(engine, 900, seed=1), 4)
    engine.reset(0)
    engine.copies.swap_in(1, swapped)
    assert engine.held(1) == held
    assert_same(kept(engine, 1), before)
    again = drafter_of(engine).draft(1, answer[-1], 7, 3)
    np.testing.assert_array_equal(again.tokens, draft.tokens)
    np.testing.assert_array_equal(again.log_p, draft.log_p)
    engine.speculation.begin(1, held)  # the drafters know what it holds
    assert_same(kept(engine, 1), before)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_prefix_brings_what_drafters_kept_of_it(
    open_engine: Open, tmp_path: Path, name: str
) -> None:
    """Prompts that part from one another early and late, in an order that overwrites rings."""
    engine = drafting(open_engine, tmp_path, name)
    ids, other = prompt(engine, 440), prompt(engine, 310, seed=1)
    asked = [
        (ids, (100, 360), 0),
        (other, (280,), 0),
        (np.concatenate([ids[:410], other[:30]]), (360,), 360),
        (np.concatenate([ids[:380], other[:30]]), (360,), 360),
        (np.concatenate([ids[:110], other[:200]]), (100,), 100),
        (np.concatenate([other[:290], ids[:30]]), (280,), 280),
        (ids[:430], (360,), 360),
    ]
    for at, (one, marks, n_reused) in enumerate(asked):
        answer, n = text(engine, one, 6, *marks)
        fresh = drafting(open_engine, tmp_path, name)
        wanted, _ = text(fresh, one, 6, *marks)
        assert (answer, n) == (wanted, n_reused), at
        got, want = kept(engine), kept(fresh)
        if name == "windows":  # a ring lost some before they were copied: it begins anew there
            want[:2] = [w[len(w) - len(g) :] for g, w in zip(got[:2], want[:2])]
            assert len(got[0]) >= min(40, len(one) - n_reused)
            assert at not in (2, 3) or len(got[0]) > 150
        assert_same(got, want)
        fresh.close()


def is_behind(engine: Engine) -> bool:
    """Return whether a drafter has not been told yet of tokens that sequence 0 took."""
    followed = engine.speculation._followed[0]
    return min(followed.known.values()) < len(followed.ids)


@pytest.mark.parametrize(
    ("name", "way"), [("mtp", "swap"), ("dflash", "share"), ("mtp", "save"), ("dflash", "save")]
)
def test_what_drafters_were_not_told_yet_is_copied_too(
    open_engine: Open, tmp_path: Path, name: str, way: str
) -> None:
    """The last tokens of an answer: drafters make K and V of them when they next draft."""
    engine = drafting(open_engine, tmp_path, name, n_seq=2, n_kv=-1)
    ids = prompt(engine, 400)
    text(engine, ids, 12)
    before = kept(engine)
    engine.prefixes.save(0)
    engine.reset(0)
    list(engine.generate(ids, max_tokens=12, text=False))  # the same again, without what is saved
    assert is_behind(engine)
    held = engine.held(0)[:]
    if way == "swap":
        engine.copies.swap_in(1, engine.copies.swap_out(0))
    else:
        if way == "save":
            for node in engine.prefixes.store.tree.nodes():  # as if there had been no room
                node.rows = None
            assert engine.prefixes.save(0)
            engine.reset(0)
        assert engine.prefixes.resume(1, np.array([*held, 7], np.int32)) == len(held)
    assert_same(kept(engine, 1), before)
