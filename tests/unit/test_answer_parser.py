"""An answer's text taken apart: reasoning, text and tool calls, however it is split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegraph.text.chat.answer import AnswerParser
from moegraph.text.chat.parts import (
    CallArguments,
    CallBegin,
    ContentPart,
    Part,
    ReasoningPart,
    Reply,
)  # fmt: skip


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WRITE = tool("write", path={"type": "string"}, text={"type": "string"})
ADD = tool(
    "add", a={"type": "integer"}, b={"type": "number"}, sure={"type": "boolean"},
    more={"type": "object"}, tags={"type": "array"}, note={"type": ["string", "null"]},
    any={"description": "no type"}, size={"enum": [1, 2]}, unit={"enum": ["m", "km"]},
    opt={"anyOf": [{"type": "integer"}, {"type": "null"}]},
)  # fmt: skip
TOOLS = [WRITE, ADD]


def call(name: str, **values: str) -> str:
    given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def parse(
    text: str,
    prompt: str = "",
    cuts: tuple[int, ...] = (),
    tools: list[dict[str, Any]] = TOOLS,
    is_cut: bool = False,
    **options: Any,
) -> list[Part]:
    parser = AnswerParser(prompt, tools, new_id=lambda: "id", **options)
    parts: list[Part] = []
    ends = sorted({*(cut for cut in cuts if cut < len(text)), len(text)})
    for start, end in zip((0, *ends), ends):
        parts += parser.push(text[start:end])
    return merged(parts + parser.flush(is_cut))


def merged(parts: list[Part]) -> list[Part]:
    """Join neighbouring pieces of the same text."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, CallArguments) and isinstance(last, CallArguments):
            assert part.index == last.index
            part = CallArguments(part.index, last.text + part.text)
            found.pop()
        for kind in (ReasoningPart, ContentPart):
            if isinstance(part, kind) and isinstance(last, kind):
                part = kind(last.text + part.text)
                found.pop()
        found.append(part)
    return found


def reply(text: str, prompt: str = "", **options: Any) -> Reply:
    found = Reply()
    found.add(parse(text, prompt, **options))
    return found


def calls(text: str, **options: Any) -> list[tuple[str, Any]]:
    return [(one.name, json.loads(one.arguments)) for one in reply(text, **options).calls]


class TestReasoning:
    def test_a_prompt_that_opens_it(self) -> None:
        found = parse("I think.\n</think>\n\nYes.\n", "<|im_start|>assistant\n<think>\n")
        assert found == [ReasoningPart("I think."), ContentPart("Yes.\n")]

    def test_an_answer_that_opens_it(self) -> None:
        assert parse("<think>\nhm\n\nso\n</think>\nYes") == [
            ReasoningPart("hm\n\nso"), ContentPart("Yes"),
        ]  # fmt: skip

    def test_left_in_the_text_with_the_tag_of_the_prompt(self) -> None:
        found = parse("a</think>b", "<|im_start|>assistant\n<think>\n", reasoning=False)
        assert found == [ContentPart("<think>\na</think>b")]
        closed = "<think>\n\n</think>\n\n"
        assert parse("b", f"assistant\n{closed}", reasoning=False) == [ContentPart(f"{closed}b")]
        assert parse("b", f"{closed}Yes", reasoning=False) == [ContentPart("b")]

    def test_that_a_prompt_has_begun(self) -> None:
        found = parse(" so\n</think>\n\nYes", "<think>\nhm,", is_thinking=True)
        assert found == [ReasoningPart(" so"), ContentPart("Yes")]

    def test_what_was_begun_is_told_with_the_first_text(self) -> None:
        parser = AnswerParser("<think>\nhm,", is_thinking=True, begun="hm,")
        assert parser.push("") == []
        assert merged(parser.push(" so</think>Yes")) == [
            ReasoningPart("hm, so"),
            ContentPart("Yes"),
        ]
        assert AnswerParser("It is", begun="It is").flush() == [ContentPart("It is")]

    def test_more_of_it(self) -> None:
        text = "a\n</think>\n\n<think>\nb</think>\n\nc"
        assert parse(text, "<think>\n") == [ReasoningPart("a\n\nb"), ContentPart("c")]

    def test_a_call_inside_and_one_after(self) -> None:
        text = f"hm\n{call('write', path='a')}\nso\n</think>\n\nOK\n{call('write', path='b')}"
        found = reply(text, "<think>\n")
        assert (found.reasoning, found.content) == ("hmso", "OK")
        assert [one.arguments for one in found.calls] == ['{"path": "a"}', '{"path": "b"}']

    def test_a_tag_in_thoughts_is_no_call(self) -> None:
        text = "I could use <tool_call> or <function=x> here.</think>No."
        assert parse(text, "<think>") == [
            ReasoningPart("I could use <tool_call> or <function=x> here."), ContentPart("No."),
        ]  # fmt: skip


