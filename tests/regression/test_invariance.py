"""Ours against ours: what must not change the numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from regression.compare import OTHER_FACTOR, margins
from regression.harness import (
    KV_TYPES,
    MODELS,
    Models,
    Upstream,
    held_out_text,
    open_engine,
    our_logits,
    random_ids,
)

if TYPE_CHECKING:
    from moegraph.engine import Engine

# Rows of the passes; 560 positions reach the kernels that change at 512.
WIDTHS = (1, 7, 8, 9, 64, 300, 560)
N = 560


def final_state(engine: Engine, position: int) -> dict[tuple[str, int], Any]:
    """Return the recurrent states after one more row; they hold all that came before."""
    nodes = engine.forward_nodes([1], pos0=position)
    return {key: value for key, value in nodes.items() if key[0] == "new_state"}


def run_widths(engine: Engine, ids: Sequence[int], widths: Sequence[int]) -> Any:
    """Yield (width, logits, states) of the same ids in passes of each width."""
    for width in widths:
        logits = our_logits(engine, ids, width)
        yield width, logits, final_state(engine, len(ids))


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_reference_mode_gives_the_same_bits_at_every_width_and_thread_count(
    name: str, kv: str, models: Models
) -> None:
    path = models.path(name)
    settings = {"cpu_reference": True, "type_k": kv, "type_v": kv, "n_ubatch": N}
    with open_engine(path, n_threads=2, **settings) as engine:
        ids = random_ids(engine.hparams.n_vocab, N)
        _, logits, states = next(run_widths(engine, ids, [N]))
        for width, again, states_again in run_widths(engine, ids, WIDTHS[:-1]):
            first = np.flatnonzero((logits != again).any(axis=1))
            assert first.size == 0, f"{name} {kv}: width {width} differs from row {first[0]} on"
            for key, value in states.items():
                assert np.array_equal(value, states_again[key]), f"{name} width {width}: {key}"
    with open_engine(path, n_threads=1, mode="layered", **settings) as engine:
        for width in (1, N):
            same = np.array_equal(our_logits(engine, ids, width), logits)
            assert same, f"{name} {kv}: one thread, layered, width {width}"


@pytest.mark.parametrize("name", MODELS)
def test_reference_mode_does_not_depend_on_uneven_chunks(name: str, models: Models) -> None:
    cuts = [0, 1, 4, 5, 13, 77, 78, 205, 300]
    with open_engine(models.path(name), cpu_reference=True) as engine:
        ids = random_ids(engine.hparams.n_vocab, cuts[-1])
        whole = our_logits(engine, ids)
        engine.reset()
        pairs = zip(cuts[:-1], cuts[1:], strict=True)
        rows = [engine.forward_logits(ids[a:b], pos0=a) for a, b in pairs]
    assert np.array_equal(np.concatenate(rows), whole)


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_default_mode_gives_the_same_bits_in_both_modes_and_again(
    name: str, kv: str, models: Models
) -> None:
    """Same widths and threads: neither the number of graphs nor their cache may show."""
    path = models.path(name)
    got = []
    for mode in ("whole", "layered"):
        with open_engine(path, mode=mode, type_k=kv, type_v=kv) as engine:
            ids = random_ids(engine.hparams.n_vocab, 130)
            for _ in range(2):
                rows = [our_logits(engine, ids, 64)]
                rows += [engine.forward_logits([t], pos0=130 + i) for i, t in enumerate(ids[:16])]
                got.append(np.concatenate(rows))
    assert all(np.array_equal(rows, got[0]) for rows in got[1:]), f"{name} {kv}"


def greedy(engine: Engine, prompt: Sequence[int], n: int, width: int) -> tuple[list[int], Any]:
    """Return n greedy tokens, the prompt run in passes of `width`, and the margin of each."""
    logits = our_logits(engine, prompt, width)[-1:]
    tokens, gaps = [], []
    for i in range(n):
        tokens.append(int(logits.argmax()))
        gaps.append(float(margins(logits)[0]))
        logits = engine.forward_logits(tokens[-1:], pos0=len(prompt) + i)
    return tokens, gaps


@pytest.mark.parametrize("name", ("tiny", "legacy32", "kquant40"))
def test_default_mode_parts_from_another_width_only_at_near_ties(
    name: str, models: Models, upstream: Upstream
) -> None:
    """The tolerance is what upstream's own logits move between the two widths, twice."""
    path = models.path(name)
    text = upstream.oracle.tokenize(path, held_out_text())
    parted = []
    with open_engine(path) as engine:
        for i in range(6):
            prompt = text[211 * i : 211 * i + 65]
            wide = upstream.logits(path, prompt, n_ctx=1024)
            narrow = upstream.logits(path, prompt, n_ctx=1024, n_ubatch=1)
            tolerance = 2 * OTHER_FACTOR * float(np.abs(wide - narrow).max())
            plain, gaps = greedy(engine, prompt, 48, 65)
            other, _ = greedy(engine, prompt, 48, 1)
            at = next((k for k in range(48) if plain[k] != other[k]), None)
            if at is not None:
                parted.append((i, at, gaps[at], tolerance))
    print(f"{name}: (prompt, token, margin, tolerance) where greedy text parts: {parted}")
    assert all(gap <= tolerance for _, _, gap, tolerance in parted), parted
