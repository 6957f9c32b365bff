"""Steps without drafts of an engine that has drafters: what they cost, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import write_small
from helpers.scripted_drafts import AnyController
from helpers.shared import prompt

from moegraph.draft.plan import PLAIN, Plan
from moegraph.engine import Engine
from moegraph.kinds import MOST_BEHIND
from moegraph.passes.speculation import Speculation
from moegraph.runner.inspect import read_tensor

Open = Callable[..., Engine]
PRESETS = {"mtp": "mini35b", "dflash": "legacy32"}


class Bursts(AnyController):
    """Drafts now and then: many plain steps, then a few with drafts."""

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        at = len(self.steps) % (MOST_BEHIND + 30)
        return PLAIN if 3 < at < MOST_BEHIND + 20 else super().choose(n_left, without)


def opened(open_engine: Open, folder: Path, source: str, **settings: Any) -> Engine:
    """Open an engine in reference mode that has a drafter."""
    chosen = {"cpu_reference": True, "n_draft": 7, "n_ctx": 1024, **settings}
    if source == "mtp":
        return open_engine(PRESETS[source], spec="mtp", **chosen)
    path = write_small(folder, windows="ff")
    return open_engine(PRESETS[source], spec="dflash", draft=str(path), **chosen)


def text(engine: Engine, ids: Sequence[int] | np.ndarray, n: int) -> list[int]:
    """Return the tokens of an answer."""
    events = engine.generate(
        np.asarray(ids, np.int32), max_tokens=n, text=False, ignore_eos=True, reuse=True
    )
    return [event.token for event in events]


def kept(engine: Engine) -> list[np.ndarray]:
    """Return K and V of the drafter, of all positions."""
    assert engine.speculation
    engine.speculation.settle(0)
    [drafter] = engine._loaded.drafters
    n, stage = len(engine.held(0)), engine._loaded.stages[-1]
    if drafter.name == "mtp":
        state, il = stage.state, engine.hparams.n_layer
        rows = state.pool.rows(np.array(0), np.arange(n))
        return [read_tensor(t)[rows].copy() for t in (state.k[il], state.v[il])]
    rings = drafter._rings
    assert rings.spans[0].n_past == n
    return [
        read_tensor(t[il])[rings.rows(kind, 0, np.arange(n))].copy()
        for il, kind in enumerate(rings.kind)
        for t in (rings.k, rings.v)
    ]


@pytest.mark.parametrize(("source", "device"), [("mtp", "cpu"), ("dflash", "cpu,cpu")])
def test_drafts_that_are_switched_on_and_off_lose_nothing(
    open_engine: Open, tmp_path: Path, source: str, device: str
) -> None:
    """The text is that without drafts; the drafter's K and V are those of the text as a prompt."""
    plain = open_engine(PRESETS[source], cpu_reference=True, n_ctx=1024)
    engine = opened(open_engine, tmp_path, source, device=device)
    controller = Bursts([source], ("chain",), n_draft=5)
    n_vocab = engine.hparams.n_vocab
    engine.speculation = Speculation(engine._loaded.drafters, controller, n_vocab, 8)
    ids: list[int] = prompt(plain, 40).tolist()
    for n in (150, 130):  # the second text goes on where the first one ended
        wanted = text(plain, ids, n)
        assert text(engine, ids, n) == wanted
        ids = [*ids, *wanted, 5, 6, 7]
    n_drafted = sum(step.n_rows > 1 for step in controller.steps)
    assert 4 < n_drafted < len(controller.steps) / 4
    again = opened(open_engine, tmp_path, source)
    text(again, engine.held(0), 1)
    for got, want in zip(kept(engine), kept(again), strict=True):
        assert want.any()
        np.testing.assert_array_equal(got, want)
