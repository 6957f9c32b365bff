"""Prompts of several sequences that one sweep reads: each as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.cache_rules import check_pool
from helpers.clients import Client, alone, serving
from helpers.drafters import write_small
from helpers.patience import PATIENCE_S, until
from helpers.placements import PLACEMENTS
from helpers.shared import prompt

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.engine.service import Service
from moegraph.errors import Cancelled
from moegraph.events import CancelToken
from moegraph.runner import NotFinite, stage_sweep
from moegraph.runner.sweep_batch import SweepBatch
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
Floats = npt.NDArray[np.float32]
JOINT = {"n_seq": 6, "n_ctx": 2048, "n_ubatch": 128, "cpu_reference": True}


def mixed(engine: Engine, n_held: int = 300) -> list[SweepBatch]:
    """Return prompts of mixed lengths, of which one continues n_held rows and one has a cut."""
    engine.prefill(prompt(engine, n_held, seed=50), 3, greedy=True)
    lengths = (40, 7, 150, 33, 90, 1)
    cuts = {0: (20,), 3: (n_held + 9,)}
    return [
        SweepBatch(prompt(engine, n, seed=60 + i), i, cuts=cuts.get(i, ()))
        for i, n in enumerate(lengths)
    ]


def read_alone(engine: Engine, batch: SweepBatch) -> list[Floats]:
    """Return the logits of a prompt's last row, and of a row after it."""
    last = engine.prefill(batch.tokens, batch.slot).require_logits().copy()
    return [last, engine.forward([5], batch.slot).require_logits().copy()]


def open_joint(open_engine: Open, preset: str, **settings: Any) -> Engine:
    """Open an engine of six sequences in reference mode."""
    return open_engine(preset, **{**JOINT, **settings})


Alone = list[tuple[list[Floats], list[npt.NDArray[Any]]]]


@pytest.fixture(scope="module")
def alone_of(model_path: Callable[[str], Path]) -> Callable[[str], Alone]:
    """Return a function from a preset to what `mixed` gives alone: logits, and states at cuts."""

    @cache
    def found(preset: str) -> Alone:
        settings = {"device": "cpu", "n_threads": 1, **JOINT}
        with Engine.load(model_path(preset), EngineConfig(**settings)) as engine:
            return [read_apart(engine, batch) for batch in mixed(engine)]

    return found


def read_apart(engine: Engine, batch: SweepBatch) -> tuple[list[Floats], list[npt.NDArray[Any]]]:
    """Return the logits of a prompt that is read alone, and the states at its cuts."""
    rows, states = read_alone(engine, batch), []
    if batch.cuts:
        engine.reset(batch.slot)
        if batch.slot == 3:
            engine.prefill(prompt(engine, 300, seed=50), 3, greedy=True)
        for copy in engine.passes.read(batch, None)[1]:
            states.append(copy.array)
    return rows, states


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize(("preset", "is_rounded"), [("kquant40", False), ("mini35b", True)])
def test_prompts_read_together_have_the_bits_of_each_alone(
    open_engine: Open, alone_of: Callable[[str], Alone], preset: str, placement: dict[str, Any],
    is_rounded: bool,
) -> None:  # fmt: skip
    engine = open_joint(open_engine, preset, **placement)
    batches = [replace(batch, is_rounded=is_rounded) for batch in mixed(engine)]
    sweep = engine.passes.begin_prompts(batches)
    assert any(len(chunk.segments) > 1 for part in sweep._parts for chunk in part)
    while engine.passes.step_prompt(sweep):
        pass
    for batch, swept, ((last, after), states) in zip(
        batches, sweep.prompts, alone_of(preset), strict=True
    ):
        assert swept.output is not None and not swept.error
        np.testing.assert_array_equal(swept.output.require_logits(), last)
        np.testing.assert_array_equal(engine.forward([5], batch.slot).require_logits(), after)
        # the states at the cuts are complete
        assert [copy.n_past for copy in swept.saved] == list(batch.cuts)
        for copy, expected in zip(swept.saved, states, strict=True):
            np.testing.assert_array_equal(copy.array, expected)
    check_pool(engine.state.pool)


def drafts_after(engine: Engine, batches: list[SweepBatch], together: bool) -> list[Floats]:
    """Read prompts; return the likeliest tokens and their logarithms of a draft after each."""
    speculation = engine.speculation
    assert speculation is not None
    for batch in batches:
        speculation.begin(batch.slot, engine.passes.held(batch.slot))
    for group in [batches] if together else [[batch] for batch in batches]:
        sweep = engine.passes.begin_prompts(
            [replace(b, readers=speculation.prompt_readers(b.slot, b.tokens)) for b in group]
        )
        while engine.passes.step_prompt(sweep):
            pass
    drafters, found = speculation.drafters.values(), list[Floats]()
    for batch in batches:
        engine.forward([5], batch.slot)
        speculation.committed(batch.slot, [5])
        speculation.settle(batch.slot)
        for drafter in drafters:
            draft = drafter.draft(batch.slot, 9, 4, 3)
            found += [draft.tokens.astype(np.float32), draft.log_p]
    return found


