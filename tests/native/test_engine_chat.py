"""`Engine.chat`: conversations, formats and tools with the shipped model, which knows none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.shipped import TINY, merged_tiny

from moegraph import CallEnd, CancelToken, ContentPart, Engine, EngineConfig, Format, SamplingParams
from moegraph.errors import ContextOverflow, EngineBusy, RequestError
from moegraph.loop.choice import TokenChoice

SYSTEM = {"role": "system", "content": "You write Python. " * 12}
ASKED = [SYSTEM, {"role": "user", "content": "def add(a, b):"}]
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=4)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["m", "km"]},
            },
            "required": ["n", "unit"],
        },
    },
}


@pytest.fixture(scope="module", params=["plain", "mtp", "lookup"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    target = TINY
    if request.param == "mtp":
        target = merged_tiny(tmp_path_factory.mktemp("mtp"))
    spec = {} if request.param == "plain" else {"spec": request.param}
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=768, cpu_reference=True, **spec)
    with Engine.load(target, config) as loaded:
        yield loaded


def test_a_conversation_goes_on_and_reads_only_what_is_new(engine: Engine) -> None:
    answer = engine.chat(ASKED, sampling=GREEDY, max_tokens=12)
    parts = list(answer)
    assert all(isinstance(part, ContentPart) for part in parts) and answer.event is not None
    assert answer.reply.content == "".join(p.text for p in parts if isinstance(p, ContentPart))
    assert answer.finish_reason == "length"
    messages = [*ASKED, answer.reply.message(), {"role": "user", "content": "And now?"}]
    second = engine.chat(messages, sampling=GREEDY, max_tokens=12)
    second.whole()
    assert second.event is not None
    assert second.event.n_computed < second.event.n_prompt - 60


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_an_answer_has_the_form_that_was_asked_for(
    engine: Engine, sampling: SamplingParams
) -> None:
    answer = engine.chat(ASKED, sampling=sampling, format=Format("json_schema", SCHEMA))
    found = json.loads(answer.whole().content)
    assert set(found) == {"name", "n", "tags"} and 0 <= found["n"] <= 99
    assert answer.finish_reason == "stop"


def test_a_tool_that_must_be_called(engine: Engine) -> None:
    answer = engine.chat(
        ASKED, [PICK], tool_choice="pick", sampling=WARM, max_tokens=200, parallel_tool_calls=False
    )
    parts = list(answer)
    assert answer.finish_reason == "tool_calls" and isinstance(parts[-1], CallEnd)
    [call] = answer.reply.calls
    found = json.loads(call.arguments)
    assert call.name == "pick" and found["unit"] in ("m", "km") and 1 <= found["n"] <= 9
    messages = [*ASKED, answer.reply.message(), {"role": "tool", "content": "done"}]
    assert engine.chat(messages, [PICK], max_tokens=4).whole() is not None


@pytest.mark.parametrize("seed", range(2))
def test_the_next_turn_has_the_tokens_that_were_drawn(engine: Engine, seed: int) -> None:
    """A grammar makes the model draw tokens that its text is not encoded to."""
    sampling = SamplingParams(temperature=1.5, seed=seed)
    words = Format("regex", "[a-z]{3,8}( [a-z_]{2,9}){12,16}")
    answer = engine.chat(ASKED, sampling=sampling, format=words)
    answer.whole()
    messages = [*ASKED, answer.reply.message(), {"role": "user", "content": "And now?"}]
    second = engine.chat(messages, sampling=GREEDY, max_tokens=2)
    second.whole()
    first, last = answer.event, second.event
    assert first is not None and last is not None
    # the end token was drawn, but nothing was computed from it
    assert last.n_prompt - last.n_computed == first.n_prompt + first.n_generated - 1


@pytest.mark.parametrize("how", ["cancelled", "late", "length"])
def test_after_a_cut_answer_only_what_is_new_is_read(
    engine: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """late: the row of the next token is computed, but its grammar is not there in time."""
    cancel, is_late = CancelToken(), False

    def is_ready(choice: TokenChoice, within_s: float) -> bool:
        nonlocal is_late
        is_late = how == "late" and cancel.is_set()
        return not is_late  # otherwise `pick` waits for it, however busy the machine is

    monkeypatch.setattr(TokenChoice, "is_ready", is_ready)
    limit = 24 if how == "length" else 200
    words = Format("regex", "[a-z]{3,8}(,[a-z_]{2,9}){150}")
    sampling = SamplingParams(temperature=1.5, seed=1)
    answer = engine.chat(ASKED, sampling=sampling, format=words, max_tokens=limit, cancel=cancel)
    while answer.event is None or answer.event.n_generated < 20:
        next(answer)
    if how != "length":
        cancel.set()
    answer.whole()
    assert answer.finish_reason == how.replace("late", "cancelled") and answer.event is not None
    assert is_late == (how == "late")
    held = engine.held(0)
    # the last token was drawn, but nothing was computed from it, unless the next one was late
    assert len(held) == answer.event.n_prompt + answer.event.n_generated - (not is_late)
    asked = [*ASKED, answer.reply.message(), {"role": "user", "content": "And now?"}]
    second = engine.chat(asked, sampling=GREEDY, max_tokens=30)
    text = second.whole().content
    assert engine.held(0)[: len(held)] == held and len(engine.held(0)) > len(held)
    assert second.event is not None and second.event.n_reused == len(held)
    engine.reset()
    anew = engine.chat(asked, sampling=GREEDY, max_tokens=30, reuse=False)
    assert anew.whole().content == text


def test_a_cut_call_is_told_as_cut(engine: Engine) -> None:
    answer = engine.chat(ASKED, [PICK], tool_choice="required", sampling=WARM, max_tokens=34)
    reply = answer.whole()
    assert answer.finish_reason == "length"
    assert all(not call.is_whole for call in reply.calls)


def test_a_deadline_ends_an_answer(engine: Engine) -> None:
    answer = engine.chat(ASKED, sampling=GREEDY, max_tokens=50, deadline_s=0.0)
    assert answer.whole().content == "" and answer.finish_reason == "deadline"


def test_it_can_be_cancelled_or_closed(engine: Engine) -> None:
    cancel = CancelToken()
    answer = engine.chat(ASKED, sampling=GREEDY, max_tokens=50, cancel=cancel)
    next(answer)
    cancel.set()
    answer.whole()
    assert answer.finish_reason == "cancelled"
    answer = engine.chat(ASKED, sampling=GREEDY, max_tokens=50)
    next(answer)
    with pytest.raises(EngineBusy):
        next(engine.chat(ASKED, max_tokens=1))
    answer.close()
    answer.close()
    engine.chat(ASKED, max_tokens=1).whole()


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"format": Format("regex", "(")}, RequestError, "not valid"),
        ({"max_tokens": -1}, RequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, ContextOverflow, "context"),
        ({"messages": [{"role": "robot"}]}, RequestError, "robot"),
    ],
)
def test_what_is_wrong_is_refused_at_once(
    engine: Engine, fields: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        engine.chat(**{"messages": ASKED, **fields})
