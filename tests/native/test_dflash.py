"""DFlash and DSpark drafters: drafts equal a float64 reference, whatever the way to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import SMALL, write_small
from helpers.faults import FAULTS, faulty
from helpers.reference_dflash import ReferenceDrafter
from modelgen.drafter import DraftShape, values

from moegraph.draft.dflash import DFlashDrafter
from moegraph.draft.drafter import Draft
from moegraph.engine import Engine
from moegraph.ggml.handles import live_handles
from moegraph.ggml.lib import C
from moegraph.modelfile import open_model
from moegraph.modelfile.draftfile import open_drafter
from moegraph.resident.draftlayout import dflash_bytes
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
PRESET, N_VOCAB = "float32", 1024
# Of log probabilities down to -60. The cache is F16, and ggml's CPU kernel adds values in F16.
TOLERANCE, COARSE = 0.12, 0.4
CHANGES: dict[str, dict[str, Any]] = {
    "window": {},
    "causal": {"is_causal": True},
    "yarn": {"windows": "fff", "n_swa": 0, "yarn_factor": 64.0, "yarn_orig": 64},
    "tiny window": {"n_swa": 5},
    "dspark": {"markov_rank": 32},
    "reduced": {"markov_rank": 32, "n_vocab_draft": 300, "samples_anchor": False},
    "no confidence": {"markov_rank": 32, "has_confidence": False},
}


class Pair:
    """A target with a drafter, and the reference, which all see the same tokens."""

    def __init__(
        self, open_engine: Open, model_path: Callable[[str], Path], folder: Path,
        kind: str = "dflash", matrices: str = "F32", as_stored: bool = True,
        settings: dict[str, Any] | None = None, **changes: Any,
    ) -> None:  # fmt: skip
        changes = {"taps": (3, 0, 4), **changes}
        self.engine = open_engine(PRESET, **(settings or {}))
        self.plain = open_engine(PRESET)
        path = write_small(folder, kind, matrices, **changes)
        self.file = file = open_drafter(path)
        with open_model(model_path(PRESET)) as target:
            file.require_target(target)
        self.shape: DraftShape = replace(SMALL, **changes)
        stage, runner = self.engine.stage, self.engine.runner
        runner.graphs.clear()
        stage.taps.reserve(self.shape.taps, 33)
        self._as_stored = as_stored
        self.drafter = self.again()
        self.drafter.reserve()
        embedding = stage.weights.embedding
        assert embedding is not None
        table = np.empty((N_VOCAB, self.shape.n_embd), np.float32)
        embedding.rows(np.arange(N_VOCAB, dtype=np.int32), table)
        table = table.astype(np.float64)
        weights = {k: v.astype(np.float64) for k, v in values(self.shape, 3) if k != "d2t"}
        weights |= {k: v for k, v in values(self.shape, 3) if k == "d2t"}
        self.reference = ReferenceDrafter(self.shape, weights, table, table)  # its head is tied
        self.rng = np.random.default_rng(5)

    def again(self) -> DFlashDrafter:
        """Open the drafter once more."""
        return DFlashDrafter(self.engine.stage, self.file, 512, as_stored=self._as_stored)

    def close(self) -> None:
        self.drafter.close()
        self.file.close()

    def tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(0, N_VOCAB, n).astype(np.int32)

    def _note(self, ids: np.ndarray) -> None:
        """Have the reference see tokens that the sequence takes."""
        for start in range(0, len(ids), 64):
            first = self.plain.state.n_past[0]
            part = ids[start : start + 64]
            nodes = self.plain.forward_nodes(part, first)
            for i in range(len(part)):
                taps = [nodes["l_out", il][i] for il in self.shape.taps]
                self.reference.taps[first + i] = np.concatenate(taps).astype(np.float64)

    def prompt(self, n: int) -> None:
        """Read a prompt with a sweep."""
        ids, first = self.tokens(n), self.engine.state.n_past[0]
        taps = self.drafter.prompt_taps(0, ids, first)
        sweep = self.engine.passes.begin_prompt(SweepBatch(ids, taps=taps, greedy=True))
        while self.engine.passes.step_prompt(sweep):
            pass
        self._note(ids)

    def decode(self, n: int) -> None:
        """Take n tokens one by one."""
        for token in self.tokens(n).tolist():
            self.engine.forward([token])
            self.drafter.committed(0, [token], [0])
            self._note(np.array([token], np.int32))

    def verify(self, path: list[int], n: int = 6) -> None:
        """Verify a chain with a sibling, and take a path."""
        ids = self.tokens(n)
        self.engine.passes.verify(ids[None], 0, [[-1, 0, 0, *range(2, n - 1)]])
        self.engine.collect()
        self.engine.passes.commit({0: path})
        taken = ids[path]
        self.drafter.committed(0, taken.tolist(), path)
        self._note(taken)

    def check(self, n: int | None = None, tolerance: float = TOLERANCE) -> Draft:
        """Compare a draft with the reference."""
        n = n or self.drafter.max_draft
        anchor, n_past = int(self.tokens(1)[0]), self.engine.state.n_past[0]
        got = self.drafter.draft(0, anchor, n, 5)
        log_p, sure = self.reference.draft(anchor, n_past, n)
        assert got.tokens.shape == (n, 5) and got.log_p is not None
        assert got.problem(N_VOCAB) == ""
        draft_ids = got.tokens
        if self.shape.n_vocab_draft:
            draft_ids = np.searchsorted(self.reference.weights["d2t"], got.tokens)
        wanted = np.take_along_axis(log_p, draft_ids.astype(np.int64), 1)
        np.testing.assert_allclose(got.log_p, wanted, atol=tolerance)
        best = np.sort(log_p, axis=1)[:, ::-1][:, :5]
        np.testing.assert_allclose(got.log_p, best, atol=tolerance)
        assert (got.confidence is None) == (sure is None)
        if sure is not None and got.confidence is not None:
            np.testing.assert_allclose(got.confidence, sure, atol=tolerance)
        return got


@pytest.fixture
def pair(open_engine: Open, model_path: Callable[[str], Path], tmp_path: Path) -> Any:
    """Return a function that makes a pair, closed after the test."""
    with ExitStack() as stack:

        def make(**changes: Any) -> Pair:
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            made = Pair(open_engine, model_path, folder, **changes)
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize("name", CHANGES)
def test_drafts_equal_the_reference(pair: Callable[..., Pair], name: str) -> None:
    """Over prompts, decoded tokens and verified ones, until the window has wrapped around."""
    both, off = pair(**CHANGES[name]), COARSE if name == "yarn" else TOLERANCE
    both.check(tolerance=off)
    both.prompt(20)
    both.check(tolerance=off)
    both.check(3, off)
    both.decode(3)
    both.check(tolerance=off)
    both.verify([0, 2, 3])
    both.verify([0])
    both.check(tolerance=off)
    both.prompt(280)
    both.check(tolerance=off)
    both.verify([0, 1])
    both.check(1, off)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("tiny window", {"n_swa": 4}),
        ("causal", {"is_causal": False}),
        ("yarn", {"yarn_orig": 128}),
        ("window", {"windows": "fs"}),
        ("window", {"mask_id": 991}),
        ("window", {"taps": (0, 3, 4)}),
    ],
)
def test_the_reference_tells_settings_apart(
    pair: Callable[..., Pair], name: str, other: dict[str, Any]
) -> None:
    both = pair(**CHANGES[name])
    both.prompt(60)
    right, _ = both.reference.draft(7, 60, 7)
    changed = replace(both.reference, s=replace(both.shape, **other))
    if "taps" in other:
        changed.taps = {p: np.roll(tap, 256) for p, tap in both.reference.taps.items()}
    wrong, _ = changed.draft(7, 60, 7)
    assert np.abs(right - wrong).max() > 5 * (COARSE if name == "yarn" else TOLERANCE)


@pytest.mark.parametrize("kind", ["dflash-draft", "qwen35-dflash-draft", "safetensors"])
def test_every_format_drafts_the_same(pair: Callable[..., Pair], kind: str) -> None:
    drafts = []
    for both in (pair(), pair(kind=kind)):
        both.prompt(40)
        drafts.append(both.check())
    np.testing.assert_array_equal(drafts[0].tokens, drafts[1].tokens)
    np.testing.assert_array_equal(drafts[0].log_p, drafts[1].log_p)


@pytest.mark.parametrize(
    ("matrices", "as_stored", "tolerance"),
    [("BF16", True, 4.0), ("F16", True, 1.0), ("BF16", False, 6.0), ("Q8_0", False, 6.0)],
)
def test_other_types_of_weights(
    pair: Callable[..., Pair], matrices: str, as_stored: bool, tolerance: float
) -> None:
    both = pair(matrices=matrices, as_stored=as_stored)
    both.prompt(40)
    draft = both.check(tolerance=tolerance)
    log_p, _ = both.reference.draft(0, 40, 7)
    assert draft.n_depth == len(log_p)
    kinds = {int(t.type) for name, t in both.drafter._weights.tensors.items() if "ffn_up" in name}
    stored = {"BF16": C.GGML_TYPE_BF16, "F16": C.GGML_TYPE_F16, "Q8_0": C.GGML_TYPE_Q8_0}[matrices]
    assert kinds == {stored if as_stored else C.GGML_TYPE_Q8_0}


@pytest.mark.parametrize("settings", [
    {"mode": "layered"},
    {"cache_slots": 40, "pin_layers": 0, "miss": "stream"},
    {"cache_slots": 40, "pin_layers": 0, "miss": "cpu"},
])  # fmt: skip
def test_drafts_where_experts_are_missing(pair: Callable[..., Pair], settings: Any) -> None:
    both = pair(settings=settings)
    both.prompt(50)
    both.check()
    both.decode(2)
    both.verify([0, 2])
    both.check()


def test_a_long_prompt_in_parts_and_chunks(pair: Callable[..., Pair]) -> None:
    """More rows than the ring holds, in chunks that wrap around."""
    both = pair(windows="ss", n_swa=100)
    both.prompt(440)
    both.check()
    both.prompt(30)
    both.check()


def test_truncated_and_restarted_sequences(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.prompt(40)
    both.decode(4)
    drafter, state = both.drafter, both.engine.state
    both.check()
    # as if the last two tokens had been taken back
    drafter.truncate(0, 42)
    spans = drafter._rings.spans[0]
    assert (spans.first, spans.n_past) == (0, 42)
    got = drafter.draft(0, 7, 7, 3)
    log_p, _ = both.reference.draft(7, 42, 7)
    wanted = np.take_along_axis(log_p, got.tokens.astype(np.int64), 1)
    np.testing.assert_allclose(got.log_p, wanted, atol=TOLERANCE)
    # a beginning whose rows the drafter has not seen
    drafter.restart(0, np.zeros(44, np.int32))
    both.reference.taps.clear()
    assert state.n_past[0] == 44
    both.check()
    both.decode(3)
    both.check()
    drafter.truncate(0, 10)
    assert (spans.first, spans.n_past) == (10, 10)


def test_sequences_have_rings_of_their_own(pair: Callable[..., Pair]) -> None:
    both = pair(settings={"n_seq": 2})
    both.prompt(30)
    first = both.drafter.draft(0, 7, 7, 4)
    ids = np.arange(20, dtype=np.int32)
    taps = both.drafter.prompt_taps(1, ids, 0)
    sweep = both.engine.passes.begin_prompt(SweepBatch(ids, slot=1, taps=taps, greedy=True))
    while both.engine.passes.step_prompt(sweep):
        pass
    other = both.drafter.draft(1, 7, 7, 4)
    again = both.drafter.draft(0, 7, 7, 4)
    np.testing.assert_array_equal(again.log_p, first.log_p)
    assert (np.asarray(other.log_p) != np.asarray(first.log_p)).any()


def test_memory_is_as_planned(pair: Callable[..., Pair], tmp_path: Path) -> None:
    for n, changes in enumerate(({}, {"markov_rank": 32, "n_vocab_draft": 300})):
        both = pair(**changes)
        file = open_drafter(write_small(tmp_path / f"again{n}", taps=(3, 0, 4), **changes))
        planned = dflash_bytes(file, N_VOCAB, 512, 1, 512, True)
        file.close()
        taken = both.drafter.n_bytes
        assert taken <= planned < 2 * taken
        assert "taps: outputs of layers 3, 0, 4" in both.drafter.describe()


def test_a_drafter_that_does_not_fit_leaves_nothing_open(pair: Callable[..., Pair]) -> None:
    """Every native call of opening a drafter may fail."""
    both = pair()
    before = live_handles()
    for name, (result, error) in FAULTS.items():
        for at in (1, 2, 3):
            with faulty(name, at, result) as library:
                try:
                    both.again().close()
                except error:
                    assert library.n_calls >= at
            assert live_handles() == before, (name, at)
