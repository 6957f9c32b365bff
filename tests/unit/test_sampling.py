"""Samplers against straightforward references, and the properties a user relies on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegraph import sampling
from moegraph.errors import RequestError
from moegraph.sampling import Sampler, SamplingParams

N_VOCAB_LARGE = 248_320
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def draws(sampler: Sampler, logits: np.ndarray, n: int) -> list[int]:
    """Sample one row again and again, as if it were the row of the next n positions."""
    tokens = []
    for _ in range(n):
        tokens.append(sampler.sample(logits))
        sampler.accept(tokens[-1])
    return tokens


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def reference_chain(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The chain as its definition reads: one sorted list, one filter after another."""
    kept = sorted(enumerate(logits), key=lambda pair: (-pair[1], pair[0]))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.typical_p < 1:
        kept = reference_typical(kept, params.typical_p)
    if params.top_p < 1:
        kept = reference_top_p(kept, params.top_p)
    if params.min_p > 0:
        probs = softmax([x for _, x in kept])
        floor = params.min_p * max(probs)
        kept = [pair for pair, p in zip(kept, probs, strict=True) if p >= floor]
    probs = softmax([x / params.temperature for _, x in kept])
    return {token: p for (token, _), p in zip(kept, probs, strict=True)}


def reference_top_p(kept: list[tuple[int, float]], p: float) -> list[tuple[int, float]]:
    kept = sorted(kept, key=lambda pair: (-pair[1], pair[0]))
    running = 0.0
    for n, prob in enumerate(softmax([x for _, x in kept]), start=1):
        running += prob
        if running >= p:
            return kept[:n]
    return kept


def reference_typical(kept: list[tuple[int, float]], p: float) -> list[tuple[int, float]]:
    probs = softmax([x for _, x in kept])
    entropy = math.fsum(-q * math.log(q) for q in probs)
    by_surprise = sorted(range(len(kept)), key=lambda i: abs(-math.log(probs[i]) - entropy))
    running, chosen = 0.0, []
    for i in by_surprise:
        chosen.append(kept[i])
        running += probs[i]
        if running > p:
            break
    return chosen


def random_logits(seed: int, n_vocab: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n_vocab) * scale).astype(np.float32)


def best_time(call: Callable[[], object], n: int = 50) -> float:
    """Return the shortest time of many: the machine may be busy, the work is the same."""
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def sort_time(logits: np.ndarray) -> float:
    """Return how long it takes to sort a whole row."""
    return best_time(lambda: np.argsort(-logits, kind="stable"), n=3)