@pytest.mark.parametrize(
    ("spec", "device", "placement", "is_rounded"),
    [
        ("mtp", "cpu", PLACEMENTS[3], True),
        ("dflash", "cpu", PLACEMENTS[0], False),
        ("dflash", "cpu,cpu", PLACEMENTS[0], True),
    ],
    ids=["few", "whole", "two devices"],
)
def test_drafters_read_each_of_several_prompts(
    open_engine: Open, tmp_path: Path, spec: str, device: str, placement: dict[str, Any],
    is_rounded: bool,
) -> None:  # fmt: skip
    preset, settings = "mini35b", {"spec": spec, "n_draft": 4, "device": device, **placement}
    if spec == "dflash":
        preset, settings = "legacy32", {**settings, "draft": str(write_small(tmp_path))}
    engine, other = (open_joint(open_engine, preset, **settings) for _ in range(2))
    batches = [replace(batch, is_rounded=is_rounded) for batch in mixed(engine)]
    mixed(other)
    found = [drafts_after(one, batches, one is engine) for one in (engine, other)]
    assert len(found[0]) == 2 * len(batches)
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("placement", [PLACEMENTS[0], PLACEMENTS[3]], ids=str)
def test_rows_that_are_rounded_up_change_nothing(
    open_engine: Open, placement: dict[str, Any]
) -> None:
    engine = open_joint(open_engine, "mini35b", **placement)
    other = open_joint(open_engine, "mini35b")
    counts: list[int] = []
    if engine.mode == "layered":
        engine.runner.observers.append(lambda il, ids: counts.append(ids.size))
    for n in (1, 40, 63, 70, 250):
        ids, before = prompt(engine, n, seed=n), engine.runner.n_built
        counts.clear()
        sweep = engine.passes.begin_prompts([SweepBatch(ids, 2, cuts=(n // 2,), is_rounded=True)])
        while engine.passes.step_prompt(sweep):
            pass
        assert sweep.prompts[0].output is not None
        expected = read_alone(other, SweepBatch(ids, 2))
        np.testing.assert_array_equal(sweep.prompts[0].output.require_logits(), expected[0])
        np.testing.assert_array_equal(engine.forward([5], 2).require_logits(), expected[1])
        if n == 70 and engine.mode == "whole":  # as many chunks of 64 rows as before
            assert engine.runner.n_built <= before + engine.hparams.n_layer
        k, n_layer = engine.hparams.n_expert_used, engine.hparams.n_layer
        assert sum(counts) in (0, n_layer * k * (n + 1)), "copies of rows are not counted"
        engine.reset(2)
        other.reset(2)


def test_experts_cross_once_for_all_prompts_of_a_sweep(open_engine: Open) -> None:
    engine = open_joint(open_engine, "mini35b", **PLACEMENTS[2])
    batches = mixed(engine)

    def sent_bytes() -> int:
        stats = engine.expert_stats()
        return stats.n_bytes_to_device if stats else 0

    before = sent_bytes()
    sweep = engine.passes.begin_prompts(batches)
    while engine.passes.step_prompt(sweep):
        pass
    together, before = sent_bytes() - before, sent_bytes()
    for batch in batches:
        engine.reset(batch.slot)
        engine.prefill(batch.tokens, batch.slot, greedy=True)
    assert together < 0.5 * (sent_bytes() - before)


def test_a_fault_undoes_all_prompts_of_a_sweep(open_engine: Open) -> None:
    engine = open_joint(open_engine, "mini35b")
    batches = mixed(engine)
    sweep = engine.passes.begin_prompts(batches)
    cancel = CancelToken()
    engine.passes.step_prompt(sweep)
    cancel.set()
    with pytest.raises(Cancelled):
        engine.passes.step_prompt(sweep, cancel)
    assert [len(engine.held(slot)) for slot in range(6)] == [0, 0, 0, 300, 0, 0]
    sweep = engine.passes.begin_prompts(batches)
    while engine.passes.step_prompt(sweep):
        pass
    assert [len(engine.held(batch.slot)) for batch in batches] == [40, 7, 150, 333, 90, 1]
    check_pool(engine.state.pool)


# in a service


SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, top_k=0, top_p=1.0, min_p=0.0, typical_p=0.7),
    SamplingParams(seed=3),
)


def held(service: Service, *clients: Callable[[], Client]) -> list[Client]:
    """Send requests while the engine's thread is busy, so that all of them wait."""
    gate = threading.Event()
    first = Client(service, [1, 2, 3], max_tokens=1, on_step=lambda step: gate.wait(PATIENCE_S))
    until(lambda: first.steps)
    found = [client() for client in clients]
    gate.set()
    return found


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the numbers of rows of the prompts of each sweep that begins from now on."""
    real, found = engine.passes.begin_prompts, list[list[int]]()

    def begin(batches: Any, *more: Any) -> Any:
        found.append([len(batch.tokens) for batch in batches])
        return real(batches, *more)

    monkeypatch.setattr(engine.passes, "begin_prompts", begin)
    return found


@pytest.mark.parametrize(
    ("placement", "is_rounded", "n_ubatch", "joined"),
    [
        (PLACEMENTS[0], True, 512, [140, 35, 20, 90, 3, 60]),
        (PLACEMENTS[3], False, 64, [140, 35, 20, 3]),
    ],
    ids=str,
)
def test_requests_that_wait_are_read_together(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, placement: dict[str, Any],
    is_rounded: bool, n_ubatch: int, joined: list[int],
) -> None:  # fmt: skip
    engine = open_joint(open_engine, "mini35b", n_ubatch=n_ubatch, **placement)
    swept = watched(engine, monkeypatch)
    lengths = (140, 35, 20, 90, 3, 60)
    with serving(engine) as service:
        service._loop._reading._rounds = is_rounded  # as on a device with streams
        requests = [
            partial(Client, service, prompt(engine, n, seed=n), max_tokens=12,
                    n_logprobs=i % 2 or None, sampling=SAMPLINGS[i % 3],
                    marks=(n // 2,) if n > 100 else ())
            for i, n in enumerate(lengths)
        ]  # fmt: skip
        clients = held(service, *requests)
        for client in clients:
            client.wait()
        again = Client(service, [*clients[0].request.prompt[:70], 5, 6], max_tokens=4).wait()
        assert again.last.usage.n_cached == 70
    assert swept[0] == joined, "at most four chunks"
    single = open_engine("mini35b", cpu_reference=True, n_ctx=2048)
    for client in (*clients, again):
        assert client.tokens == alone(single, client.request)[0]
        for step in client.steps:
            assert [one.token for one in step.logprobs] in ([], list(step.tokens))
    check_pool(engine.state.pool)


def test_a_cancelled_request_leaves_those_that_are_read_with_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_joint(open_engine, "mini35b", n_ubatch=512)
    swept = watched(engine, monkeypatch)
    with serving(engine) as service:
        one = partial(Client, service, max_tokens=6)
        clients = held(service, *(partial(one, prompt(engine, 80, seed=n)) for n in range(5)))
        until(lambda: swept)
        clients[1].ticket.cancel()
        clients[3].ticket.cancel()
        for client in clients:
            client.wait()
        more = [Client(service, prompt(engine, 80, seed=n), max_tokens=6) for n in range(9)]
        for client in more:
            client.wait()
    assert len(swept[0]) == 5
    assert [client.reason for client in clients] == ["length", "cancelled"] * 2 + ["length"]
    assert not clients[1].tokens and not clients[3].tokens
    single = open_engine("mini35b", cpu_reference=True, n_ctx=2048)
    for client in (clients[0], clients[2], clients[4], *more):
        assert client.tokens == alone(single, client.request)[0]
    check_pool(engine.state.pool)


def test_a_request_whose_results_are_not_finite_ends_alone(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_joint(open_engine, "mini35b", n_ubatch=512)
    swept, real = watched(engine, monkeypatch), stage_sweep.StageSweep.head

    def head(self: Any, batch: SweepBatch, row: int, n: int) -> Any:
        output = real(self, batch, row, n)
        if len(batch.tokens) == 83:
            raise NotFinite("not finite", (batch.slot,), output)
        return output

    monkeypatch.setattr(stage_sweep.StageSweep, "head", head)
    with serving(engine) as service:
        one = partial(Client, service, max_tokens=6)
        clients = held(service, *(partial(one, prompt(engine, 80 + n, seed=n)) for n in range(5)))
        for client in clients:
            client.wait()
        assert [client.reason for client in clients] == ["length"] * 3 + ["error", "length"]
        assert "not finite" in str(clients[3].last.error)
        last = Client(service, prompt(engine, 40), max_tokens=6).wait()
    assert len(swept[0]) == 5
    single = open_engine("mini35b", cpu_reference=True, n_ctx=2048)
    for client in (*clients[:3], clients[4], last):
        assert client.tokens == alone(single, client.request)[0]


def test_a_prompt_that_can_go_on_from_another_one_waits_for_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_joint(open_engine, "mini35b", n_ubatch=1024)
    swept = watched(engine, monkeypatch)
    shared = prompt(engine, 150, seed=8).tolist()
    with serving(engine) as service:
        one = partial(Client, service, max_tokens=4)
        requests = [partial(one, [*shared, *range(n, n + 20)], marks=(150,)) for n in range(1, 4)]
        *clients, other = held(service, *requests, partial(one, prompt(engine, 50, seed=9)))
        for client in (other, *clients):
            client.wait()
    assert swept[0] == [170, 50]
    assert [client.last.usage.n_cached for client in clients] == [0, 150, 150]
