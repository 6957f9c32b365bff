"""Prompt look-up against a search over the whole text."""

from __future__ import annotations

import numpy as np
import pytest

from moegraph.draft.lookup import LookUp

N_MIN = 3


def searched(text: list[int], n: int) -> list[int]:
    """Return what followed the latest place where the last tokens occurred."""
    ends = [e for e in range(N_MIN, len(text)) if text[e - N_MIN : e] == text[-N_MIN:]]
    if not ends:
        return []
    found = list(text)
    for i in range(n):
        found.append(found[ends[-1] + i])
    return found[len(text) :]


def followed(text: list[int], n_prompt: int, n: int) -> list[int]:
    """Return the draft after a text whose tokens from n_prompt on came one by one."""
    drafter = LookUp()
    drafter.restart(0, np.array(text[:n_prompt], dtype=np.int32))
    drafter.committed([(0, n_prompt, text[n_prompt:-1])])
    return drafter.draft(0, text[-1], n, 1).tokens[:, 0].tolist()


@pytest.mark.parametrize("n_vocab", [1, 2, 3, 8])
def test_drafts_are_those_of_a_search(n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    for _ in range(300):
        text = rng.integers(0, n_vocab, rng.integers(1, 60)).tolist()
        drafter, half = LookUp(n_seq=2), len(text) // 2
        drafter.restart(1, np.array(text[:half], dtype=np.int32))
        assert drafter.prompt_readers(1, np.array(text[half:-1], dtype=np.int32), half) == {}
        draft = drafter.draft(1, text[-1], n := int(rng.integers(1, 12)), 4)
        assert draft.tokens.shape[1] == 1 and draft.problem(n_vocab) == ""
        assert drafter.pays(1, text[-1], {2: 0.0}) == (draft.n_depth > 0)
        sure = draft.confidence if draft.confidence is not None else np.zeros(0)
        tokens = 1.0 + np.cumsum(np.cumprod(sure, dtype=np.float64))
        for scale in (0.97, 1.31, 1.63, 1.87):  # as long as one width gives more than it needs
            least = {m + 1: scale * m**0.7 + 0.5 for m in range(1, draft.n_depth + 1)}
            worth = [tokens[m - 2] > needed for m, needed in least.items()]
            assert drafter.pays(1, text[-1], least) == any(worth)
        assert draft.tokens[:, 0].tolist() == searched(text, n)
        assert drafter.draft(0, text[-1], n, 1).n_depth == 0  # another sequence


def test_a_copy_goes_on_without_a_search() -> None:
    """Also after a single token that was another one, but not after two."""
    prompt = [*range(10, 40), *range(5)]
    assert followed([*prompt, 10, 11, 12], 35, 3) == [13, 14, 15]
    assert followed([*prompt, 10, 11, 12, 13, 90], 35, 3) == [15, 16, 17]
    assert followed([*prompt, 10, 11, 12, 13, 90, 15], 35, 3) == [16, 17, 18]
    assert followed([*prompt, 10, 11, 12, 13, 90, 91], 35, 3) == []
    # where the text has three tokens of another place, it goes on as there
    assert followed([*prompt, 10, 11, 12, 30, 31, 32], 35, 3) == [33, 34, 35]
    assert followed([1, 2] * 4, 0, 5) == [1, 2, 1, 2, 1]


def sure(drafter: LookUp, anchor: int, n: int) -> list[float]:
    """Return how sure a draft is of each of its tokens."""
    found = drafter.draft(0, anchor, n, 1).confidence
    assert found is not None and len(found) == n
    return found.tolist()


def test_a_draft_is_as_sure_as_such_drafts_were_right() -> None:
    copied, wrong = LookUp(), LookUp()
    text = np.random.default_rng(0).permutation(400).astype(np.int32)
    copied.restart(0, text)
    copied.committed([(0, 400, text[:300].tolist())])
    assert min(sure(copied, int(text[300]), 15)) > 0.97
    hopeless = [1, 2, 3, 9]
    for token in range(30):  # three tokens are never followed by the same one
        hopeless += [1, 2, 3, 10 + token]
    wrong.committed([(0, 0, hopeless)])
    wrong.committed([(0, len(hopeless), [1, 2])])
    assert sure(wrong, 3, 5)[0] < 0.1


def test_what_all_records_have_in_common_is_surer_than_what_differs() -> None:
    drafter = LookUp()
    for n in range(40):
        record = [1, 2, 3, 4, 5, 6, 7, 100 + n, 8, 9, 10, 11]
        drafter.committed([(0, 12 * n, record)])
    drafter.committed([(0, 480, [1, 2])])
    found = sure(drafter, 3, 9)
    assert min(found[:4]) > 0.9 and found[4] < 0.2


def test_a_prompt_that_was_undone_is_forgotten() -> None:
    drafter = LookUp()
    drafter.restart(0, np.array([1, 2, 3, 4], dtype=np.int32))
    drafter.prompt_readers(0, np.array([5, 6, 7, 8], dtype=np.int32), 4)
    drafter.prompt_readers(0, np.array([9, 9, 2, 3], dtype=np.int32), 4)
    assert drafter.draft(0, 4, 4, 1).tokens[:, 0].tolist() == [9, 9, 2, 3]
    drafter.truncate(0, 4)
    drafter.committed([(0, 4, [6, 2, 3])])
    assert drafter.draft(0, 4, 2, 1).tokens[:, 0].tolist() == [6, 2]
    drafter.close()
