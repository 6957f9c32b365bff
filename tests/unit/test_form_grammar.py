"""Grammars of answers in the forms of further families, and what their parsers make of them."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.grammar_case import Case
from helpers.tag_tokenizer import TAGS

from moegraph.engine.chat import Format

SCHEMA = {
    "type": "object",
    "properties": {
        "at": {"type": "string"}, "n": {"type": "integer", "minimum": 3},
        "unit": {"enum": ["m", "k m"]}, "all": {"$ref": "#/$defs/all"},
        "tags": {"type": "array", "items": {"type": "string"}}, "any": {},
    },
    "required": ["at"],
    "$defs": {"all": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}  # fmt: skip
LOOK = {"type": "function", "function": {"name": "look", "strict": True, "parameters": SCHEMA}}
PING = {"type": "function", "function": {"name": "ping"}}
VALUES = {"at": "x", "n": 5}

HARMONY_TAGS = (
    "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>",
)  # fmt: skip
GEMMA_TAGS = ("<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
GLM_TAGS = ("<|user|>", *TAGS[2:], "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HARMONY = "{{ tools }}<|channel|><|message|>{% raw %}{% endraw %}<|start|>assistant"
GEMMA = "{{ tools }}{# '<|tool_call>call:' #}<|turn>model\n"
GLM = "{{ tools }}<arg_key><arg_value></think>{{ '<think>' if enable_thinking else '.' }}"
LINES = GLM + "{# {function-name}\n#}"
HERMES = "{{ tools }}{# </think> #}"

THOUGHT = "<|channel|>analysis<|message|>I think<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x", "n": 5}'
FINAL = "<|channel|>final<|message|>"
# template, tags, a call of look, one of ping, what may be between them, reasoning
FORMS: dict[str, tuple[str, tuple[str, ...], str, str, str | None, str]] = {
    "harmony": (
        HARMONY, HARMONY_TAGS, CALL, "<|channel|>commentary to=functions.ping<|message|>{}", None,
        THOUGHT,
    ),
    "gemma": (
        GEMMA, GEMMA_TAGS, '<|tool_call>call:look{at:<|"|>x<|"|>,n:5}<tool_call|>',
        "<|tool_call>call:ping{}<tool_call|>", "", "<|channel>thought\nI think<channel|>",
    ),
    "glm": (
        GLM, GLM_TAGS,
        "<tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value>"
        "<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
        "<tool_call>ping</tool_call>", "", "<think>I think</think>",
    ),
    "lines": (
        LINES, GLM_TAGS,
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
        "<tool_call>ping\n</tool_call>", "\n", "\n<think>I think</think>\n",
    ),
    "hermes": (
        HERMES, TAGS,
        '<tool_call>\n{"name": "look", "arguments": {"at": "x", "n": 5}}\n</tool_call>',
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>', "\n",
        "<think>\nI think\n</think>\n\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_token", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_calls_that_must_come(name: str, is_token: bool) -> None:
    source, tags, look, ping, between, thought = FORMS[name]
    tags = tags if is_token else tags[:1]

    def case(**fields: Any) -> Case:
        return Case(source, tags, tools=[LOOK, PING], **fields)

    forced = case(tool_choice="required")
    for good in (look, ping, thought + look):
        assert forced.allows(good), good
    for bad in ("text", "", thought, look.replace("5", "1"), look.replace("look", "other")):
        assert not forced.allows(bad), bad
    if between is not None:
        assert forced.allows(look + between + ping)
        one = case(tool_choice="required", parallel_tool_calls=False)
        assert one.allows(look) and not one.allows(look + between + ping)
    named = case(tool_choice="ping")
    assert named.allows(ping) and not named.allows(look)
    assert forced.calls(thought + look) == [("look", VALUES)]


@pytest.mark.parametrize("name", FORMS)
def test_calls_of_strict_tools_and_text(name: str) -> None:
    source, tags, look, ping, _, thought = FORMS[name]
    final = FINAL if name == "harmony" else ""
    case = Case(source, tags, tools=[LOOK, PING])
    assert case.allows(f"{thought}{final}Some text") and case.allows(thought + ping)
    assert case.allows(look) and not case.allows(look.replace("5", "1"))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_a_format_holds_for_the_answer_and_not_for_the_reasoning(name: str, kind: str) -> None:
    source, tags, look, _, _, thought = FORMS[name]
    final = FINAL if name == "harmony" else ""
    made = Format(kind, {"type": "object"} if kind == "json_schema" else "[{]}")
    case = Case(source, tags, format=made)
    assert case.allows(final + "{}") and case.allows(f"{thought}{final}{{}}")
    assert not case.allows(f"{thought}{final}text") and not case.allows(thought)
    if kind == "json_schema":
        both = Case(source, tags, format=made, tools=[LOOK])
        assert both.allows(f"{thought}{final}{{}}") and both.allows(thought + look)
        assert not both.allows(final + "text")


def test_harmony_without_calls_has_none() -> None:
    case = Case(HARMONY, HARMONY_TAGS, tools=[LOOK], tool_choice="none")
    assert case.allows(f"{THOUGHT}{FINAL}Yes") and not case.allows(CALL)


def test_reasoning_that_the_prompt_opens_ends_first() -> None:
    variables = {"enable_thinking": True}
    case = Case(GLM, GLM_TAGS, tools=[PING], tool_choice="ping", variables=variables)
    assert case.allows("So</think><tool_call>ping</tool_call>") and not case.allows("So</think>No")


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ('at:<|"|><|"|>', True),
        ('all:{a:true},any:[{b:<|"|>c<|"|>},null],at:<|"|>x<|"|>', True),
        ('at:<|"|>x<|"|>,tags:[<|"|>a<|"|>,<|"|><|"|>]', True),
        ('all:{},at:<|"|>x<|"|>,unit:<|"|>k m<|"|>', True),
        ('at:<|"|>x<|"|>,tags:[]', True),
        ('n:5', False),
        ('at:x', False),
        ('at:<|"|>x<|"|>,unit:<|"|>mile<|"|>', False),
        ('all:{a:1},at:<|"|>x<|"|>', False),
        ('at:<|"|>x<|"|>,tags:[1]', False),
        (',at:<|"|>x<|"|>', False),
        ('at:<|"|>x<|"|>,', False),
    ],
)  # fmt: skip
def test_objects_of_gemma(text: str, is_good: bool) -> None:
    case = Case(GEMMA, GEMMA_TAGS, tools=[LOOK], tool_choice="required")
    assert case.allows(f"<|tool_call>call:look{{{text}}}<tool_call|>") == is_good
    if is_good:
        assert case.calls(f"<|tool_call>call:look{{{text}}}<tool_call|>")
