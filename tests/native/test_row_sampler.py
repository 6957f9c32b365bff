"""Tokens chosen from what the device lists are those of a plain sampler that sorts whole rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.candidates_case import CandidatesBench, check_passes, rows_of_logits
from helpers.reference_sampler import choose

from moegraph.draft.race import Odds
from moegraph.engine import Engine
from moegraph.errors import RequestError
from moegraph.ggml.device import Device
from moegraph.loop.choice import RowSampler
from moegraph.sampling import Sampler, SamplingParams

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
N_VOCAB = 3000
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "no-top-k": {"temperature": 1.0, "top_k": 0},
    "whole": OFF,
    "hot": {**OFF, "temperature": 3.0},
    "cold": {**OFF, "temperature": 0.05},
    "freezing": {**OFF, "temperature": 1e-30},
    "top-k-1": {**OFF, "top_k": 1},
    "top-k-100": {**OFF, "top_k": 100},
    "top-k-1000": {**OFF, "top_k": 1000},
    "top-k-300-top-p": {**OFF, "top_k": 300, "top_p": 0.9},
    "top-p": {**OFF, "top_p": 0.95},
    "top-p-half": {**OFF, "top_p": 0.5, "temperature": 1.5},
    "top-p-0": {**OFF, "top_p": 0.0},
    "min-p": {**OFF, "min_p": 0.05},
    "min-p-1": {**OFF, "min_p": 1.0},
    "min-p-small": {**OFF, "min_p": 1e-4},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "penalties-whole": {**OFF, "repeat_penalty": 1.2, "repeat_last_n": 400},
    "penalties-up": {**OFF, "top_p": 0.8, "repeat_penalty": 0.8, "presence_penalty": -2.0},
    "penalties-greedy": {"temperature": 0.0, "repeat_penalty": 2.0},
    "typical": {"typical_p": 0.6},
    "typical-all": {**OFF, "typical_p": 0.9, "top_k": 60, "repeat_penalty": 1.2},
    "typical-greedy": {"temperature": 0.0, "typical_p": 0.3},
    "typical-whole": {**OFF, "typical_p": 0.9},
    "bias": {**OFF, "top_p": 0.9, "logit_bias": {5: 3.0, 7: -math.inf, 11: -2.0}},
    "bias-greedy": {"temperature": 0.0, "logit_bias": {9: 40.0, 2: -math.inf}},
    "all": {
        "top_k": 200, "top_p": 0.97, "min_p": 0.01, "temperature": 1.2, "repeat_penalty": 1.1,
        "frequency_penalty": 0.3, "presence_penalty": 0.7,
        "logit_bias": dict.fromkeys(range(0, 600, 7), 1.5),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    opened = Device("cpu", n_threads=2)
    yield opened
    opened.close()


class Text:
    """A sampler with its rows, beside the reference."""

    def __init__(self, bench: CandidatesBench, params: SamplingParams) -> None:
        self.bench, self.params = bench, params
        self.rows = RowSampler(params, bench.n_vocab)
        self.tokens: list[int] = []

    def start(self, prompt: list[int]) -> None:
        self.rows.accept_all(prompt)
        self.tokens = list(prompt)

    def step(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> tuple[int, int]:
        """Return the token of the next row, and the reference's."""
        draw = self.rows.draw()
        found = None if draw is None else self.bench.run(logits, draw)[0]
        self.rows.prepare()
        token = self.rows.sample(found, lambda: logits, allowed)
        expected = choose(logits, self.params, len(self.tokens), self.tokens, allowed)
        self.rows.accept(token)
        self.tokens.append(token)
        return token, expected


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_draws_the_reference_token(name: str, device: Device) -> None:
    rng = np.random.default_rng(len(name))
    with CandidatesBench(device, N_VOCAB) as bench:
        for kind in rows_of_logits(N_VOCAB, rng):
            text = Text(bench, SamplingParams(**SETTINGS[name], seed=int(rng.integers(1 << 31))))
            text.start(rng.integers(0, N_VOCAB, 30).tolist())
            for _ in range(4):
                logits = rows_of_logits(N_VOCAB, rng)[kind]
                token, expected = text.step(logits)
                assert token == expected, kind
                # likely tokens come again, so that penalties meet candidates
                text.rows.accept(int(logits.argmax()))
                text.tokens.append(int(logits.argmax()))


def test_usual_rows_are_not_read_as_a_whole(device: Device) -> None:
    """The settings that people use decide from the lists."""
    rng = np.random.default_rng(3)
    with CandidatesBench(device, N_VOCAB) as bench:
        for name in ("defaults", "greedy", "top-p", "min-p", "penalties", "typical", "bias"):
            text = Text(bench, SamplingParams(**SETTINGS[name], seed=1))
            text.start([1, 2, 3])
            for _ in range(20):
                text.step((rng.standard_normal(N_VOCAB) * 2).astype(np.float32))
            assert text.rows.n_whole <= 2, name


