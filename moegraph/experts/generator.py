"""Generated routing traces with the statistics of real Mixture-of-Experts models.

The score of expert e in layer l at token t is a weighted sum of independent unit normals:

    fixed     the expert's popularity; a share of it is the same for all prompts
    drift     an Ornstein-Uhlenbeck process over tokens
    recent    a first-order autoregression
    white     new for every token

The n_expert_used best scores are chosen. The weights were fitted to a trace of a 128-expert model
and agree, without refitting, with published hit rates of 256-expert models; for models that route
much flatter they do not hold.
"""

from __future__ import annotations

import math
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
    spread: the fixed weight of each layer is drawn from fixed +- spread, the other weights scaled
    to match; the first two layers and the last are flatter by `edge`.
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


# By name: `sticky` as fitted to the trace of a 128-expert model, `flat` for routers that prefer no
# expert much and keep few from token to token.
PRESETS = {
    "sticky": RoutingModel(),
    "flat": RoutingModel(fixed=0.35, drift=0.25, recent=0.35, white=0.832, spread=0.05, edge=0.05),
}


def generate_trace(
    shape: RouterShape, n_tokens: int, seed: int = 0, prompt: int = 0,
    model: RoutingModel = RoutingModel(),
) -> Trace:  # fmt: skip
    """Return a trace; traces of one seed and several prompts are of the same imaginary model."""
    n_layer, n_expert, k = shape.sizes
    common = np.random.default_rng([seed, 0])
    size = (n_layer, n_expert)
    scale = _fixed_weights(model, n_layer, common)
    popular = common.standard_normal(size)
    rng = np.random.default_rng([seed, 1, prompt])
    popular = math.sqrt(model.shared) * popular
    popular += math.sqrt(1.0 - model.shared) * rng.standard_normal(size)
    rest = np.sqrt((1.0 - scale**2) / (1.0 - model.fixed**2))[:, None]
    drift, recent = rng.standard_normal(size), rng.standard_normal(size)
    keep = math.exp(-1.0 / model.drift_tokens)
    ids = np.empty((n_tokens, n_layer, k), dtype=ids_dtype(n_expert))
    for row in ids:
        score = model.drift * drift + model.recent * recent
        score += model.white * rng.standard_normal(size)
        row[:] = best(scale[:, None] * popular + rest * score, k)
        drift = keep * drift + math.sqrt(1.0 - keep**2) * rng.standard_normal(size)
        recent = model.rho * recent + math.sqrt(1.0 - model.rho**2) * rng.standard_normal(size)
    return Trace(shape, ids, 0, f"generated, seed {seed}, prompt {prompt}")


def best(scores: npt.NDArray[np.float64], k: int) -> npt.NDArray[np.intp]:
    """Return the k best of each row of scores, best first."""
    top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(scores, top, axis=1), axis=1, kind="stable")
    return np.take_along_axis(top, order, axis=1)


def _fixed_weights(
    model: RoutingModel, n_layer: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return the weight of the fixed part in each layer."""
    weights = rng.uniform(model.fixed - model.spread, model.fixed + model.spread, n_layer)
    edges = sorted({0, min(1, n_layer - 1), n_layer - 1})
    weights[edges] = model.fixed - model.edge
    return weights