class TestCalls:
    def test_text_before_and_two_calls(self) -> None:
        text = f"I look.\n\n{call('write', path='a', text='b')}\n{call('add', a='1')}\n"
        found = reply(text)
        assert found.content == "I look."
        assert [one.name for one in found.calls] == ["write", "add"]
        assert found.calls[0].arguments == '{"path": "a", "text": "b"}'
        assert found.message()["tool_calls"][1]["function"] == {
            "name": "add", "arguments": '{"a": 1}',
        }  # fmt: skip

    def test_no_parameters(self) -> None:
        assert calls("<tool_call>\n<function=write>\n</function>\n</tool_call>") == [("write", {})]

    def test_types_by_schema(self) -> None:
        text = call(
            "add", a=" 5 ", b="1.50", sure="True", more='{"k": [1, 2]}', tags="['x', 'y']",
            note="null", any="[1]", size="2", unit="km", opt="None",
        )  # fmt: skip
        assert calls(text)[0][1] == {
            "a": 5, "b": 1.5, "sure": True, "more": {"k": [1, 2]}, "tags": ["x", "y"],
            "note": None, "any": [1], "size": 2, "unit": "km", "opt": None,
        }  # fmt: skip

    def test_a_schema_that_refers_to_itself(self) -> None:
        again = {"anyOf": [{"$ref": "#/properties/a"}] * 20}
        text = "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"
        assert calls(text, tools=[tool("f", a=again)]) == [("f", {"a": 5})]

    def test_values_of_the_wrong_type_are_kept(self) -> None:
        text = call("add", a="many", b="NaN", sure="maybe", more="{broken", note="5", other="text")
        assert calls(text)[0][1] == {
            "a": "many", "b": "NaN", "sure": "maybe", "more": "{broken", "note": "5",
            "other": "text",
        }  # fmt: skip

    def test_json_is_kept_as_written(self) -> None:
        text = call("add", more='{"z": 1.50,  "a": 1e3}', b="2.0")
        assert reply(text).calls[0].arguments == '{"more": {"z": 1.50,  "a": 1e3}, "b": 2.0}'

    def test_strings_are_told_as_they_come(self) -> None:
        parser = AnswerParser(tools=TOOLS)
        parser.push("<tool_call>\n<function=write>\n<parameter=text>\nfirst line")
        parts = parser.push("\nsecond li")
        assert [getattr(part, "text", None) for part in parts] == ["e\\nsecond l"]

    def test_the_older_form(self) -> None:
        text = '<tool_call>\n{"name": "add", "arguments": {"b": 1.50, "a": "7"}}\n</tool_call>'
        assert reply(text).calls[0].arguments == '{"b": 1.50, "a": "7"}'
        assert calls('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "add"}') == [
            ("add", {"a": 1})
        ]

    def test_the_older_form_is_told_as_it_comes(self) -> None:
        parser = AnswerParser(tools=TOOLS, new_id=lambda: "id")
        text = '<tool_call>\n{"name": "add", "arguments": {"note": "one two", "a": "7", "b": 1.50}}'
        told = [merged(parser.push(text[n : n + 8])) for n in range(0, len(text), 8)]
        begin = next(n for n, parts in enumerate(told) if parts)
        assert told[begin] == [CallBegin(0, "id", "add"), CallArguments(0, '{"note"')]
        pieces = [part.text for parts in told[begin:] for part in parts if hasattr(part, "text")]
        assert "".join(pieces) == '{"note": "one two", "a": "7", "b": 1.50}'
        assert len(pieces) > 4 and max(map(len, pieces)) < 16

    @pytest.mark.parametrize(
        "inside",
        [
            '{"arguments": ARGS, "name": "add"}',
            '{"name": "add", "parameters": ARGS, "id": {"a": "}"}}',
            '{"name": "add", "arguments": ARGS, "id"',
            '{"name": "add", "arguments": ARGS, "id": "{',
            '{"name": "add", "arguments": ARGS',
            '{"name":"add","arguments":"{\\"a\\": 1}"}',
            '{"name": "add", "arguments": ARGS, "more": "\\\\"}',
            "<function=add>ARGS",
            "<function=add>\nARGS}",
            "<function=add>\nARGS\n</function>\n",
        ],
    )
    def test_forms_of_json(self, inside: str) -> None:
        arguments = '{"a": 1}'
        text = f"<tool_call>{inside.replace('ARGS', arguments)}</tool_call>Done."
        found = reply(text)
        for n in range(1, 20):
            assert parse(text, cuts=tuple(range(0, len(text), n))) == parse(text)
        assert [(one.arguments, one.is_whole) for one in found.calls] == [(arguments, True)]
        assert found.content == "Done."

    @pytest.mark.parametrize("broken", ['{"a": oops}', '{"a": [1}', '{"a": "\\x"}', '{"a": 1 2}'])
    def test_json_that_proves_to_be_wrong(self, broken: str) -> None:
        text = f'<tool_call>\n{{"name": "add", "arguments": {broken}}}\n</tool_call>\nDone.'
        found = reply(text)
        assert found.calls[0].arguments.startswith(broken) and found.content == "Done."
        assert not found.calls[0].is_whole

    def test_a_name_that_is_no_tool(self) -> None:
        assert calls(call("guess", x="1")) == [("guess", {"x": 1})]

    @pytest.mark.parametrize("more", [call("write", path="b"), "Done."])
    def test_one_call_only(self, more: str) -> None:
        parser = AnswerParser(tools=TOOLS, parallel=False)
        found = Reply()
        found.add(parser.push(call("write", path="a") + "\n"))
        assert not parser.is_done  # it may end by itself
        found.add(parser.push(more))
        assert parser.is_done and len(found.calls) == parser.n_calls == 1 and not found.content
        assert parser.push("more") == parser.flush() == []


