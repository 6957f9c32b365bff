"""Generated routing traces with the statistics of real Mixture-of-Experts models.

The score of expert e in layer l at token t is a weighted sum of independent unit normals:

    fixed     the expert's popularity, a share of which is the same for all prompts
    drift     an Ornstein-Uhlenbeck process over tokens
    recent    a first-order autoregression
    white     new for every token

The token chooses the n_expert_used experts of highest score. The weights were fitted to a trace of
a 128-expert model; without refitting, they also give published hit rates of 256-expert models.
Presets for flatter routing exist, so that no conclusion has to rest on one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .identity import RouterShape
from .trace import Trace, ids_dtype


@dataclass(frozen=True)
class RoutingModel:
    """Weights of the four parts of a score; their squares add up to 1.

    shared: share of the fixed part's variance that all prompts have in common. drift_tokens: time
    constant of the drift. rho: correlation of the recent part from token to token.
    spread: the fixed weight of each layer is drawn from fixed +- spread, and the other weights are
    scaled to match; in the first two layers and the last it is fixed - edge, so they are flatter.
    """

    fixed: float = 0.71
    drift: float = 0.19
    recent: float = 0.563
    white: float = 0.377
    shared: float = 0.2
    drift_tokens: float = 178.0
    rho: float = 0.40
    spread: float = 0.10
    edge: float = 0.12


# The eight layers of the shipped model, fitted on 3,584 held-out tokens:
# LRU hit rates and choices of the most popular experts agree within 0.07 at each share of experts.
_RECORDED = tuple(
    RoutingModel(fixed, drift, recent, white, drift_tokens=tokens, rho=rho, spread=0.0, edge=0.0)
    for fixed, drift, recent, white, tokens, rho in (
        (0.082, 0.089, 0.0, 0.993, 51.1, 0.764),
        (0.11, 0.0, 0.0, 0.994, 37.1, 0.797),
        (0.048, 0.205, 0.0, 0.978, 54.2, 0.836),
        (0.246, 0.237, 0.0, 0.94, 99.7, 0.289),
        (0.194, 0.269, 0.137, 0.933, 32.5, 0.768),
        (0.133, 0.413, 0.0, 0.901, 53.9, 0.644),
        (0.183, 0.477, 0.49, 0.706, 73.7, 0.793),
        (0.247, 0.377, 0.0, 0.893, 47.9, 0.843),
    )
)

# By name. `sticky`: fitted to the trace of a 128-expert model. `flat`: halfway from there to a
# router that chooses at random. `recorded`: the shipped model's layers, for any shape.
PRESETS: dict[str, RoutingModel | tuple[RoutingModel, ...]] = {
    "sticky": RoutingModel(),
    "flat": RoutingModel(fixed=0.50, drift=0.25, recent=0.45, white=0.696),
    "recorded": _RECORDED,
}


def generate_trace(
    shape: RouterShape, n_tokens: int, seed: int = 0, prompt: int = 0,
    model: RoutingModel | Sequence[RoutingModel] = RoutingModel(),
) -> Trace:  # fmt: skip
    """Return a generated trace.

    Traces of one seed and different prompts are of the same imaginary model. model: one for all
    layers, or several; each then applies to an equal number of consecutive layers.
    """
    n_layer, n_expert, k = shape.sizes
    models = [model] if isinstance(model, RoutingModel) else list(model)
    layers = [models[il * len(models) // n_layer] for il in range(n_layer)]
    common = np.random.default_rng([seed, 0])
    size = (n_layer, n_expert)
    scale = _fixed_weights(layers, common)
    popular = common.standard_normal(size)
    rng = np.random.default_rng([seed, 1, prompt])
    popular = _column(math.sqrt(m.shared) for m in layers) * popular
    popular += _column(math.sqrt(1.0 - m.shared) for m in layers) * rng.standard_normal(size)
    rest = np.sqrt((1.0 - scale**2) / _column(1.0 - m.fixed**2 for m in layers))
    drift, recent = rng.standard_normal(size), rng.standard_normal(size)
    drift_w, recent_w = _column(m.drift for m in layers), _column(m.recent for m in layers)
    white_w, rho = _column(m.white for m in layers), _column(m.rho for m in layers)
    keep = _column(math.exp(-1.0 / m.drift_tokens) for m in layers)
    drift_new, recent_new = np.sqrt(1.0 - keep**2), np.sqrt(1.0 - rho**2)
    ids = np.empty((n_tokens, n_layer, k), dtype=ids_dtype(n_expert))
    for row in ids:
        score = drift_w * drift + recent_w * recent
        score += white_w * rng.standard_normal(size)
        row[:] = best(scale * popular + rest * score, k)
        drift = keep * drift + drift_new * rng.standard_normal(size)
        recent = rho * recent + recent_new * rng.standard_normal(size)
    return Trace(shape, ids, 0, f"generated, seed {seed}, prompt {prompt}")


def _column(values: Iterable[float]) -> npt.NDArray[np.float64]:
    """Return values, one for each layer, as numpy [n_layer, 1]."""
    return np.array(list(values))[:, None]


def best(scores: npt.NDArray[np.float64], k: int) -> npt.NDArray[np.intp]:
    """Return the indices of the k highest scores of each row, highest first, numpy [n_row, k]."""
    top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(scores, top, axis=1), axis=1, kind="stable")
    return np.take_along_axis(top, order, axis=1)


def _fixed_weights(
    layers: Sequence[RoutingModel], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return the weight of the fixed part in each layer, numpy [n_layer, 1]."""
    n_layer = len(layers)
    fixed, spread = _column(m.fixed for m in layers), _column(m.spread for m in layers)
    weights = rng.uniform(fixed - spread, fixed + spread)
    edges = sorted({0, min(1, n_layer - 1), n_layer - 1})
    weights[edges] = (fixed - _column(m.edge for m in layers))[edges]
    return weights
