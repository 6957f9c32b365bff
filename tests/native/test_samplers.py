"""Our sampler chain against llama.cpp's own samplers, candidate by candidate."""

from __future__ import annotations

import ctypes
import math
from types import ModuleType

import numpy as np
import pytest

from moegraph.sampling import Sampler, SamplingParams
from moegraph.text.tokenizer import load_llama

# Single precision in llama.cpp, double here: a probability differs by this much.
PROBABILITY_RTOL = 2e-5

N_VOCAB = 3000
SETTINGS = [
    {},
    {"top_k": 0},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.3},
    {"top_p": 0.0},
    {"top_k": 0, "top_p": 0.99},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.2},
    {"top_k": 0, "top_p": 1.0, "min_p": 1.0},
    {"typical_p": 0.5},
    {"top_k": 0, "typical_p": 0.8, "top_p": 1.0, "min_p": 0.0},
    {"typical_p": 0.9, "top_p": 0.9, "min_p": 0.1, "temperature": 1.8},
    {"temperature": 0.1},
    {"repeat_penalty": 1.3, "repeat_last_n": 20},
    {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repeat_last_n": 50},
    {"repeat_penalty": 0.7, "presence_penalty": -1.0, "repeat_last_n": 100},
    {"logit_bias": {3: 4.0, 5: -math.inf, 2999: 2.5}, "repeat_penalty": 1.2},
]


@pytest.fixture(scope="module")
def llama() -> ModuleType:
    return load_llama()


def upstream_chain(llama: ModuleType, params: SamplingParams) -> int:
    """Return a llama_sampler with the order of llama.cpp's common_sampler_init."""
    p = params
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    bias = (llama.llama_logit_bias * len(p.logit_bias))()
    for slot, (token, value) in zip(bias, p.logit_bias.items(), strict=True):
        slot.token, slot.bias = token, value
    parts = [
        llama.llama_sampler_init_logit_bias(N_VOCAB, len(bias), bias),
        llama.llama_sampler_init_penalties(
            N_VOCAB, p.repeat_last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty
        ),
        llama.llama_sampler_init_top_k(p.top_k),
        llama.llama_sampler_init_typical(p.typical_p, 0),
        llama.llama_sampler_init_top_p(p.top_p, 0),
        llama.llama_sampler_init_min_p(p.min_p, 0),
        llama.llama_sampler_init_temp(p.temperature),
    ]
    for part in parts:
        llama.llama_sampler_chain_add(chain, part)
    return chain


def upstream_distribution(
    llama: ModuleType, params: SamplingParams, logits: np.ndarray, recent: list[int]
) -> dict[int, float]:
    """Return what llama.cpp's chain leaves: token id to probability."""
    chain = upstream_chain(llama, params)
    for token in recent:
        llama.llama_sampler_accept(chain, token)
    data = (llama.llama_token_data * len(logits))()
    for token, logit in enumerate(logits.tolist()):
        data[token].id, data[token].logit = token, logit
    array = llama.llama_token_data_array(data, len(logits), -1, False)
    llama.llama_sampler_apply(chain, ctypes.byref(array))
    kept = [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
    llama.llama_sampler_free(chain)
    weights = np.exp(np.array([logit for _, logit in kept]) - max(logit for _, logit in kept))
    return dict(zip((token for token, _ in kept), weights / weights.sum(), strict=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(s) or "defaults")
def test_the_same_candidates_with_the_same_probabilities(llama: ModuleType, settings: dict) -> None:
    params = SamplingParams(**settings)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal(N_VOCAB) * (0.5 + seed)).astype(np.float32)
        # Likely tokens, often repeated: penalties must meet the candidates.
        recent = rng.choice(np.argsort(-logits)[:40], 90).tolist()
        sampler = Sampler(params, N_VOCAB)
        sampler.accept_all(recent)
        ids, probs = sampler.distribution(logits)
        ours = dict(zip(ids.tolist(), probs.tolist(), strict=True))
        theirs = upstream_distribution(llama, params, logits, recent)
        assert set(ours) == set(theirs)
        for token, prob in theirs.items():
            assert ours[token] == pytest.approx(prob, rel=PROBABILITY_RTOL, abs=1e-12)
