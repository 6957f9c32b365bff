"""A policy of one's own: which experts keep their slots.

    python examples/policy.py [MODEL]

`EngineConfig(policy=...)` and `simulate` take any object with a method `layer`. What that returns
has a list `score`, of which the lowest resident expert is the next victim, and four methods. This
policy counts choices, which LRU does not, and halves the counts now and then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from simulate import record

from moegraph import Engine, EngineConfig
from moegraph.experts.machines import find_machine
from moegraph.experts.policy import parse_policy
from moegraph.placement.simulate import even_slots, simulate

Ints = npt.NDArray[np.int64]


class Counts:
    def __init__(self, n_expert: int = 0) -> None:
        self.score, self.n_rows = [0.0] * n_expert, 0

    def layer(self, n_expert: int, n_slots: int, n_expert_used: int) -> Counts:
        return Counts(n_expert)

    def touch(self, ids: Sequence[int]) -> None:
        # one row chose ids
        for expert in ids:
            self.score[expert] += 1.0
        self.n_rows += 1
        if self.n_rows % 64 == 0:  # scores only rise in one list
            self.score = [score / 2 for score in self.score]

    def touch_batch(self, chosen: Ints, last: Ints, n_tokens: int) -> None:
        # rows of a prompt chose experts so often
        self.score = [score + n / n_tokens for score, n in zip(self.score, chosen.tolist())]

    def accepts(self, expert: int, victim: int) -> bool:
        # may an absent expert take the victim's slot?
        return self.score[expert] > 1.2 * self.score[victim]

    def start(self, experts: Sequence[int], shares: Sequence[float] | None) -> None:
        # experts that fill the slots at the start, best first
        for rank, expert in enumerate(experts):
            self.score[expert] = -rank / len(self.score)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    trace = record(model, 96)
    slots = even_slots([True] * trace.shape.n_layer, trace.shape.n_expert, 0.5)
    for name, policy in (("lru", parse_policy("lru")), ("counts", Counts())):
        found = simulate(trace, slots, policy, find_machine("desktop")).stats
        print(f"{name}: {found.hit_rate:.1%} hits")
    config = EngineConfig(device="auto", n_ctx=512, mode="layered", policy=Counts())
    with Engine.load(model, config) as engine:
        print("".join(event.text for event in engine.generate("def add(a, b):", max_tokens=16)))


if __name__ == "__main__":
    main()
