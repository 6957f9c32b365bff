"""A target with a drafter of random weights, and the float64 reference that sees the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from modelgen.drafter import DraftShape, values

from helpers.drafters import SMALL, write_small
from helpers.reference_dflash import ReferenceDrafter
from moegraph.arch import open_model
from moegraph.arch.draftfile import open_drafter
from moegraph.draft.dflash import DFlashDrafter, DSparkDrafter
from moegraph.draft.drafter import Draft
from moegraph.engine import Engine
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
        changes = {"target_layers": (3, 0, 4), **changes}
        self.engine = open_engine(PRESET, **(settings or {}))
        self.plain = open_engine(PRESET)
        path = write_small(folder, kind, matrices, **changes)
        self.file = file = open_drafter(path)
        with open_model(model_path(PRESET)) as target:
            file.require_target(target)
        self.shape: DraftShape = replace(SMALL, **changes)
        stage, runner = self.engine.stage, self.engine.runner
        runner.graphs.clear()
        stage.hidden_states.reserve(self.shape.target_layers, 33, stage.state.n_seq)
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
        kind = DSparkDrafter if self.shape.markov_rank else DFlashDrafter
        return kind(self.engine.stage, self.file, 512, as_stored=self._as_stored)

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
                outputs = [nodes["l_out", il][i] for il in self.shape.target_layers]
                self.reference.features[first + i] = np.concatenate(outputs).astype(np.float64)

    def prompt(self, n: int) -> None:
        """Read a prompt with a sweep."""
        ids, first = self.tokens(n), self.engine.state.n_past[0]
        readers = self.drafter.prompt_readers(0, ids, first)
        sweep = self.engine.passes.begin_prompts([SweepBatch(ids, readers=readers, greedy=True)])
        while self.engine.passes.step_prompt(sweep):
            pass
        self._note(ids)

    def decode(self, n: int) -> None:
        """Take n tokens one by one."""
        for token in self.tokens(n).tolist():
            self.engine.forward([token])
            self.drafter.committed([(0, self.engine.state.n_past[0] - 1, [token])])
            self._note(np.array([token], np.int32))

    def verify(self, path: list[int], n: int = 6) -> None:
        """Verify a chain with a sibling, and take a path."""
        ids = self.tokens(n)
        self.engine.passes.verify(ids[None], 0, [[-1, 0, 0, *range(2, n - 1)]])
        self.engine.collect()
        self.engine.passes.commit({0: path})
        taken = ids[path]
        self.drafter.committed([(0, self.engine.state.n_past[0] - len(path), taken.tolist())])
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


@contextmanager
def pairs(
    open_engine: Open, model_path: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[..., Pair]]:
    """Give a function that makes a pair, closed at the end."""
    with ExitStack() as stack:

        def make(**changes: Any) -> Pair:
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            made = Pair(open_engine, model_path, folder, **changes)
            stack.callback(made.close)
            return made

        yield make
