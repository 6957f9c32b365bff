"""Requests of OpenAI's Responses interface, as requests of a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moegraph.engine.chat import Format
from moegraph.sampling import SamplingParams
from moegraph.server.errors import ApiError
from moegraph.server.responses import ReadRequest, ResponsesBody, ToolName, read_request
from moegraph.server.responsestore import ResponseStore
from moegraph.server.schemas import Defaults

PLAIN = Defaults()


def read(store: ResponseStore | None = None, defaults: Any = PLAIN, **fields: Any) -> ReadRequest:
    body = ResponsesBody.model_validate({"model": "m", "input": "hello", **fields})
    return read_request(body, store or ResponseStore(), "", defaults)


def test_the_server_says_what_the_request_does_not() -> None:
    server = Defaults(max_tokens=7, ignore_eos=True, variables={"a": 1})
    chat = read(defaults=server).chat
    assert (chat.max_tokens, chat.ignore_eos, chat.variables) == (7, True, {"a": 1})
    chat = read(defaults=server, max_output_tokens=3, ignore_eos=False).chat
    assert (chat.max_tokens, chat.ignore_eos) == (3, False)


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return list(map(dict, read(input=list(items)).chat.messages))


def text(role: str, words: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}


def call(call_id: str, name: str = "look", **more: Any) -> dict[str, Any]:
    made = {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}
    return {**made, **more}


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    found = read(instructions="be brief").chat
    assert found.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    assert found.tools == [] and found.tool_choice == "auto" and found.sampling == SamplingParams()


def test_messages_need_no_type_and_their_parts_are_the_templates_to_join() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    found = messages({"role": "user", "content": parts}, {"role": "developer", "content": "c"})
    shown = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert found == [{"role": "user", "content": shown}, {"role": "developer", "content": "c"}]


def test_items_of_one_answer_are_one_message() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "hm"}
    ]}  # fmt: skip
    output = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    found = messages(
        text("user", "q"), thought, text("assistant", "wait"), call("c1"), call("c2"), output,
        text("assistant", "done"),
    )  # fmt: skip
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    answer = found[1]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "wait")
    assert [one["id"] for one in answer["tool_calls"]] == ["c1", "c2"]
    assert answer["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert found[2] == {"role": "tool", "tool_call_id": "c1", "content": "42"}


def test_reasoning_that_only_openai_can_read_is_left_out() -> None:
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    assert messages(text("user", "q"), hidden) == [{"role": "user", "content": "q"}]


def test_functions_lose_what_a_chat_does_not_know() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"type": "function", "name": "look", "parameters": schema, "strict": True}
    found = read(tools=[tool, {"type": "function", "name": "bare"}]).chat.tools
    assert found[0] == {
        "type": "function",
        "function": {"name": "look", "parameters": schema, "strict": True},
    }
    assert found[1]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_tools_that_run_elsewhere_are_left_out() -> None:
    tools = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    assert read(tools=tools).chat.tools == []


def test_a_namespace_is_a_prefix_of_its_functions_and_comes_back() -> None:
    inner = {"type": "function", "name": "close", "parameters": {}}
    group = {"type": "namespace", "name": "agents", "description": "d", "tools": [inner]}
    past = call("c", "close", namespace="agents")
    found = read(tools=[group], input=[past])
    assert found.chat.tools[0]["function"]["name"] == "agents__close"
    assert found.chat.messages[0]["tool_calls"][0]["function"]["name"] == "agents__close"
    assert found.tools.name("agents__close") == ToolName("close", "agents")
    assert found.tools.name("other") == ToolName("other")


def test_a_tool_of_plain_text_is_a_function_with_one_argument() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tool = {"type": "custom", "name": "patch", "description": "Edit.", "format": grammar}
    past = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a"\n'}
    found = read(tools=[tool], input=[past])
    function = found.chat.tools[0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].endswith("lark grammar:\nstart: /a/")
    arguments = found.chat.messages[0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"input": 'a"\n'}
    assert found.tools.name("patch").kind == "custom"
    assert found.chat.inputs == {"patch": "start: /a/"}


@pytest.mark.parametrize(
    "choice, expected",
    [
        ("required", ("required", ["look", "patch"])),
        ({"type": "function", "name": "look"}, ("look", ["look", "patch"])),
        ({"type": "custom", "name": "patch"}, ("patch", ["look", "patch"])),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "function", "name": "look"}, {"type": "web_search"}]},
            ("required", ["look"]),
        ),
    ],
)  # fmt: skip
def test_choice_of_tools(choice: Any, expected: tuple[str, list[str]]) -> None:
    tools = [{"type": "function", "name": "look"}, {"type": "custom", "name": "patch"}]
    found = read(tools=tools, tool_choice=choice).chat
    assert (found.tool_choice, [tool["function"]["name"] for tool in found.tools]) == expected


def test_settings_of_the_answer() -> None:
    schema = {"type": "object"}
    found = read(
        temperature=0, top_p=0.5, max_output_tokens=7, parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "none"}, include=["message.output_text.logprobs"], top_logprobs=3,
    ).chat  # fmt: skip
    assert (found.sampling.temperature, found.sampling.top_p, found.max_tokens) == (0, 0.5, 7)
    assert found.sampling.top_k == SamplingParams().top_k and not found.parallel_tool_calls
    assert found.format == Format("json_schema", schema) and found.n_logprobs == 3
    assert found.variables["enable_thinking"] is False


def test_log_probabilities_come_only_when_they_are_included() -> None:
    assert read(top_logprobs=3).chat.n_logprobs is None


def test_a_conversation_goes_on_from_a_stored_response() -> None:
    store = ResponseStore()
    answer = {"id": "msg_1", **text("assistant", "hi")}
    store.put("", {"id": "resp_1", "output": [answer], "previous_response_id": None},
              [text("user", "hello")])  # fmt: skip
    found = read(store, input="more", previous_response_id="resp_1", instructions="new").chat
    assert [message["content"] for message in found.messages] == ["new", "hello", "hi", "more"]
    assert refusal(previous_response_id="resp_1").code == "previous_response_not_found"


def test_a_reference_stands_for_an_item_of_the_store() -> None:
    store = ResponseStore()
    answer = {"id": "msg_1", **text("assistant", "hi")}
    store.put("", {"id": "resp_1", "output": [answer]}, [])
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        found = read(store, input=[reference, text("user", "more")])
        assert found.chat.messages[0] == {"role": "assistant", "content": "hi"}
        assert found.items[0] == answer
    assert refusal(input=[{"type": "item_reference", "id": "x"}]).param == "input[0].id"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": [{"type": "message", "role": "user", "content": [
            {"type": "input_audio", "data": "data:"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "message", "role": "assistant", "content": [
            {"type": "input_image", "image_url": "data:"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "message", "role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": ""}] * 10_001}, "input"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0].text"),
        ({"tools": [{"type": "oven"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1]"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param and error.message.startswith(param.split("[")[0])
