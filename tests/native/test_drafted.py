"""Generations with drafts: the text, its events and the sequence are those without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers.faults import FAULTS, faulty
from helpers.scripted_drafts import AnyController, ScriptedDrafter, told_of
from helpers.shared import prompt

from moegraph.draft.drafter import Draft
from moegraph.draft.lookup import LookUp
from moegraph.draft.plan import PLAIN, Plan, Step
from moegraph.engine import Engine
from moegraph.errors import MoegraphError
from moegraph.events import CancelToken
from moegraph.ggml.ops import MAX_TREE_ROWS
from moegraph.passes.speculation import Speculation
from moegraph.runner import LayeredRunner, NotFinite
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "defaults": {"seed": 1},
    "whole": {**OFF, "seed": 2},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2,
                  "repeat_last_n": 20, "seed": 3},
    "penalties-greedy": {"temperature": 0.0, "repeat_penalty": 2.0, "logit_bias": {9: 4.0}},
    "min-p": {**OFF, "min_p": 0.05, "seed": 4},
    # these need the logits of whole rows
    "typical": {**OFF, "typical_p": 0.9, "seed": 5},
    "long-penalties": {"repeat_penalty": 1.1, "repeat_last_n": 100_000, "seed": 6,
                       "logit_bias": dict.fromkeys(range(500), 0.1)},
}  # fmt: skip
# Slots for a share of the experts: of legacy32, then of mini35b.
RESIDENCIES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "60": {"cache_slots": 154, "pin_layers": 0, "miss": "stream"},
    "25": {"cache_slots": 64, "pin_layers": 0, "miss": "cpu"},
}
MINI: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "60": {"cache_slots": 77, "pin_layers": 0, "miss": "stream"},
    "25": {"cache_slots": 32, "pin_layers": 0, "miss": "cpu"},
}
FAULTY = [RESIDENCIES["whole"], {"cache_slots": 64, "pin_layers": 0, "miss": "stream"}]


def events_of(engine: Engine, ids: Sequence[int], **kwargs: Any) -> list[tuple[Any, ...]]:
    """Return token, text, number and reason of each event."""
    kwargs = {"text": False, "max_tokens": 24, **kwargs}
    return [
        (e.token, e.text, e.n_generated, e.finish_reason) for e in engine.generate(ids, **kwargs)
    ]


def speculate(engine: Engine, *drafters: Any, **controller: Any) -> AnyController:
    """Have an engine draft."""
    names = [drafter.name for drafter in drafters]
    chosen = AnyController(names, **controller)
    cache = engine.runner.cache if isinstance(engine.runner, LayeredRunner) else None
    engine.speculation = Speculation(
        drafters, chosen, engine.hparams.n_vocab, engine._loaded.config.n_draft + 1,
        lambda: cache.n_missing if cache else 0,
    )  # fmt: skip
    return chosen


def plain_text(engine: Engine, ids: Sequence[int], **kwargs: Any) -> list[tuple[Any, ...]]:
    """Return the events of a generation without drafts."""
    engine.speculation = None
    return events_of(engine, ids, **kwargs)


def scripted(engine: Engine, ids: Sequence[int], events: Sequence[Any], **args: Any) -> Any:
    """Return a drafter that knows the answer."""
    text = [*ids, *[event[0] for event in events]]
    return ScriptedDrafter(text, engine.hparams.n_vocab, **args)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_text_with_drafts_is_the_text_without(open_engine: Open, residency: str) -> None:
    engine = open_engine(cpu_reference=True, n_draft=12, **RESIDENCIES[residency])
    n_accepted = 0
    for i, (name, settings) in enumerate(SAMPLERS.items()):
        ids = [*prompt(engine, 5 + 15 * (i % 3), seed=i).tolist(), 1, 2, 3, 1, 2, 3, 1, 2]
        params = SamplingParams(**settings)
        plain = plain_text(engine, ids, sampling=params)
        held = list(engine.held(0))
        drafter = scripted(engine, ids, plain, seed=i)
        controller = speculate(engine, drafter, LookUp(), seed=i)
        assert events_of(engine, ids, sampling=params) == plain, name
        assert engine.held(0) == held == told_of(engine, drafter)
        assert sum(step.n_tokens for step in controller.steps) == len(plain) - 1
        n_accepted += sum(step.n_accepted for step in controller.steps)
    assert n_accepted > 20


@pytest.mark.parametrize("residency", ["whole", "25"])
def test_text_with_drafts_of_the_mtp_block_is_the_text_without(
    open_engine: Open, residency: str
) -> None:
    engine = open_engine("mini35b", cpu_reference=True, spec="mtp", **MINI[residency])
    (block,) = engine._loaded.drafters
    for i, name in enumerate(("greedy", "penalties", "whole")):
        ids, params = prompt(engine, 9 + 60 * i, seed=i).tolist(), SamplingParams(**SAMPLERS[name])
        plain = plain_text(engine, ids, sampling=params)
        # the block's weights are random; so it is right in what another drafter knows
        known = scripted(engine, ids, plain, right=0.9, seed=i)
        controller = speculate(engine, block, known, seed=i)
        for reuse in (False, True):
            assert events_of(engine, ids, sampling=params, reuse=reuse) == plain, name
        assert {"mtp", "scripted", ""} == {step.source for step in controller.steps}
        assert not engine.drain_messages()


# and the rows of a verify pass that there must be memory for
SETTINGS: list[tuple[dict[str, Any], int]] = [
    ({"spec": "lookup"}, 16),
    ({"spec": "lookup", "budget": 3}, 3),
    ({"spec": "mtp", "draft_max": 2}, 3),
    ({"spec": "mtp", "budget": 6}, 6),
    ({"spec": "mtp", "ddtree": True, "ddtree_budget": 9, "ddtree_no_chain_seed": True}, 10),
    ({"spec": "lookup", "ddtree": True}, MAX_TREE_ROWS),
    ({"spec": "auto"}, 16),
    ({"spec": "off"}, 0),
]


@pytest.mark.parametrize("residency", ["60"])
def test_settings_decide_what_an_engine_drafts(open_engine: Open, residency: str) -> None:
    """And the text stays what it is."""
    texts = []
    for settings, n_rows in SETTINGS:
        engine = open_engine("mini35b", cpu_reference=True, **MINI[residency], **settings)
        ids = np.concatenate([prompt(engine, 40), prompt(engine, 30)]).tolist()
        params = SamplingParams(temperature=0.5, seed=1)
        texts.append(events_of(engine, ids, sampling=params, max_tokens=30))
        speculation, spec = engine.speculation, settings["spec"]
        if spec == "off":
            assert speculation is None
            break
        assert speculation is not None and not engine.drain_messages()
        names = ["mtp", "lookup"] if spec == "auto" else [spec]
        assert list(speculation.drafters) == names
        assert spec != "mtp" or speculation.controller.stats.steps > 0
        assert speculation.max_rows == n_rows <= engine.stage.state.drafts.n_rows
        engine.close()
    assert texts == [texts[0]] * len(SETTINGS)


def test_text_ends_where_it_ends_without_drafts(open_engine: Open) -> None:
    """At a stop string, the limit, or the end of the context, in the midst of drafts."""
    engine = open_engine(cpu_reference=True, n_draft=12, n_ctx=256, mode="whole")
    ids = prompt(engine, 9).tolist()
    params = SamplingParams(**SAMPLERS["defaults"])
    text = "".join(e[1] for e in plain_text(engine, ids, sampling=params, text=True))
    longer = prompt(engine, 245).tolist()
    cases: list[tuple[list[int], dict[str, Any]]] = [
        (ids, {"text": True}),
        (ids, {"text": True, "stop": (text[20:23], "never")}),
        (ids, {"text": True, "stop": (text[30:31],), "max_tokens": 60}),
        *((ids, {"max_tokens": n}) for n in (0, 1, 2, 3, 8)),
        (longer, {"max_tokens": None}),
        (longer, {"max_tokens": 11}),
    ]
    for i, (given, kwargs) in enumerate(cases):
        plain = plain_text(engine, given, sampling=params, **kwargs)
        held = list(engine.held(0))
        for seed in range(3):
            drafter = scripted(engine, given, plain, right=0.9, seed=seed)
            # the script goes on after the end, as a drafter would
            drafter.text += prompt(engine, 30, seed).tolist()
            speculate(engine, drafter, seed=seed, shapes=["chain", "ddtree"])
            assert events_of(engine, given, sampling=params, **kwargs) == plain, i
            assert engine.held(0) == held


def test_nothing_is_accepted_after_an_end_token(open_engine: Open) -> None:
    engine = open_engine(cpu_reference=True, n_draft=12, mode="whole")
    ids, end = prompt(engine, 9).tolist(), min(engine.tokenizer.eog_ids)
    for at in (0, 3):
        # the bias makes it likely sooner or later
        params = SamplingParams(**OFF, seed=at, logit_bias={end: 3.0})
        plain = plain_text(engine, ids, sampling=params, text=True, max_tokens=200)
        assert plain[-1][0] == end and plain[-1][3] == "stop" and len(plain) > 3
        drafter = scripted(engine, ids, plain, right=1.0)
        drafter.text += [end, 5, 6, end, 7]
        speculate(engine, drafter, shapes=["chain"])
        assert events_of(engine, ids, sampling=params, text=True, max_tokens=200) == plain


def test_a_cancelled_generation_tells_what_it_drew(open_engine: Open) -> None:
    engine = open_engine(cpu_reference=True, n_draft=12, mode="whole")
    ids = prompt(engine, 9).tolist()
    plain = plain_text(engine, ids)
    for n in (1, 4, 9):
        speculate(engine, scripted(engine, ids, plain, right=1.0), shapes=["chain"], seed=n)
        token, events = CancelToken(), []
        for event in engine.generate(ids, max_tokens=24, text=False, cancel=token):
            events.append((event.token, event.text, event.n_generated, event.finish_reason))
            if len(events) == n:
                token.set()
        last, told = events.pop(), [*ids, *(event[0] for event in events)]
        assert (last[0], last[2], last[3]) == (None, len(events), "cancelled"), "all were told"
        assert n <= len(events) <= n + 7 + 7 and events == plain[: len(events)]
        assert engine.held(0) == told[:-1], "all but the last token"
        (event,) = engine.generate(told, max_tokens=1, text=False, reuse=True)
        assert (event.n_reused, event.token) == (len(told) - 1, plain[len(events)][0])
        assert events_of(engine, ids) == plain


@pytest.mark.parametrize("spoiled", ["nan", "id", "empty"])
def test_plain_decoding_goes_on_after_a_drafter_failed(open_engine: Open, spoiled: str) -> None:
    engine = open_engine(cpu_reference=True, n_draft=12, mode="whole")
    ids = prompt(engine, 9).tolist()
    plain = plain_text(engine, ids)
    tokens, log_p = np.full((2, 1), 3, np.int32), np.full((2, 1), -1.0, np.float32)
    wrong = {
        "nan": Draft(tokens, log_p * np.nan),
        "id": Draft(tokens + engine.hparams.n_vocab, log_p),
        "empty": Draft.empty(),
    }[spoiled]
    drafter = scripted(engine, ids, plain, right=1.0)
    drafter.spoiled[3] = wrong
    speculate(engine, drafter, LookUp(), shapes=["chain"])
    assert events_of(engine, ids) == plain
    n_drafts, lines = drafter.n_drafts, engine.drain_messages()
    assert events_of(engine, ids) == plain
    if spoiled == "empty":
        assert lines == [] and drafter.n_drafts > n_drafts > 4
        return
    (line,) = lines
    assert line.startswith("the drafter scripted is not used any more: it")
    assert drafter.n_drafts == n_drafts == 4 and engine.drain_messages() == []


def test_a_drafted_row_that_is_not_finite_does_not_end_the_text(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding of a token is damaged. Without drafts the text does not come to that token."""
    engine = open_engine(cpu_reference=True, n_draft=12, mode="whole")
    ids, embedding = prompt(engine, 9).tolist(), engine.stage.weights.embedding
    plain, rows = plain_text(engine, ids), embedding.rows
    bad = next(t for t in range(1000) if t not in [*ids, *[event[0] for event in plain]])

    def damaged(tokens: np.ndarray, out: np.ndarray) -> None:
        rows(tokens, out)
        out[tokens == bad] = np.nan

    monkeypatch.setattr(embedding, "rows", damaged)
    drafter = scripted(engine, ids, plain, right=1.0)
    drafter.spoiled[2] = Draft(np.full((3, 1), bad, np.int32))
    controller = speculate(engine, drafter, shapes=["chain"])
    assert events_of(engine, ids) == plain
    assert max(step.n_accepted for step in controller.steps) > 1
    # a token that plain decoding comes to is an error with and without drafts
    bad = plain[5][0]
    for drafting in (None, engine.speculation):
        engine.speculation = drafting
        with pytest.raises(NotFinite):
            events_of(engine, ids)
        assert engine.held(0) == []


