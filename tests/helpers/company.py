"""The logits of rows in company against those of the same rows alone, through an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.tree_shapes import chain, deep, forest, path
from moegraph.config import EngineConfig
from moegraph.engine import Engine

Logits = npt.NDArray[np.float32]
N_SEQ = 32
WIDTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32)
# Settings that decide what a row's result is.
_SHARED = ("device", "n_ctx", "n_ubatch", "n_threads", "deterministic")
# Sequences, rows of each, and how many of them count.
RAGGED = ((2, 4, (4, 1)), (3, 5, (5, 1, 3)), (4, 8, (8, 1, 5, 2)), (8, 4, (4, 1, 3, 2, 1, 4, 2, 1)))


def settings_for(share: int | None, n_all: int, **more: Any) -> dict[str, Any]:
    """Return the settings with a share of the experts, in percent, on the device; None: all."""
    place: dict[str, Any] = {"mode": "whole"}
    if share is not None:
        place = {"pin_layers": 0, "cache_slots": n_all * share // 100, "miss": "stream"}
    common = {"n_ctx": 256, "n_ubatch": 64, "n_threads": 4, "profile": "none"}
    return {"device": "cuda", "deterministic": True, **common, **place, **more}


@dataclass
class Result:
    """Rows of passes of one form: how many there were, how many differed, and the largest error."""

    n_rows: int = 0
    n_differ: int = 0
    worst: float = 0.0
    first: str = ""

    def add(self, got: Logits, wanted: Logits, what: str) -> None:
        """Compare a row."""
        self.n_rows += 1
        if got.tobytes() != wanted.tobytes():
            self.n_differ += 1
            self.worst = max(self.worst, float(np.abs(got - wanted).max()))
            self.first = self.first or what

    def __str__(self) -> str:
        return f"{self.n_differ}/{self.n_rows}" + (f" {self.worst:.1e}" if self.n_differ else "")


@dataclass
class Alone:
    """An engine with one sequence and all experts, which computes one row at a time."""

    engine: Engine
    _known: dict[tuple[int, ...], Logits] = field(default_factory=dict)
    _held: tuple[int, ...] = ()

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Return the logits after the last of some tokens."""
        wanted = tuple(tokens)
        if wanted not in self._known:
            if self._held != wanted[: len(self._held)] or len(self._held) >= len(wanted):
                self.engine.reset()
                self._held = ()
            for token in wanted[len(self._held) :]:
                self._held = (*self._held, token)
                self._known[self._held] = self.engine.forward([token]).require_logits()[0].copy()
        return self._known[wanted]


class Company:
    """Passes of every width and form through an engine of `N_SEQ` sequences."""

    def __init__(self, engine: Engine, alone: Alone) -> None:
        self.engine, self._alone = engine, alone
        self._rng = rng = np.random.default_rng(1)
        self._n_vocab = n_vocab = engine.hparams.n_vocab
        self._prefix = [rng.integers(0, n_vocab, 3 + slot % 5).tolist() for slot in range(N_SEQ)]
        for slot, tokens in enumerate(self._prefix):
            for token in tokens:
                engine.forward([token], slot)
        self._snapshots = [engine.copies.snapshot(slot) for slot in range(N_SEQ)]

    def close(self) -> None:
        """Free the snapshots."""
        for snapshot in self._snapshots:
            snapshot.close()

    def decode(self, width: int) -> Result:
        """One row of each of some sequences."""
        result, slots = Result(), self._rng.permutation(N_SEQ)[:width].tolist()
        tokens = self._rng.integers(0, self._n_vocab, (width, 1), np.int32)
        got = self.engine.forward(tokens, slots, all_rows=True).require_logits()
        for row, slot in enumerate(slots):
            wanted = self._alone.logits([*self._prefix[slot], int(tokens[row, 0])])
            result.add(got[row], wanted, f"decode of {width}, row {row}")
        for slot in slots:
            self.engine.copies.restore(self._snapshots[slot])
        return result

    def verify(self, width: int, form: str) -> Result:
        """A chain or a tree of rows of one sequence."""
        grow = {"chain": chain, "tree": deep, "forest": forest}[form]
        parents = grow(width, self._rng)
        tokens = self._rng.integers(0, self._n_vocab, (1, width))
        return self._verify(tokens, [0], [parents], [width], f"{form} of {width}")

    def ragged(self, n_seqs: int, n_rows: int, lengths: Sequence[int]) -> Result:
        """Trees of several sequences, of other lengths."""
        slots = self._rng.permutation(N_SEQ)[:n_seqs].tolist()
        parents = [(chain, deep, forest)[i % 3](n_rows, self._rng) for i in range(n_seqs)]
        tokens = self._rng.integers(0, self._n_vocab, (n_seqs, n_rows))
        return self._verify(tokens, slots, parents, lengths, f"{n_seqs} trees of {n_rows}")

    def _verify(
        self, tokens: npt.NDArray[np.int64], slots: list[int], parents: list[list[int]],
        lengths: Sequence[int], what: str,
    ) -> Result:  # fmt: skip
        result, passes = Result(), self.engine.passes
        passes.verify(tokens, slots, parents, list(lengths), greedy=False)
        got = passes.collect().require_logits().reshape(*tokens.shape, -1)
        for seq, slot in enumerate(slots):
            for row in range(lengths[seq]):
                taken = tokens[seq, path(parents[seq], row)].tolist()
                wanted = self._alone.logits(self._prefix[slot] + taken)
                result.add(got[seq, row], wanted, f"{what}, sequence {seq}, row {row}")
        return result

    def all_forms(self, widths: Sequence[int] = WIDTHS) -> Iterator[tuple[str, int, Result]]:
        """Yield form, rows and result of every pass."""
        for width in widths:
            yield "decode", width, self.decode(width)
            for form in ("chain", "tree", "forest"):
                yield form, width, self.verify(width, form)
        for n_seqs, n_rows, lengths in RAGGED:
            if n_seqs * n_rows <= max(widths):
                yield "ragged", n_seqs * n_rows, self.ragged(n_seqs, n_rows, lengths)


def open_company(
    stack: ExitStack, model: str | Path, config: dict[str, Any], alone: Alone
) -> Company:
    """Load the engine under test, with `N_SEQ` sequences."""
    engine = Engine.load(model, EngineConfig(**config, n_seq=N_SEQ, n_draft=N_SEQ - 1))
    stack.callback(engine.close)
    company = Company(engine, alone)
    stack.callback(company.close)
    return company