CHAINS = [
    {},
    {**OFF, "top_k": 5},
    {**OFF, "top_p": 0.7},
    {**OFF, "min_p": 0.1},
    {**OFF, "typical_p": 0.6},
    {**OFF, "temperature": 0.3},
    {"top_k": 50, "typical_p": 0.9, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
    OFF,
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: ",".join(chain) or "defaults")
@pytest.mark.parametrize("n_vocab", [1, 3, 40, 1024, 1025, 3000])
def test_the_chain_agrees_with_its_definition(chain: dict, n_vocab: int) -> None:
    params = SamplingParams(**chain)
    for seed in range(4):
        logits = random_logits(seed, n_vocab)
        ids, probs = Sampler(params, n_vocab).distribution(logits)
        expected = reference_chain([float(x) for x in logits], params)
        assert set(ids.tolist()) == set(expected)
        assert probs == pytest.approx([expected[i] for i in ids.tolist()], rel=1e-5)


def test_top_k_of_a_large_vocabulary_is_exact() -> None:
    for seed in range(2):
        logits = random_logits(seed, N_VOCAB_LARGE)
        for k in (1, 40, 1024, 1025, 5000):
            ids, kept = sampling._top_k(logits, k)
            expected = np.argsort(-logits, kind="stable")[:k]
            assert ids.tolist() == expected.tolist()
            assert (kept == logits[expected]).all()


@pytest.mark.parametrize("scale", [0.01, 3.0, 12.0])
def test_top_p_of_a_large_vocabulary_is_exact_flat_or_peaked(scale: float) -> None:
    logits = random_logits(7, N_VOCAB_LARGE, scale)
    params = SamplingParams(**{**OFF, "top_p": 0.9})
    ids, probs = Sampler(params, N_VOCAB_LARGE).distribution(logits)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    n_keep = int(np.searchsorted(weights.cumsum() / weights.sum(), 0.9)) + 1
    # Single precision weights may move the cut by a token in a hundred thousand.
    assert abs(len(ids) - n_keep) <= max(1, n_keep // 100_000)
    assert ids.tolist() == order[: len(ids)].tolist()
    assert probs.sum() == pytest.approx(1)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: ",".join(chain) or "defaults")
def test_draws_follow_the_distribution(chain: dict) -> None:
    n_vocab, n_draws = 30, 6_000
    logits = random_logits(3, n_vocab, 1.5)
    sampler = Sampler(SamplingParams(**chain, seed=11), n_vocab)
    ids, probs = sampler.distribution(logits)
    counts = np.bincount(draws(sampler, logits, n_draws), minlength=n_vocab)
    assert counts.sum() == counts[ids].sum()
    expected = probs * n_draws
    chi_square = float(((counts[ids] - expected) ** 2 / expected).sum())
    # Mean dof, variance 2 dof: five sigma, and the seed is fixed.
    dof = len(ids) - 1
    assert chi_square <= dof + 5 * math.sqrt(2 * dof)


def test_equal_seeds_draw_equal_tokens_and_other_seeds_do_not() -> None:
    logits = random_logits(1, 500, 1.0)

    def draw(seed: int | None) -> list[int]:
        return draws(Sampler(SamplingParams(seed=seed), 500), logits, 50)

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.mark.parametrize("seed", [None, -1, 0xFFFFFFFF])
def test_a_random_seed_can_be_read_and_repeats_the_run(seed: int | None) -> None:
    logits = random_logits(1, 500, 1.0)
    first = Sampler(SamplingParams(seed=seed), 500)
    again = Sampler(first.params, 500)
    assert first.params.seed != SamplingParams(seed=seed).seeded().seed
    assert draws(first, logits, 20) == draws(again, logits, 20)


def test_a_draw_depends_on_the_seed_and_the_position_alone() -> None:
    peaked = np.array([0, 50, 0], dtype=np.float32)
    flat = np.zeros(3, dtype=np.float32)
    a, b = (Sampler(SamplingParams(seed=4), 3) for _ in range(2))
    for _ in range(3):
        a.sample(peaked)
    assert a.sample(flat) == b.sample(flat) == b.sample(flat)
    a.accept(0)
    b.accept_all([2])
    assert draws(a, flat, 20) == draws(b, flat, 20)


def test_a_token_does_not_depend_on_what_the_settings_cut_beside_it() -> None:
    """The race: of two sets of candidates, a token in both that wins the larger wins the other."""
    logits = random_logits(6, 300, 1.0)
    whole = draws(Sampler(SamplingParams(**OFF, seed=2), 300), logits, 400)
    cut = draws(Sampler(SamplingParams(**{**OFF, "top_k": 40}, seed=2), 300), logits, 400)
    likely = set(np.argsort(-logits)[:40].tolist())
    assert all(a == b for a, b in zip(whole, cut, strict=True) if a in likely)
    assert set(cut) <= likely and any(token not in likely for token in whole)


def test_only_allowed_tokens_are_drawn() -> None:
    logits = random_logits(1, 50, 2.0)
    allowed = np.arange(50) % 7 == 3
    for chain in ({}, OFF, {"temperature": 0}):
        sampler = Sampler(SamplingParams(**{**chain, "seed": 1}), 50)
        for _ in range(50):
            token = sampler.sample(logits, allowed)
            assert allowed[token]
            sampler.accept(token)
    with pytest.raises(RequestError, match="excludes every token"):
        sampler.sample(logits, np.zeros(50, dtype=bool))


def test_top_k_with_equal_logits_takes_the_lowest_ids() -> None:
    logits = np.zeros(5000, dtype=np.float32)
    logits[[100, 4000]] = 1
    ids, _ = sampling._top_k(logits, 5)
    assert ids.tolist() == [100, 4000, 0, 1, 2]


@pytest.mark.parametrize("n_vocab", [4, 1024, 4096, 65_536])
@pytest.mark.parametrize("share", [1 / 1024, 1 / 64, 0.25, 0.5, 0.75])
def test_top_p_ends_with_the_token_that_reaches_it_exactly(n_vocab: int, share: float) -> None:
    n_keep = max(1, int(share * n_vocab))
    params = SamplingParams(**{**OFF, "top_p": share})
    equal = np.zeros(n_vocab, dtype=np.float32)  # so all sums are exact
    ids, _ = Sampler(params, n_vocab).distribution(equal)
    assert ids.tolist() == list(range(n_keep))
    more = SamplingParams(**{**OFF, "top_p": share + 0.5 / n_vocab})
    ids, _ = Sampler(more, n_vocab).distribution(equal)
    assert ids.tolist() == list(range(min(n_keep + (share * n_vocab >= 1), n_vocab)))


@pytest.mark.parametrize("n_vocab", [4, 1024, 65_536])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_typical_ends_with_the_token_that_exceeds_it(n_vocab: int, share: float) -> None:
    params = SamplingParams(**{**OFF, "typical_p": share})
    ids, _ = Sampler(params, n_vocab).distribution(np.zeros(n_vocab, dtype=np.float32))
    assert ids.tolist() == list(range(int(share * n_vocab) + 1))


def test_min_p_is_a_share_of_the_likeliest_token_that_typical_leaves() -> None:
    probs = np.array([0.4] + [0.1] * 6)  # the first is not typical
    params = SamplingParams(**{**OFF, "typical_p": 0.25, "min_p": 0.5})
    ids, _ = Sampler(params, 7).distribution(np.log(probs).astype(np.float32))
    assert ids.tolist() == [1, 2, 3]


class TestGreedy:
    def test_takes_the_first_of_equal_maxima(self) -> None:
        logits = np.array([1, 7, 3, 7], dtype=np.float32)
        assert Sampler(SamplingParams(temperature=0), 4).sample(logits) == 1

    @pytest.mark.parametrize("temperature", [0, -1])
    def test_ignores_the_other_filters_and_the_seed(self, temperature: float) -> None:
        logits = random_logits(2, 5000)
        for seed in range(3):
            params = SamplingParams(temperature=temperature, top_k=3, min_p=0.9, seed=seed)
            assert params.is_greedy
            assert Sampler(params, 5000).sample(logits) == int(logits.argmax())

    def test_respects_penalties_and_bias(self) -> None:
        logits = np.array([1, 3, 2], dtype=np.float32)
        penalized = Sampler(SamplingParams(temperature=0, presence_penalty=2), 3)
        penalized.accept(1)
        assert penalized.sample(logits) == 2
        biased = Sampler(SamplingParams(temperature=0, logit_bias={0: 9.0}), 3)
        assert biased.sample(logits) == 0

    def test_needs_no_logits_when_the_argmax_is_the_answer(self) -> None:
        assert not SamplingParams(temperature=0).needs_logits
        assert not SamplingParams(temperature=0, repeat_penalty=2, repeat_last_n=0).needs_logits
        assert SamplingParams().needs_logits
        assert SamplingParams(temperature=0, repeat_penalty=1.1).needs_logits
        assert SamplingParams(temperature=0, logit_bias={1: 0.5}).needs_logits

    def test_after_typical_takes_the_likeliest_survivor(self) -> None:
        # One sure token and many unlikely ones: the sure one is less typical than its entropy.
        probs = np.array([0.4] + [0.1] * 6)
        params = SamplingParams(temperature=0, typical_p=0.3, top_k=0)
        assert params.needs_logits
        assert Sampler(params, 7).sample(np.log(probs).astype(np.float32)) == 1


class TestPenalties:
    def adjusted(self, logits: list[float], recent: list[int], **params: float) -> list[float]:
        chain = {**OFF, **params}
        sampler = Sampler(SamplingParams(**chain), len(logits))
        sampler.accept_all(recent)
        return sampler._adjust(np.array(logits, dtype=np.float32)).tolist()

    def test_repetition_divides_positive_and_multiplies_negative_logits(self) -> None:
        out = self.adjusted([4, -4, 0, 4], [0, 1, 2], repeat_penalty=2)
        assert out == [2, -8, 0, 4]

    def test_frequency_counts_and_presence_does_not(self) -> None:
        assert self.adjusted([0, 0, 0], [0, 0, 1], frequency_penalty=0.5) == [-1, -0.5, 0]
        assert self.adjusted([0, 0, 0], [0, 0, 1], presence_penalty=0.5) == [-0.5, -0.5, 0]

    @pytest.mark.parametrize("n_last", [1, 2, 3])
    def test_the_window_moves_with_every_token_of_the_answer(self, n_last: int) -> None:
        params = SamplingParams(**{**OFF, "presence_penalty": 50.0, "repeat_last_n": n_last})
        sampler, logits = Sampler(params, 6), np.zeros(6, dtype=np.float32)
        sampler.accept_all([0, 1])
        for token in (2, 3, 4, 5):
            sampler.accept(token)
            ids, probs = sampler.distribution(logits)
            recent = set(range(max(token - n_last + 1, 0), token + 1))
            assert {int(i) for i, p in zip(ids, probs) if p > 1e-9} == set(range(6)) - recent

    def test_only_the_window_counts(self) -> None:
        out = self.adjusted([0, 0, 0], [0, 1, 2, 1], presence_penalty=1, repeat_last_n=2)
        assert out == [0, -1, -1]
        assert self.adjusted([0, 0], [0, 1], presence_penalty=1, repeat_last_n=0) == [0, 0]
        longer = [0, *[1] * 100]
        assert self.adjusted([0, 0], longer, presence_penalty=1, repeat_last_n=-1) == [-1, -1]

    def test_the_logits_of_the_caller_stay_as_they_are(self) -> None:
        logits = np.ones(4, dtype=np.float32)
        params = SamplingParams(presence_penalty=1, logit_bias={2: 5.0}, seed=0)
        sampler = Sampler(params, 4)
        sampler.accept(1)
        sampler.sample(logits)
        assert (logits == 1).all()


class TestBias:
    def test_minus_infinity_bans_a_token(self) -> None:
        logits = np.array([9, 1, 1], dtype=np.float32)
        sampler = Sampler(SamplingParams(logit_bias={0: -math.inf}, seed=0), 3)
        assert set(draws(sampler, logits, 100)) == {1, 2}

    @pytest.mark.parametrize("temperature", [0, 1])
    def test_banning_every_token_is_an_error(self, temperature: float) -> None:
        nothing_left = dict.fromkeys(range(3), -math.inf)
        params = SamplingParams(temperature=temperature, logit_bias=nothing_left)
        with pytest.raises(RequestError, match="excludes every token"):
            Sampler(params, 3).sample(np.zeros(3, dtype=np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan), ("temperature", 1e9), ("top_k", -2), ("top_k", 1.5),
        ("top_k", True), ("top_p", 1.01), ("top_p", -0.1), ("min_p", 2), ("typical_p", -1),
        ("repeat_penalty", 0), ("repeat_penalty", math.inf), ("repeat_last_n", -2),
        ("presence_penalty", math.nan), ("frequency_penalty", math.inf), ("seed", 2**32),
        ("seed", "7"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named_with_its_range(field: str, value: object) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value}).validate(10)
    assert str(error.value).startswith(f"{field} is {value!r} (")


@pytest.mark.parametrize("bias", [{-1: 1.0}, {10: 1.0}, {0: math.nan}, {0: math.inf}], ids=str)
def test_a_wrong_bias_is_refused(bias: dict[int, float]) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=bias).validate(10)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=60),
    chain=st.fixed_dictionaries({
        "temperature": st.floats(-1, 100),
        "top_k": st.integers(-1, 80),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0, 1),
        "repeat_penalty": st.floats(0.1, 10),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repeat_last_n": st.integers(0, 10),
        "seed": st.integers(0, 2**32 - 1),
    }),
)  # fmt: skip
def test_any_setting_draws_a_token_of_the_vocabulary(logits: list[float], chain: dict) -> None:
    sampler = Sampler(SamplingParams(**chain), len(logits))
    row = np.array(logits, dtype=np.float32)
    for _ in range(5):
        token = sampler.sample(row)
        assert 0 <= token < len(logits)
        sampler.accept(token)


def test_default_settings_take_little_time_on_the_largest_vocabulary() -> None:
    logits = random_logits(0, N_VOCAB_LARGE)
    sampler = Sampler(SamplingParams(seed=0, repeat_penalty=1.1), N_VOCAB_LARGE)
    sampler.accept_all(range(64))
    assert best_time(lambda: sampler.sample(logits)) < sort_time(logits) / 10
