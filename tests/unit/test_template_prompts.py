"""Prompts and answers with the templates that llama.cpp ships, where its source was fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import pytest
from helpers.fake_engine import ByteTokenizer
from helpers.server_case import Case

from moegraph.engine.chat import ChatModel, ChatRequest, thinking_variables
from moegraph.text.chat.parts import Reply
from moegraph.text.chat.template import ChatTemplate
from moegraph.text.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "build" / "llama.cpp" / "models" / "templates"
if not FOLDER.is_dir():
    pytest.skip("llama.cpp's source was not fetched", allow_module_level=True)

HARMONY, GLM, GLM_FLASH = "openai-gpt-oss-120b", "GLM-4.6", "GLM-4.7-Flash"
GEMMA, OLD_GEMMA = "google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"
QWEN, CODER = "Qwen-Qwen3-0.6B", "Qwen3-Coder"
ALL = (HARMONY, GLM, GLM_FLASH, GEMMA, OLD_GEMMA, QWEN, CODER)

ARGUMENTS = {"at": "Köln", "n": 2, "all": {"a": [True, "x"]}}
PARAMETERS = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "description": "where"}, "n": {"type": "integer"},
        "all": {"type": "object"},
    },
    "required": ["at"],
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS},
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}


def call(arguments: Any, number: str = "1") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": "look", "arguments": arguments}}


@cache
def model(name: str) -> ChatModel:
    source = (FOLDER / f"{name}.jinja").read_text()
    return ChatModel(cast(Tokenizer, ByteTokenizer()), ChatTemplate(source))


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    for name in ALL:
        model(name).close()
    model.cache_clear()


def prompt(name: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    return model(name).prompt(ChatRequest(messages, **fields)).text


def expected(name: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Return what Jinja makes of messages."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    def tojson(value: Any, ensure_ascii: bool = False, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii)

    made = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form),
    }  # fmt: skip
    template = made.from_string((FOLDER / f"{name}.jinja").read_text())
    return template.render(
        messages=messages, bos_token="\x01", **{"add_generation_prompt": True, **variables}
    )


def conversation(arguments: Any) -> list[dict[str, Any]]:
    return [
        SYSTEM, USER,
        {"role": "assistant", "content": "Hello", "reasoning_content": "They greet."},
        {"role": "user", "content": "Look"},
        {
            "role": "assistant", "content": "", "reasoning_content": "I look.",
            "tool_calls": [call(arguments)],
        },
        {"role": "tool", "tool_call_id": "1", "content": '{"seen": "é"}'},
    ]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_a_conversation_with_a_call(name: str) -> None:
    read = conversation(ARGUMENTS)
    if name == HARMONY:
        for message in read:
            if "reasoning_content" in message:
                message["thinking"] = message["reasoning_content"]
    if name == OLD_GEMMA:
        response = {"name": "look", "response": {"seen": "é"}}
        read[4:] = [{**read[4], "tool_responses": [response]}]
    if name in (GLM, GLM_FLASH, CODER):  # their values are shown as text
        shown = {k: v if isinstance(v, str) else json.dumps(v) for k, v in ARGUMENTS.items()}
        read[4]["tool_calls"] = [call(shown)]
    text = prompt(name, conversation(json.dumps(ARGUMENTS)), tools=[TOOL])
    assert text == expected(name, read, tools=[TOOL])
    assert "Köln" in text and ("I look." in text or name == CODER)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("effort", [None, "none", "low"])
def test_a_question_and_how_hard_to_think(name: str, effort: str | None) -> None:
    variables = thinking_variables(effort)
    text = prompt(name, [SYSTEM, USER], variables=variables)
    if name == HARMONY and effort == "none":
        variables = {"reasoning_effort": "low"}  # it cannot be turned off
    assert text == expected(name, [SYSTEM, USER], **variables)


@pytest.mark.parametrize(
    ("name", "field", "end"),
    [
        (HARMONY, "content", "<|start|>assistant<|channel|>analysis<|message|>So<|end|>"
         "<|start|>assistant<|channel|>final<|message|>It is"),
        (HARMONY, "reasoning_content", "<|start|>assistant<|channel|>analysis<|message|>So"),
        (GEMMA, "content", "<|turn>model\n<|channel>thought\nSo<channel|>It is"),
        (GEMMA, "reasoning_content", "<|turn>model\n<|channel>thought\nSo"),
        (GLM, "content", "<|assistant|>\n<think>So</think>\nIt is"),
        (GLM_FLASH, "content", "<|assistant|><think>So</think>It is"),
        (GLM_FLASH, "reasoning_content", "<|assistant|><think>So"),
        (QWEN, "content", "<|im_start|>assistant\n<think>\nSo\n</think>\n\nIt is"),
        (QWEN, "reasoning_content", "<|im_start|>assistant\n<think>\nSo"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("effort", ["none", "low"])
def test_an_answer_that_goes_on(name: str, field: str, end: str, effort: str) -> None:
    begun = {"role": "assistant", "content": "It is", "reasoning_content": "So"}
    variables = thinking_variables(effort)
    asked = ChatRequest([USER, begun], continue_final_message=field, variables=variables)
    assert model(name).prompt(asked).text.endswith(end)
    parser = model(name).prepare(asked).parser
    reply = Reply()
    reply.add(parser.push(" so"))
    assert (reply.content, reply.reasoning) == (
        (" so", "") if field == "content" else ("", " so")
    )  # fmt: skip


class TestHarmony:
    def test_several_calls_of_a_message_have_one_each(self) -> None:
        both = {
            "role": "assistant", "content": "", "reasoning_content": "Two.",
            "tool_calls": [call({"at": "a"}, "1"), call({"at": "b"}, "2")],
        }  # fmt: skip
        results = [
            {"role": "tool", "tool_call_id": "2", "content": "two"},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
        ]
        text = prompt(HARMONY, [USER, both, *results], tools=[TOOL])
        places = [
            text.index(one) for one in ("Two.", '{"at": "a"}', '"one"', '{"at": "b"}', '"two"')
        ]
        assert places == sorted(places) and text.count("to=functions.look") == 2

    def test_what_the_template_would_leave_out_or_fail_for(self) -> None:
        late = {"role": "system", "content": "Now in French."}
        assert "Now in French." in prompt(HARMONY, [USER, late, USER])
        bare = {"type": "function", "function": {"name": "look"}}
        assert "type look = () => any" in prompt(HARMONY, [USER], tools=[bare])

    def test_an_end_for_training_is_an_end(self) -> None:
        said = {"role": "assistant", "content": "Yes"}
        fields = {"add_generation_prompt": False, "continue_final_message": False}
        assert prompt(HARMONY, [USER, said], **fields).endswith("<|message|>Yes<|end|>")


def test_gemma_answers_after_a_call_with_text() -> None:
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call({"at": "a"})]}
    result = {"role": "tool", "tool_call_id": "1", "content": "one"}
    text = prompt(GEMMA, [USER, turn, result], tools=[TOOL])
    assert text.endswith("I look.<turn|>\n<|turn>model\n")
    text = prompt(
        GEMMA, [USER, turn, result], tools=[TOOL], add_generation_prompt=False
    )  # fmt: skip
    assert text.endswith("I look.<turn|>\n")


FINAL = "<|channel|>final<|message|>"


def streamed(case: Case, messages: list[Any]) -> tuple[dict[str, Any], str]:
    """Return the message of a streamed answer, and why it ended."""
    body = {"messages": messages, "tools": [TOOL], "reasoning_effort": "low"}
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    ends = []
    for event in case.events("/v1/chat/completions", body)[:-1]:
        delta = event["choices"][0]["delta"]
        ends.append(event["choices"][0]["finish_reason"])
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for one in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in one:
                calls.append({**one, "function": {**one["function"], "arguments": ""}})
            calls[one["index"]]["function"]["arguments"] += one["function"].get("arguments", "")
    return message, ends[-1]


@pytest.mark.parametrize(
    ("name", "text", "thoughts", "answer"),
    [
        (HARMONY, '<|channel|>analysis<|message|>So<|end|><|start|>assistant<|channel|>commentary '
         'to=functions.look <|constrain|>json<|message|>{"at": "a", "n": 2}', "So", FINAL),
        (GEMMA, "<|channel>thought\nSo<channel|>"
         '<|tool_call>call:look{at:<|"|>a<|"|>,n:2}<tool_call|>', "So", ""),
        (OLD_GEMMA, '<|tool_call>call:look{at:<|"|>a<|"|>,n:2}<tool_call|>', "", ""),
        (GLM, "\n<think>So</think>\n<tool_call>look\n<arg_key>at</arg_key>\n"
         "<arg_value>a</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n"
         "</tool_call>", "So", "\n<think></think>\n"),
        (GLM_FLASH, "So</think><tool_call>look<arg_key>at</arg_key><arg_value>a</arg_value>"
         "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>", "So", "</think>"),
        (QWEN, "<think>\nSo\n</think>\n\n"
         '<tool_call>\n{"name": "look", "arguments": {"at": "a", "n": 2}}'
         "\n</tool_call>", "So", "<think>\n\n</think>\n\n"),
        (CODER, "<tool_call>\n<function=look>\n<parameter=at>\na\n</parameter>\n<parameter=n>\n2\n"
         "</parameter>\n</function>\n</tool_call>", "", ""),
    ],
)  # fmt: skip
def test_a_call_makes_its_round_over_http(name: str, text: str, thoughts: str, answer: str) -> None:
    answer += "It rains."
    scripts = [[one[n : n + 5] for n in range(0, len(one), 5)] for one in (text, answer)]
    case = Case(*scripts, chat=model(name))
    called, end = streamed(case, [USER])
    assert (called["reasoning_content"], called["content"], end) == (thoughts, "", "tool_calls")
    (one,) = called["tool_calls"]
    assert json.loads(one["function"]["arguments"]) == {"at": "a", "n": 2}
    result = {"role": "tool", "tool_call_id": one["id"], "content": "It rained."}
    told, end = streamed(case, [USER, called, result])
    assert (told["content"], end) == ("It rains.", "stop") and "tool_calls" not in told
    shown = bytes(case.service.requests[1].prompt).decode()
    assert "It rained." in shown
    begins = (text.find(tag) for tag in ("<|tool_call>", "<tool_call>", '{"at"'))
    assert text[next(at for at in begins if at >= 0) :] in shown