class TestDrift:
    """What models write in place of the form that they were taught."""

    @pytest.mark.parametrize(
        "text",
        [
            "<function=write>\n<parameter=path>\na\n</parameter>\n</function>",
            "<tool_call><function=write><parameter=path>a</parameter></function></tool_call>",
            "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</tool_call>",
            "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</parameter>\n"
            "</function>\n</tool_call>",
            "<tool_call>\n<function=write>\n<parameter=path>\na\n</function>\n</tool_call>",
            "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n",
            "<tool_call>\n<function=write>\n<parameter=path>\na\n",
            '<tool_call>\n<function=write>\n{"path": "a"}\n</function>\n</tool_call>',
            '<tool_call>\n<function="write">\n<parameter="path">\na\n</parameter>\n</function>',
        ],
    )
    def test_understood(self, text: str) -> None:
        assert calls(text) == [("write", {"path": "a"})]

    def test_the_same_parameter_twice(self) -> None:
        text = call("write", path="a").replace("</function>", "<parameter=path>b</parameter>")
        assert calls(text) == [("write", {"path": "a"})]

    def test_text_between_parameters_is_not_lost(self) -> None:
        text = call("write", path="a").replace("</function>", "</parameter>\nNow go!\n</function>")
        found = reply(text)
        assert found.content == "Now go!" and found.calls[0].arguments == '{"path": "a"}'

    @pytest.mark.parametrize(
        "text",
        [
            "a <tool_call> of text",
            "<tool_call>\n<function=write",
            "<tool_call>\n<function=two words>\n</function>\n</tool_call>",
            "<tool_call>\n<function=write>\nplease\n</function>\n</tool_call>",
            '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "write", "arguments": {\n</tool_call>',
            "<tool_call>\n{'name': 'write'}\n</tool_call>",
            "<function=guess>\n<parameter=a>\n1\n</parameter>\n</function>",
            "<function_invocation>write</function_invocation>",
        ],
    )
    def test_not_understood_is_text(self, text: str) -> None:
        found = reply(text)
        assert found.content == text and not found.calls

    @pytest.mark.parametrize("n", range(1, 45))
    def test_an_answer_that_was_cut_in_the_beginning_of_a_call(self, n: int) -> None:
        text = "Two:\n" + call("write", path="a") + "\n" + call("add", a="1")[:n]
        found = reply(text, is_cut=True)
        assert found.content == "Two:" and found.calls[0].is_whole
        assert [one.is_whole for one in found.calls[1:]] == [False] * (n >= 26)

    def test_a_call_that_was_cut_where_its_json_begins_has_a_name(self) -> None:
        (found,) = reply("<tool_call>\n<function=add>\n{", is_cut=True).calls
        assert found.name == "add" and not found.is_whole

    @pytest.mark.parametrize(
        ("name", "value", "read"),
        [
            ("write", "a\n<parameter=other>\nb", "a\n<parameter=other>\nb"),  # no parameter of it
            ("write", "see <parameter=text> here", "see <parameter=text> here"),
            ("count", "1.5", 1.5),
            ("size", "1", 1),
        ],
    )
    def test_a_value_is_what_was_written(self, name: str, value: str, read: object) -> None:
        tools = [WRITE, tool("count", path={"type": "integer"})]
        tools.append(tool("size", path={"type": ["number", "string"]}))
        (found,) = reply(call(name, path=value), tools=tools).calls
        assert json.loads(found.arguments) == {"path": read}

    def test_what_begins_a_tag_is_text_where_an_answer_without_calls_was_cut(self) -> None:
        assert reply("Two <tool", is_cut=True).content == "Two <tool"

    def test_much_that_looks_like_json_is_read_in_time(self) -> None:
        text = "<tool_call>{" * 20_000
        assert parse(text) == [ContentPart(text)]


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "write>", "add>",
    "</function>", "<parameter=", "path>", "a>", "more>", "</parameter>", "\n", "\n\n", " ", "x",
    "<", "</", "{", "}", '"', "\\", '{"name": "write", "arguments": {"path": "p"}}', "5", "[1]",
    "é", "😀", "null", "True", "<function=write>\n<parameter=path>\n", "\n</parameter>\n",
    "<tool_call>\n<function=add>\n<parameter=a>\n", "\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"a', '": ', ', "note": "x', '\\"', "}}",
    '"a": "7", ',
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=40).map("".join)


