"""The sampler as its definition reads: one sorted list, one filter after another, then the race."""

from __future__ import annotations

import math

import numpy as np

from moegraph.sampling import SamplingParams

_WORD = (1 << 64) - 1


def mixed(x: int) -> int:
    """The finalizer of splitmix64, with Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def key_of(seed: int, position: int) -> int:
    """The key of a position's random numbers."""
    return mixed((mixed(seed) + position * 0x9E3779B97F4A7C15) & _WORD)


def gumbel(key: int, token: int) -> float:
    """A token's random number."""
    bits = mixed((key + (token + 1) * 0x9E3779B97F4A7C15) & _WORD) >> 11
    return -math.log(-math.log1p(-(bits + 0.5) * 2.0**-53))


def adjusted(logits: np.ndarray, params: SamplingParams, recent: list[int]) -> np.ndarray:
    """Bias, then penalties, with single precision logits."""
    out = logits.astype(np.float32).copy()
    for token, bias in params.logit_bias.items():
        out[token] = np.float32(out[token] + np.float32(bias))
    if not params.has_penalties:
        return out
    window = recent[-params.repeat_last_n :]
    repeat = np.float32(params.repeat_penalty)
    for token in set(window):
        x = out[token]
        x = np.float32(x * repeat) if x <= 0 else np.float32(x / repeat)
        less = window.count(token) * params.frequency_penalty + params.presence_penalty
        out[token] = np.float32(float(x) - less)
    return out


def weights_of(logits: np.ndarray) -> np.ndarray:
    """Softmax without the division."""
    return np.exp(logits.astype(np.float64) - float(logits.max()))


def typical(row: np.ndarray, order: np.ndarray, p: float) -> np.ndarray:
    """Return the tokens of the most usual surprise, in the same order."""
    weights = weights_of(row[order])
    probs = weights / weights.cumsum()[-1]
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = sum(q * s for q, s in zip(probs, surprise, strict=True) if q > 0)
    usual = np.argsort(np.abs(surprise - entropy), kind="stable")
    n_keep = 1 + int((probs[usual].cumsum() <= p).sum())
    return order[np.sort(usual[:n_keep])]


def choose(
    logits: np.ndarray,
    params: SamplingParams,
    position: int,
    recent: list[int],
    allowed: np.ndarray | None = None,
) -> int:
    """Return the token of a position; params name a seed."""
    row = adjusted(logits, params, recent)
    if allowed is not None:
        row[~allowed] = -np.inf
    order = np.argsort(-row, kind="stable")
    order = order[row[order] > -np.inf]
    if params.temperature <= 0 and params.typical_p >= 1:
        return int(order[0])
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.typical_p < 1:
        order = typical(row, order, params.typical_p)
        if params.temperature <= 0:
            return int(order[0])
    if params.top_p < 1:
        sums = weights_of(row[order]).cumsum()
        order = order[: 1 + int((sums[:-1] < params.top_p * sums[-1]).sum())]
    if params.min_p > 0:
        order = order[row[order] >= row[order[0]] + np.float32(math.log(params.min_p))]
    key = key_of(params.seed, position)
    scores = [(float(row[t]) - float(row[order[0]])) / params.temperature for t in order]
    return int(max(zip((s + gumbel(key, int(t)) for s, t in zip(scores, order)), order))[1])
