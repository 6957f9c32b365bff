#!/usr/bin/env python3
"""Fit the trace generator to a recorded trace, layer by layer, for a router of another size.

Experts are compared by share: a generated layer of 256 experts with slots for 25 % of them should
miss as many choices as the recorded layer with slots for 25 % of its own. For each recorded layer,
the script searches for weights and time constants of a RoutingModel so that a generated layer of
the wanted size has

    the same hit rates of an LRU, at shares of 1/8 to 7/8 (how soon experts come back), and
    the same share of choices by its most popular experts, at the same shares (how uneven it is).

Which experts are chosen together is not fitted: the generator draws the experts of a layer
independently, and a cache that counts each expert alone sees no difference. Prints a line of
Python for each layer.

    moegraph trace tiny -f text.txt -o tiny.trace
    scripts/fit_routing.py tiny.trace
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph.placement.generator import RoutingModel, generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.trace import Trace, read_trace

SHARES = np.arange(1, 8) / 8
# Tokens at the start that fill the LRU and are not counted.
SKIP = 256
Curve = npt.NDArray[np.float64]


def lru_curve(trace: Trace, il: int) -> Curve:
    """Return the hit rates of an LRU with slots for SHARES of one layer's experts."""
    n_expert = trace.shape.n_expert
    last = np.full(n_expert, -1.0) - np.arange(n_expert)
    ages = []
    for at, chosen in enumerate(trace.ids[:, il].astype(np.intp)):
        used = last[chosen]
        if at >= SKIP:
            ages.append((last > used[:, None]).sum(axis=1))  # experts used since
        last[chosen] = at + np.arange(len(chosen))[::-1] / len(chosen)
    deep = np.concatenate(ages)
    return np.array([(deep < round(share * n_expert)).mean() for share in SHARES])


def popularity_curve(trace: Trace, il: int) -> Curve:
    """Return the shares of a layer's choices that its most popular experts get, for SHARES."""
    counts = np.sort(trace.part(SKIP, trace.n_tokens).counts()[il])[::-1]
    most = np.cumsum(counts) / counts.sum()
    return np.array([most[round(share * len(counts)) - 1] for share in SHARES])


def curves(trace: Trace, il: int) -> Curve:
    """Return both curves of a layer, one after the other."""
    return np.concatenate([lru_curve(trace, il), popularity_curve(trace, il)])


def model_of(point: npt.NDArray[np.float64]) -> RoutingModel:
    """Return the model of a point of the search: angles of the weights, and time constants.

    With angles, the squares of the four weights always add up to 1.
    """
    a, b, c = np.clip(point[:3], 0.0, math.pi / 2)
    fixed, rest = math.sin(a), math.cos(a)
    drift, rest = rest * math.sin(b), rest * math.cos(b)
    return RoutingModel(
        fixed=round(fixed, 3), drift=round(drift, 3), recent=round(rest * math.sin(c), 3),
        white=round(rest * math.cos(c), 3), drift_tokens=round(math.exp(point[3]), 1),
        rho=round(1 / (1 + math.exp(-point[4])), 3), spread=0.0, edge=0.0,
    )  # fmt: skip


def fit_layer(
    wanted: Curve, shape: RouterShape, n_tokens: int, n_tries: int
) -> tuple[RoutingModel, float]:
    """Search for a layer's model; return the best one and its largest error on a curve."""
    rng = np.random.default_rng(0)
    one = replace(shape, n_layer=1)
    best, least = np.array([0.4, 0.3, 0.4, 4.0, 1.0]), math.inf
    width = np.array([0.25, 0.25, 0.25, 0.8, 0.8])
    for at in range(n_tries):
        point = best + (width * 0.985**at * rng.standard_normal(5) if at else 0)
        point[3:] = np.clip(point[3:], [2.0, -2.0], [6.5, 3.0])
        trace = generate_trace(one, n_tokens, model=model_of(point))
        error = float(np.square(curves(trace, 0) - wanted).sum())
        if error < least:
            best, least = point, error
    model = model_of(best)
    checked = generate_trace(
        one, n_tokens, seed=1, model=model
    )  # a seed that the search did not use
    return model, float(np.abs(curves(checked, 0) - wanted).max())


def main() -> int:
    """Print a model for each recorded layer."""
    p = bench.Parser(__doc__)
    p.add_argument("trace", help="a recorded trace, of 1,000 tokens or more")
    p.add_argument("--experts", type=bench.positive, default=256, help="of the wanted layers")
    p.add_argument("--used", type=bench.positive, default=8)
    p.add_argument("--tokens", type=bench.positive, default=1280, help="generated for each try")
    p.add_argument("--tries", type=bench.positive, default=200, help="models tried for each layer")
    args = p.parse_args()

    def run() -> None:
        recorded = read_trace(args.trace)
        if min(recorded.n_tokens, args.tokens) <= SKIP or args.used > args.experts:
            raise bench.BenchError(
                f"the trace needs more than {SKIP} tokens, and --used at most as many as --experts"
            )
        shape = RouterShape(recorded.shape.n_layer, args.experts, args.used)
        for il in range(recorded.shape.n_layer):
            wanted = curves(recorded, il)
            model, error = fit_layer(wanted, shape, args.tokens, args.tries)
            print(f"{model},  # layer {il}: within {error:.3f}", flush=True)

    return bench.guarded("fit_routing.py", run)


if __name__ == "__main__":
    sys.exit(main())
