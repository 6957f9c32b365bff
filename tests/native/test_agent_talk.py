"""A transcript like an agent's: each prompt computes only what is new since the nearest mark.

System prompt, tools, questions, and turns of reasoning and calls; the template drops the reasoning
of earlier questions. The answers are drawn under grammars, so their tokens are not those that their
text is encoded to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.qwen_template import QWEN
from helpers.shipped import TINY

from moegraph import ChatRequest, Engine, EngineConfig, Format, GenerationEvent, SamplingParams
from moegraph.engine.chat import ChatModel
from moegraph.text.chat.template import ChatTemplate

SYSTEM = {"role": "system", "content": "You are a careful agent. " * 20}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place. " * 10,
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "enum": ["attic", "cellar", "garden"]},
                "depth": {"type": "number", "minimum": 0, "maximum": 9},
                "again": {"type": "boolean"},
            },
            "required": ["place", "depth", "again"],
        },
    },
}
# Marks are this far apart, and a turn begins with a few tokens.
APART, BEGIN = 64, 24


class Agent:
    """An engine, and the messages of a conversation with tools."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = engine.__dict__["_chat_model"] = ChatModel.of(engine, ChatTemplate(QWEN))
        self.messages: list[dict[str, Any]] = [SYSTEM]
        self.seed = 0

    def answer(self, **fields: Any) -> GenerationEvent:
        """Answer the last message, and add the answer; return the last event."""
        self.seed += 1
        sampling = SamplingParams(temperature=1.2, seed=self.seed)
        said = self.engine.chat(self.messages, [LOOK], sampling=sampling, **fields)
        self.messages.append(said.whole().message())
        assert said.finish_reason in ("stop", "tool_calls") and said.event is not None
        return said.event

    def call(self) -> GenerationEvent:
        """Let the model call the tool, and add its result."""
        event = self.answer(tool_choice="required", parallel_tool_calls=False, **QUIET)
        for call in self.messages[-1]["tool_calls"]:
            result = {"role": "tool", "tool_call_id": call["id"], "content": "Nothing there. " * 9}
            self.messages.append(result)
        return event

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def n_prompt(self, messages: list[dict[str, Any]]) -> int:
        request = self.model.prepare(ChatRequest(messages, [LOOK], **QUIET)).request
        return len(request.prompt)


# The shipped model would not end its reasoning.
QUIET: dict[str, Any] = {"variables": {"enable_thinking": False}}
TEXT = {"tool_choice": "none", "format": Format("regex", "[a-z ]{60,90}\\."), **QUIET}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=8192)
    with Engine.load(TINY, config) as loaded:
        yield loaded


@pytest.fixture
def agent(engine: Engine) -> Iterator[Agent]:
    engine.reset()
    engine.prefixes.store.clear()
    found = Agent(engine)
    yield found
    found.model.close()


def test_turns_with_calls_go_on_where_the_sequence_ends(agent: Agent) -> None:
    agent.ask("Where is it?")
    last = agent.call()
    assert last.n_computed == last.n_prompt
    for _ in range(8):
        held = last.n_prompt + last.n_generated - 1
        last = agent.call()
        assert last.n_prompt - last.n_computed == held


def test_a_new_question_computes_what_its_template_changed(agent: Agent) -> None:
    """The turns since the last question are then shown without their reasoning."""
    before = 0
    for n in range(5):
        agent.ask(f"Question {n}: where is it?")
        known = agent.n_prompt(agent.messages)
        first = agent.call()
        if n:
            assert first.n_computed <= known - before + APART + BEGIN
        before = known
        agent.call()
        agent.answer(**TEXT)


def test_an_edit_in_the_middle_and_a_new_conversation(agent: Agent) -> None:
    for n in range(4):
        agent.ask(f"Question {n}: " + "where is it? " * 8)
        agent.answer(**TEXT)
    agent.messages = [*agent.messages[:5], {"role": "user", "content": "Another question"}]
    edited = agent.answer(**TEXT)
    assert edited.n_computed <= BEGIN + APART
    agent.messages = [SYSTEM]
    agent.ask("Hello")
    fresh = agent.answer(**TEXT)
    assert fresh.n_computed <= BEGIN + APART < fresh.n_prompt