def test_what_the_lists_cannot_decide_takes_whole_rows() -> None:
    many = dict.fromkeys(range(509), 1.0)
    assert RowSampler(SamplingParams(logit_bias=many), N_VOCAB).draw() is None
    assert RowSampler(SamplingParams(typical_p=0.5, top_k=0), N_VOCAB).draw() is None
    rows = RowSampler(SamplingParams(repeat_penalty=1.1, repeat_last_n=100_000), N_VOCAB)
    rows.accept_all(list(range(508)))
    assert rows.draw() is not None and rows.draw([1]) is None
    assert rows.draw_each([[]]) is not None and rows.draw_each([[], [1]]) is None
    rows.accept(1)
    assert rows.draw() is None
    rng, params = np.random.default_rng(8), SamplingParams(**OFF, seed=3)
    rows, plain = RowSampler(params, N_VOCAB), Sampler(params, N_VOCAB)
    for _ in range(20):
        logits = (rng.standard_normal(N_VOCAB) * 3).astype(np.float32)
        token = rows.sample(None, lambda logits=logits: logits)
        assert token == plain.sample(logits)
        rows.accept(token)
        plain.accept(token)


def test_a_mask_leaves_only_allowed_tokens(device: Device) -> None:
    rng = np.random.default_rng(4)
    with CandidatesBench(device, N_VOCAB) as bench:
        for name, settings in SETTINGS.items():
            text = Text(bench, SamplingParams(**settings, seed=1))
            text.start([1, 2, 3])
            for share in (0.9, 0.5, 0.01):
                allowed = rng.random(N_VOCAB) < share
                allowed[100] = True  # not one that a bias bans
                logits = (rng.standard_normal(N_VOCAB) * 2).astype(np.float32)
                token, expected = text.step(logits, allowed)
                assert token == expected and allowed[token], name
            with pytest.raises(RequestError, match="excludes every token"):
                text.step(logits, np.zeros(N_VOCAB, dtype=bool))


def test_a_token_offered_at_random_is_not_taken_if_it_is_not_allowed() -> None:
    logits, allowed = np.zeros(N_VOCAB, np.float32), np.zeros(N_VOCAB, bool)
    logits[7], allowed[9] = 20.0, True
    rows = RowSampler(SamplingParams(**OFF, seed=3), N_VOCAB)
    odds = Odds(7, np.array([7], np.int32), np.ones(1))
    assert rows.judge(odds, logits) == 7 and rows.judge(odds, logits, allowed) == 9


def test_rows_of_a_draft_draw_what_single_rows_draw(device: Device) -> None:
    """The rows are described before any is sampled, with the drafted tokens before them."""
    rng = np.random.default_rng(6)
    for name in ("defaults", "penalties", "penalties-whole", "whole", "penalties-up"):
        params = SamplingParams(**SETTINGS[name], seed=5)
        logits = (rng.standard_normal((5, N_VOCAB)) * 3).astype(np.float32)
        prompt = rng.integers(0, N_VOCAB, 70).tolist()
        with CandidatesBench(device, N_VOCAB) as bench:
            text = Text(bench, params)
            text.start(prompt)
            drafted = [text.step(row)[0] for row in logits]
        rows = RowSampler(params, N_VOCAB)
        rows.accept_all(prompt)
        draws = np.stack([np.array(rows.draw(drafted[:i])) for i in range(5)])
        with CandidatesBench(device, N_VOCAB, 5) as bench:
            found = bench.run(logits, draws)
        for i in range(5):
            assert rows.sample(found[i], lambda i=i: logits[i]) == drafted[i]
            rows.accept(drafted[i])


@pytest.mark.parametrize("name", ["defaults", "whole", "bias"])
def test_draws_follow_the_distribution(name: str, device: Device) -> None:
    """Chi-square over many positions of one row, against the reference's probabilities."""
    n_vocab, n_draws = 700, 3000
    logits = (np.random.default_rng(2).standard_normal(n_vocab) * 1.5).astype(np.float32)
    params = SamplingParams(**SETTINGS[name], seed=9)
    ids, probs = Sampler(params, n_vocab).distribution(logits)
    rows = RowSampler(params, n_vocab)
    counts = np.zeros(n_vocab)
    with CandidatesBench(device, n_vocab) as bench:
        for _ in range(n_draws):
            token = rows.sample(bench.run(logits, rows.draw())[0], lambda: logits)
            counts[token] += 1
            rows.accept(token)
    assert counts.sum() == counts[ids].sum() == n_draws
    expected = probs * n_draws
    large = expected >= 5
    seen = np.append(counts[ids][large], counts[ids][~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    dof = len(seen) - 1
    assert ((seen - wanted) ** 2 / wanted).sum() <= dof + 5 * math.sqrt(2 * max(dof, 1))


@pytest.mark.parametrize(
    ("name", "mode"), [("defaults", "whole"), ("penalties", "layered"), ("bias-greedy", "whole")]
)
def test_passes_list_what_their_logits_give(
    name: str, mode: str, open_engine: Callable[..., Engine]
) -> None:
    engine = open_engine("mini35b", mode=mode)
    check_passes(engine, SamplingParams(**SETTINGS[name], seed=11), 20)
