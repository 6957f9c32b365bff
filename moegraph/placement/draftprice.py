"""What drafts bring and what the drafter's memory costs, before either was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..experts.cost import expected_missing, independent_rows, pass_time
from .planner import Footprint, Plan


@dataclass(frozen=True)
class Prior:
    """What is believed of a drafter that has not run.

    fixed, per_token: seconds of a draft and of each of its tokens, in plain steps of a 35B-A3B.
    accept: how often a drafted token is accepted if all before it were.
    """

    fixed: float
    per_token: float
    accept: float


# Times of mtp and dflash are those of docs/benchmarks/drafts.jsonl: 3 tokens of mtp take 0.53 of a
# plain step, 7 of dflash 0.54, and 11 of it 0.64. The Markov head of dspark reads 64 MiB for each
# token, 0.02 of a plain step; it was not timed. 0.75 is the mean of published rates by text.
PRIORS = {
    "mtp": Prior(0.02, 0.17, 0.75),
    "dflash": Prior(0.46, 0.015, 0.75),
    "dspark": Prior(0.46, 0.035, 0.75),
    "lookup": Prior(0.0, 0.0, 0.6),
}
# How many times longer a byte takes over the link than out of the device's memory, in a decode
# step: 21 were measured on the H200 of the benchmarks, 15 are computed for a desktop.
_LINK = 18.0
# What graphs that fetch add to a step, as a share of it: 1.5 % there, 1.1 % there.
_FETCHING = 0.013
# A loaded drafter may slow down answers that it cannot draft to this.
_LEAST_IDLE = 0.97


@dataclass(frozen=True)
class Price:
    """What a drafter's memory costs and brings, beside the same model without a drafter.

    n_bytes: the device memory. n_slots: the expert slots that it takes. drafting: predicted speed
    where drafts are accepted as often as is usual. idle: predicted speed where nothing is drafted.
    Both are relative to the model without a drafter.
    """

    n_bytes: int
    n_slots: int
    drafting: float
    idle: float

    @property
    def is_worth_it(self) -> bool:
        """Whether drafts bring more than the slots cost, and texts without drafts lose little."""
        return self.drafting > 1.0 and self.idle >= _LEAST_IDLE


def price_of(need: Footprint, plain: Plan, drafting: Plan, most: Mapping[str, int]) -> Price:
    """Return the price of drafters.

    need: of the model. plain, drafting: its plans without and with them. most: the most tokens that
    each draws up, by name (PRIORS).
    """
    alone = _pass_time(need, plain, 1)
    steps = [
        _token_time(need, drafting, PRIORS[name], n)
        for name, longest in most.items()
        for n in range(1, longest + 1)
    ]
    return Price(
        drafting.bytes.get("drafters", 0),
        sum(plain.n_slots) - sum(drafting.n_slots),
        alone / min(steps),
        alone / _pass_time(need, drafting, 1),
    )


def _token_time(need: Footprint, plan: Plan, prior: Prior, n: int) -> float:
    """Return what a token takes in steps that draft n, in passes of one row without misses."""
    tokens = sum(prior.accept**depth for depth in range(n + 1))
    return (prior.fixed + prior.per_token * n + _pass_time(need, plan, n + 1)) / tokens


def _pass_time(need: Footprint, plan: Plan, n_rows: int) -> float:
    """Return the time of a pass, in passes of one row without misses."""
    if plan.all_resident:
        return pass_time(n_rows)
    rows, total = independent_rows(n_rows), sum(need.slot_bytes)
    step_bytes = need.weights + need.n_expert_used * total
    missing = sum(
        size * expected_missing(n, need.n_expert, need.n_expert_used, rows)
        for n, size in zip(plan.n_slots, need.slot_bytes)
    )
    return pass_time(n_rows) + _FETCHING + _LINK * missing / step_bytes
