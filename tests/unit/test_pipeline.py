"""Passes of groups in flight: when each enters a stage, by a scripted clock and fake stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from moegraph.errors import NativeError
from moegraph.runner import Batch, Output
from moegraph.runner.staged import Pipeline

_POLL = 0.01


class World:
    """The time, and what happened: (stage, first slot of the pass, when it began there)."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen: list[tuple[int, int, float]] = []

    def clock(self) -> float:
        return self.now


class Part:
    """A stage whose device takes `seconds` for a pass.

    mode: in "layered" the host waits for the device while it launches, in "whole" it does not.
    """

    def __init__(self, world: World, at: int, seconds: float, mode: str) -> None:
        self.world, self.at, self.seconds, self.mode = world, at, seconds, mode
        self.end = self.ready = 0.0  # when its device is done; when the rows are there
        self.pending, self.fails_for = False, -1
        self.has_memory, self.n_kept = False, 0
        self.n_given_up = 0
        self.results = self

    def keep(self) -> bool:
        self.n_kept += self.has_memory
        return self.has_memory

    def release(self) -> None:
        pass

    def prepare(self, batch: Batch) -> None:
        assert not self.pending, "a stage has one pass at a time"

    def fill(self, batch: Batch, shape: object) -> None:
        pass

    def launch(
        self,
        batch: Batch,
        shape: object,
        cancelled: object,
        begins: object,
        may_pause: Callable[[], bool],
    ) -> Iterator[None]:
        world, slot = self.world, batch.slots[0]
        begin = max(world.now, self.end, self.ready)
        self.end = begin + self.seconds
        world.seen.append((self.at, slot, round(begin, 1)))
        while self.mode == "layered" and world.now < self.end:
            if may_pause():
                world.now += _POLL
                yield
            else:
                world.now = self.end
            if slot == self.fails_for:
                raise NativeError("the device failed")
        self.pending, self.slot = True, slot

    def have_arrived(self) -> bool:
        self.world.now += _POLL
        return self.world.now >= self.end

    def collect(self) -> Output:
        self.world.now = max(self.world.now, self.end)
        self.pending = False
        return Output(argmax=np.array([self.slot], np.int32))

    def give_up(self) -> None:
        self.pending = False
        self.n_given_up += 1


def pipeline_of(world: World, seconds: list[float], mode: str) -> tuple[Pipeline, list[Any]]:
    parts = [Part(world, i, s, mode) for i, s in enumerate(seconds)]

    def hand_over(i: int, n_rows: int) -> None:
        parts[i].ready = parts[i - 1].end

    return Pipeline(parts, hand_over, world.clock), parts  # type: ignore[arg-type]


def batch_of(slot: int) -> Batch:
    return Batch(np.zeros((1, 1), np.int32), (slot,))


def run(pipeline: Pipeline, world: World, n_groups: int, n: int, choosing_s: float = 0.0) -> None:
    """Run n passes of each group."""
    order = list(range(n_groups))
    for slot in order:
        pipeline.submit(batch_of(slot))
    for _ in range(n - 1):
        for slot in order:
            assert pipeline.collect().argmax == [slot]
            world.now += choosing_s
            pipeline.submit(batch_of(slot))
    for slot in order:
        assert pipeline.collect().argmax == [slot]


@pytest.mark.parametrize("mode", ["layered", "whole"])
@pytest.mark.parametrize("n_stages", [2, 3])
def test_each_stage_computes_another_group(mode: str, n_stages: int) -> None:
    world, n = World(), 20
    pipeline, _ = pipeline_of(world, [1.0] * n_stages, mode)
    run(pipeline, world, n_stages, n)
    assert world.now == pytest.approx(n * n_stages + n_stages - 1, rel=0.05)
    assert pipeline.counts.passes == n * n_stages and pipeline.is_empty
    assert pipeline.counts.bubbles < 0.1
    # once the stages are full, each begins a pass when the one before has ended
    first = sorted(t for at, _, t in world.seen if at == 0)
    assert np.diff(first) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_failed_pass_is_the_only_one(stage: int) -> None:
    world = World()
    pipeline, parts = pipeline_of(world, [1.0, 1.0], "layered")
    parts[stage].fails_for = 1
    pipeline.submit(batch_of(0))
    pipeline.submit(batch_of(1))
    assert pipeline.collect().argmax == [0]
    pipeline.submit(batch_of(2))
    with pytest.raises(NativeError, match="the device failed"):
        pipeline.collect()
    assert parts[stage].n_given_up == 1 and parts[1 - stage].n_given_up == 0
    assert pipeline.collect().argmax == [2]
    assert pipeline.is_empty and not any(part.pending for part in parts)
