"""Prompt look-up against a search over the whole text."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from moegraph.draft.lookup import LookUp

N_MIN = 3


def searched(text: list[int], n: int) -> list[int]:
    """Return what followed the best of the latest 16 places where the last tokens occurred."""
    ends = [e for e in range(N_MIN, len(text)) if text[e - N_MIN : e] == text[-N_MIN:]]
    if not ends:
        return []

    def length(end: int) -> int:
        m = N_MIN
        while m < end and m < N_MIN + 32 and text[end - 1 - m] == text[-1 - m]:
            m += 1
        return m

    best = max(ends[-16:], key=lambda end: (length(end), end))
    found = list(text)
    for i in range(n):
        found.append(found[best + i])
    return found[len(text) :]


@pytest.mark.parametrize("n_vocab", [1, 2, 3, 8])
def test_drafts_are_those_of_a_search(n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    for _ in range(30):
        drafter, text = LookUp(n_seq=2, n_min=N_MIN), []
        prompt = rng.integers(0, n_vocab, rng.integers(0, 30)).astype(np.int32)
        half = len(prompt) // 2
        drafter.restart(1, prompt[:half])
        assert drafter.prompt_taps(1, prompt[half:], half) == {}
        text = prompt.tolist()
        for _ in range(25):
            anchor, n = int(rng.integers(0, n_vocab)), int(rng.integers(1, 12))
            draft = drafter.draft(1, anchor, n, 4)
            assert draft.tokens.shape[1] == 1 and draft.problem(n_vocab) == ""
            assert drafter.has(1, anchor) == (draft.n_depth > 0)
            assert draft.tokens[:, 0].tolist() == searched([*text, anchor], n)
            taken = [anchor, *rng.integers(0, n_vocab, rng.integers(0, 3)).tolist()]
            drafter.committed(1, len(text), taken)
            text += taken
            if rng.random() < 0.1:
                text = text[: int(rng.integers(0, len(text)))]
                drafter.truncate(1, len(text))
        assert drafter.draft(0, 1, 4, 1).n_depth == 0  # another sequence


def test_a_prompt_that_was_undone_is_forgotten() -> None:
    drafter = LookUp()
    drafter.restart(0, np.array([1, 2, 3, 4], dtype=np.int32))
    drafter.prompt_taps(0, np.array([5, 6, 7, 8], dtype=np.int32), 4)
    drafter.prompt_taps(0, np.array([9, 9, 2, 3], dtype=np.int32), 4)
    assert drafter.draft(0, 4, 4, 1).tokens[:, 0].tolist() == [9, 9, 2, 3]
    drafter.truncate(0, 4)
    drafter.committed(0, 4, [6, 2, 3])
    assert drafter.draft(0, 4, 2, 1).tokens[:, 0].tolist() == [6, 2]
    drafter.close()


def test_it_takes_microseconds() -> None:
    """A draft and a token more, after a long text with many places to compare."""
    rng, drafter = np.random.default_rng(0), LookUp(max_draft=8)
    drafter.restart(0, rng.integers(0, 30, 100_000).astype(np.int32))
    times = []
    for at, token in enumerate(rng.integers(0, 30, 1000).tolist(), 100_000):
        start = time.perf_counter()
        drafter.draft(0, token, 8, 1)
        drafter.committed(0, at, [token])
        times.append(time.perf_counter() - start)
    # the middle one, however busy the machine is: about 10 us; a search of the text takes 10 ms
    assert statistics.median(times) < 1e-3