@pytest.mark.parametrize("settings", FAULTY, ids=["whole", "stream"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_native_call_that_fails_ends_only_that_generation(
    open_engine: Open, settings: dict[str, Any], name: str
) -> None:
    engine = open_engine(cpu_reference=True, n_draft=12, **settings)
    ids = prompt(engine, 9).tolist()
    plain = plain_text(engine, ids, max_tokens=8)
    drafter = scripted(engine, ids, plain, right=0.8)
    result, kind = FAULTS[name]
    at, n_failed = 0, 0
    while True:
        at = at + 1 if at < 12 else at + at // 3
        speculate(engine, drafter, LookUp(), shapes=["chain"], seed=at)
        with faulty(name, at, result) as library:
            try:
                assert events_of(engine, ids, max_tokens=8) == plain
            except MoegraphError as error:
                assert isinstance(error, kind), error
                n_failed += 1
        assert events_of(engine, ids, max_tokens=8) == plain, at
        assert told_of(engine, drafter) == engine.held(0)
        if library.n_calls < at:
            break
    assert n_failed or name not in ("mg_launch", "mg_graph_alloc")


def test_a_step_says_what_became_of_its_draft(open_engine: Open) -> None:
    engine = open_engine(cpu_reference=True, n_draft=12, **RESIDENCIES["25"])
    ids = prompt(engine, 9).tolist()
    plain = [event[0] for event in plain_text(engine, ids)]
    drafter = ScriptedDrafter([], engine.hparams.n_vocab)
    t = [*plain, 0, 0]
    other = [next(x for x in range(9) if x not in (token, 8)) for token in t]
    # the first token comes from the prompt; so the first draft is of t[1], t[2], ...
    drafter.spoiled = {
        0: Draft(np.array([[t[1], 8], [t[2], 8], [other[3], t[3]]], np.int32),
                 np.log(np.array([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]], np.float32))),
        1: Draft(np.array([[other[4]]], np.int32), None, np.array([0.25], np.float32)),
        2: Draft(np.array([[t[5]], [t[6]], [t[7]]], np.int32)),
    }  # fmt: skip
    controller = speculate(engine, drafter)
    lengths = iter([3, 1, 2])
    controller.n_spine = lambda plan, draft: next(lengths)  # type: ignore[method-assign]
    plans = iter([Plan("scripted", 3, 2), Plan("scripted", 1), Plan("scripted", 4)])
    controller.choose = lambda *_: next(plans, PLAIN)  # type: ignore[method-assign]
    assert [event[0] for event in events_of(engine, ids, max_tokens=12)] == plain[:12]
    a, b, c, d = controller.steps[:4]
    assert (a.n_tokens, a.n_rows, a.n_draft, a.n_spine, a.n_accepted) == (3, 4, 3, 3, 2)
    assert a.ranks == (0, 0, 1) and np.allclose(np.exp(a.log_p), (0.9, 0.7, 0.6))
    assert (b.n_tokens, b.n_rows, b.n_spine, b.n_accepted, b.ranks) == (1, 2, 1, 0, (-1,))
    assert np.allclose(np.exp(b.log_p), 0.25)
    assert (c.n_tokens, c.n_rows, c.n_draft, c.n_spine, c.ranks) == (3, 3, 4, 2, (0, 0))
    assert c.log_p == () and d == Step("", d.seconds, verify_s=d.verify_s, n_missing=d.n_missing)
    assert all(s.seconds > s.verify_s + s.drafter_s > 0 < s.commit_s for s in (a, b, c))
    stats = engine.expert_stats()
    assert stats is not None
    assert 0 < sum(s.n_missing for s in controller.steps) <= stats.cache.missing.sum()