@given(TEXTS, st.lists(st.integers(0, 300), max_size=30), st.booleans(), st.booleans())
@settings(deadline=None)
def test_any_split_gives_the_same_parts(
    text: str, cuts: list[int], is_opened: bool, parallel: bool
) -> None:
    prompt = "<think>\n" if is_opened else ""
    whole = parse(text, prompt, parallel=parallel)
    assert parse(text, prompt, tuple(cuts), parallel=parallel) == whole
    assert parse(text, prompt, tuple(range(len(text))), parallel=parallel) == whole


@given(TEXTS, st.booleans())
@settings(deadline=None)
def test_whole_calls_have_json_and_parts_are_in_order(text: str, is_cut: bool) -> None:
    parts = parse(text, is_cut=is_cut)
    opened = -1
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == opened + 1
            opened = part.index
    found = Reply()
    found.add(parts)
    for one in found.calls:
        if one.is_whole:
            assert isinstance(json.loads(one.arguments), dict)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just("</tool_call>{")
    | st.text('"\\\\{}', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.integers(1, 30),
    st.booleans(), st.none() | st.just(2), st.integers(0, 400),
)  # fmt: skip
@settings(deadline=None)
def test_calls_in_json_are_those_that_were_written(
    arguments: dict[str, Any], n: int, is_ascii: bool, indent: int | None, end: int
) -> None:
    written = json.dumps(
        {"name": "free", "arguments": arguments}, ensure_ascii=is_ascii, indent=indent
    )
    text = f"<tool_call>\n{written}\n</tool_call>"
    (found,) = reply(text, cuts=tuple(range(0, len(text), n))).calls
    assert found.is_whole and json.loads(found.arguments) == arguments
    for cut in reply(text[:end], cuts=tuple(range(0, end, n)), is_cut=True).calls:
        assert found.arguments.startswith(cut.arguments)
