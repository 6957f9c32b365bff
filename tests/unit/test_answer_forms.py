"""Forms of answers: harmony's channels, Gemma's objects, GLM's keys; whole, and cut everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegraph.text.chat.answer import AnswerParser
from moegraph.text.chat.forms import GEMMA, GLM, GLM_LINES, HARMONY, HERMES, QWEN, Form, form_of
from moegraph.text.chat.parts import CallArguments, ContentPart, Part, ReasoningPart, Reply


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("look", at={"type": "string"}, n={"type": "integer"}),
    tool("set", on={"type": "boolean"}, all={"type": "object"}, any={}, tags={"type": "array"}),
    tool("ping"),
]
END = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I\nthink{END}"
Case = tuple[Form, str, str, str, list[tuple[str, str]]]
PING = [("ping", "{}")]


def to(name: str, arguments: str, more: str = " <|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name}{more}<|message|>{arguments}"


def gemma(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def q(text: str) -> str:
    return f'<|"|>{text}<|"|>'


# form, answer, reasoning, text, calls
FINAL = "<|channel|>final<|message|>"
AT = '{"at": "a"}'
HARMONY_CASES: list[Case] = [
    (HARMONY, f"{FINAL}Yes.\nNo", "", "Yes.\nNo", []),
    (HARMONY, "<|channel|>commentary<|message|>Yes", "", "Yes", []),
    (HARMONY, f"{THOUGHT}{FINAL}Yes<|return|>", "I\nthink", "Yes", []),
    (HARMONY, "<|channel|>analysis<|message|>I think", "I think", "", []),
    (HARMONY, THOUGHT + to("look", AT) + "<|call|>", "I\nthink", "", [("look", AT)]),
    (HARMONY, to("look", AT, ""), "", "", [("look", AT)]),
    (HARMONY, to("look", AT, " json"), "", "", [("look", AT)]),
    (
        HARMONY, f" to=functions.look<|channel|>analysis <|constrain|>json<|message|>{AT}",
        "", "", [("look", AT)],
    ),
    (HARMONY, to("ping", ""), "", "", [("ping", "{}")]),
    # text before a call, and calls one after another
    (
        HARMONY, f"<|channel|>commentary<|message|>I look.{END}{to('ping', '{}')}",
        "", "I look.", [("ping", "{}")],
    ),
    (HARMONY, to("ping", "{}") + END + to("look", AT), "", "", [("ping", "{}"), ("look", AT)]),
    # a string may have tags, and what comes after the object is nothing
    (
        HARMONY, to("look", '{"at": "<|end|>é\\"}"} }<|call|>'),
        "", "", [("look", '{"at": "<|end|>é\\"}"}')],
    ),
    # drift: a channel before the channel, tools that are not ours, one without its prefix
    (HARMONY, f"<|channel|>commentary to=assistant{THOUGHT}{FINAL}Yes", "I\nthink", "Yes", []),
    (HARMONY, f"{THOUGHT}<|channel|>commentary to=python<|message|>{{}}", "I\nthink", "", []),
    (HARMONY, f"{THOUGHT} to=container.exec<|channel|>x<|message|>ls", "I\nthink", "", []),
    (HARMONY, "<|channel|>commentary to=look<|message|>{}", "", "", [("look", "{}")]),
    (HARMONY, to("guess", AT), "", "", [("guess", AT)]),
    (HARMONY, to("look", '{"at": oops}'), "", "", []),
    (HARMONY, to("look", '{"at": oops}') + "<|start|>, yes", "", ", yes", []),
    (HARMONY, to("look", f"\n {AT}"), "", "", [("look", AT)]),
    (HARMONY, f"{FINAL}Yes<|end|>\n", "", "Yes", []),
    (
        HARMONY, f"{FINAL}Yes<|end|><|start|>user<|message|>More?{END}{FINAL}No",
        "", "Yes\nNo", [],
    ),
    (HARMONY, "No tags, none.", "", "No tags, none.", []),
    (HARMONY, "Hello", "", "Hello", []),
]  # fmt: skip
GEMMA_CASES: list[Case] = [
    (GEMMA, "<|channel>thought\nI\nthink<channel|>Yes.\nNo", "I\nthink", "Yes.\nNo", []),
    (GEMMA, "<|channel>thought<channel|>Yes", "", "Yes", []),
    (GEMMA, "<|channel>thought\n<channel|>Yes<channel|>", "", "Yes", []),
    (GEMMA, "Yes<|channel>thought\n<channel|><channel|>", "", "Yes", []),
    (GEMMA, "<|channel><|channel>thought\nSo<channel|>Yes", "So", "Yes", []),
    (GEMMA, gemma("look", f"at:{q('in Köln')}"), "", "", [("look", '{"at": "in Köln"}')]),
    (
        GEMMA, f"<|channel>thought\nSo<channel|>OK{gemma('ping', '')}",
        "So", "OK", [("ping", "{}")],
    ),
    (
        GEMMA, gemma("look", "n:-7") + gemma("set", "any:1.5e10"),
        "", "", [("look", '{"n": -7}'), ("set", '{"any": 1.5e10}')],
    ),
    (
        GEMMA, gemma("set", f"on:true,any:null,tags:[{q('a')},{q('b, c')},[]]"),
        "", "", [("set", '{"on": true, "any": null, "tags": ["a", "b, c", []]}')],
    ),
    (
        GEMMA, gemma("set", f"all:{{a:{{}},b:{{c:{q('{x:1}')}}}}}"),
        "", "", [("set", '{"all": {"a": {}, "b": {"c": "{x:1}"}}}')],
    ),
    (GEMMA, gemma("look", "at:" + q('\n"\\')), "", "", [("look", json.dumps({"at": '\n"\\'}))]),
    # drift: JSON's quotes, blanks, a bare word, no end, a call in thoughts, what is no object
    (
        GEMMA, gemma("set", ' "on" : false, "any": "x\\n", tags: ["y"] '),
        "", "", [("set", '{"on": false, "any": "x\\n", "tags": ["y"]}')],
    ),
    (GEMMA, gemma("look", f"{q('at')}:here"), "", "", [("look", '{"at": "here"}')]),
    (GEMMA, gemma("look", ' at : "a\\qb", '), "", "", [("look", '{"at": "a\\\\qb"}')]),
    (GEMMA, gemma("look", f"at:{q('a')}b") + "Yes", "", "Yes", []),
    (GEMMA, gemma("look", "n:,") + "Yes", "", "Yes", []),
    (GEMMA, "<|tool_call>call:look{at:here<tool_call|>Yes", "", "Yes", []),
    (GEMMA, "Yes<|tool_call>call:look", "", "Yes<|tool_call>call:look", []),
    (GEMMA, "<|tool_call>call:ping{}Done", "", "Done", [("ping", "{}")]),
    # what is blank after a call is nothing
    (
        GEMMA, f"OK\n{gemma('ping', '')}\n \n{gemma('look', 'n:1')}\n",
        "", "OK\n", [("ping", "{}"), ("look", '{"n": 1}')],
    ),
    (GEMMA, gemma("ping", "") + "\nDone\n", "", "Done\n", [("ping", "{}")]),
    (
        GEMMA, f"<|channel>thought\nSo {gemma('ping', '')}on<channel|>Yes",
        "So on", "Yes", [("ping", "{}")],
    ),
    (GEMMA, gemma("look", "at") + "Yes", "", "Yes", []),
    (GEMMA, "<|tool_call> is a tag", "", "<|tool_call> is a tag", []),
]  # fmt: skip


def glm(name: str, *values: str, gap: str = "") -> str:
    pairs = zip(values[::2], values[1::2])
    given = "".join(f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in pairs)
    return f"<tool_call>{name}{gap}{given}</tool_call>"


GLM_CASES: list[Case] = [
    (GLM, "I think</think>Yes", "I think", "Yes", []),
    (GLM, f"So</think>{glm('ping')}", "So", "", [("ping", "{}")]),
    (
        GLM, f"</think>OK{glm('look', 'at', '1', 'n', '1')}",
        "", "OK", [("look", '{"at": "1", "n": 1}')],
    ),
    (
        GLM, "</think>" + glm("set", "all", '{"a": ["é"]}', "any", " x\n") + glm("ping"),
        "", "", [("set", '{"all": {"a": ["é"]}, "any": " x\\n"}'), ("ping", "{}")],
    ),
    (GLM, f"</think>{glm('guess', 'a', '1')}", "", "", [("guess", '{"a": 1}')]),
    # drift: no end of a value, its tag in one, no name, the older form
    (
        GLM, "</think>" + glm("look", "at", "a", "n", "2").replace("</arg_value>", ""),
        "", "", [("look", '{"at": "a", "n": 2}')],
    ),
    (
        GLM, f"</think>{glm('look', 'at', 'a</arg_value>b')}",
        "", "", [("look", '{"at": "a</arg_value>b"}')],
    ),
    (GLM, f"</think>{glm('look at this')}", "", glm("look at this"), []),
    (
        GLM, '</think><tool_call>{"name": "ping", "arguments": {}}</tool_call>',
        "", "", [("ping", "{}")],
    ),
    (
        GLM_LINES, "\n<think>So</think>\nOK\n" + glm("look", "at", "a\nb", gap="\n"),
        "So", "OK", [("look", '{"at": "a\\nb"}')],
    ),
]  # fmt: skip
HERMES_CASES: list[Case] = [
    (HERMES, f'<tool_call>\n{{"name": "ping", "arguments": {none}}}\n</tool_call>', "", "", PING)
    for none in ("null", "{}", '"{}"')
]
CASES = [*HARMONY_CASES, *GEMMA_CASES, *GLM_CASES, *HERMES_CASES]
PROMPTS = {GLM: "<|assistant|><think>", HARMONY: "<|start|>assistant", GEMMA: "<|turn>model\n"}


def parts(case: Case, cuts: list[int], **options: Any) -> list[Part]:
    form, text = case[:2]
    given = {"form": form, "is_thinking": form is GLM, "new_id": lambda: "id", **options}
    parser = AnswerParser(PROMPTS.get(form, ""), TOOLS, **given)
    ends = sorted({*cuts, len(text)})
    found: list[Part] = []
    for start, end in zip((0, *ends), ends):
        found += parser.push(text[start:end])
    return found + parser.flush()


def reply(found: list[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    answer = Reply()
    answer.add(found)
    return (
        answer.reasoning,
        answer.content,
        [(one.name, one.arguments) for one in answer.calls if one.is_whole],
    )


@pytest.mark.parametrize("case", CASES, ids=[str(n) for n in range(len(CASES))])
def test_an_answer_whole_and_cut_everywhere(case: Case) -> None:
    text, expected = case[1], case[2:]
    assert reply(parts(case, [])) == expected
    for n in range(1, len(text)):
        assert reply(parts(case, [n])) == expected, text[:n]
    for n in range(1, 9):
        assert reply(parts(case, [*range(0, len(text), n)])) == expected


@pytest.mark.parametrize("case", CASES, ids=[str(n) for n in range(len(CASES))])
def test_what_is_told_of_a_beginning_is_not_taken_back(case: Case) -> None:
    form, text = case[:2]
    whole = Reply()
    whole.add(parts(case, []))
    for n in range(len(text)):
        begun, parser = Reply(), AnswerParser(
            PROMPTS.get(form, ""), TOOLS, form=form, is_thinking=form is GLM
        )  # fmt: skip
        begun.add(parser.push(text[:n]))
        assert whole.content.startswith(begun.content)
        assert whole.reasoning.startswith(begun.reasoning)
        begun.add(parser.flush(is_cut=True))
        for one, other in zip(begun.calls, whole.calls):
            assert one.name == other.name and other.arguments.startswith(one.arguments)


def test_much_that_could_begin_a_header_is_read_in_time() -> None:
    for text in ("\n" * 100_000 + "x", "<|channel|>a" * 2_000, " to=" * 2_000):
        parser = AnswerParser("<|start|>assistant", form=HARMONY)
        parser.push(text)
        parser.flush()


@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        (HARMONY, f"{FINAL}Yes<|end|><|start|>assistant<|channel|>fin", "Yes"),
        (HARMONY, f"{FINAL}Yes{END} to=functions.lo", "Yes"),
        (GEMMA, "Yes<|tool_call>call:lo", "Yes"),
        (GEMMA, "Yes<|tool_call>call:look{at:", "Yes"),
    ],
)
def test_what_begins_a_message_of_an_answer_that_is_cut_is_no_text(
    form: Form, text: str, shown: str
) -> None:
    parser, begun = AnswerParser(PROMPTS[form], TOOLS, form=form), Reply()
    begun.add(parser.push(text) + parser.flush(is_cut=True))
    assert begun.content == shown


def test_headers_and_keys_are_short() -> None:
    parser = AnswerParser("<|start|>assistant", form=HARMONY)
    assert parser.push("so " * 300) == [ContentPart("so " * 300)]
    for n, calls in ((900, [("look", f'{{"{"a" * 900}": 1}}')]), (1100, [])):
        case = (GEMMA, gemma("look", "a" * n + ":1"), "", "", calls)
        assert reply(parts(case, [])) == reply(parts(case, [99, 1080])) == case[2:]
    endless = (GEMMA, gemma("look", '<|"|>' + "a:" * 600) + "Yes", "", "Yes", [])
    assert reply(parts(endless, [])) == endless[2:]
    late = (HARMONY, "so " * 300 + FINAL + "x", "", "", [])
    assert reply(parts(late, [])) == reply(parts(late, [700])) == ("", "so " * 300 + "\nx", [])


def test_values_are_told_as_they_come() -> None:
    begun = ((HARMONY, to("look", '{"at": "a')), (GEMMA, '<|tool_call>call:look{at:<|"|>a'))
    for form, begin in begun:
        parser = AnswerParser(PROMPTS[form], TOOLS, form=form)
        parser.push(begin)
        assert parser.push("bc") == [CallArguments(0, "bc")]


@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        (HARMONY, f"{THOUGHT}{FINAL}Yes", "<|channel|>analysis<|message|>I\nthink<|end|>Yes"),
        (GEMMA, "<|channel>thought\nSo<channel|>Yes", "<|channel>thought\nSo<channel|>Yes"),
    ],
)
def test_reasoning_in_the_text_keeps_its_tags(form: Form, text: str, shown: str) -> None:
    for n in range(len(text)):
        found = parts((form, text, "", "", []), [n], reasoning=False)
        assert reply(found) == ("", shown, [])


def test_an_answer_goes_on_from_its_prompt() -> None:
    begun = f"<|start|>assistant{THOUGHT}<|channel|>final<|message|>It is"
    parser = AnswerParser(begun, form=HARMONY)
    assert parser.push(" so") == [ContentPart(" so")]
    parser = AnswerParser("<|channel|>analysis<|message|>I", form=HARMONY, is_thinking=True)
    assert parser.is_reasoning and parser.push("<|end|>")[:1] == []
    raw = AnswerParser("<|channel>thought\n", form=GEMMA, is_thinking=True, reasoning=False)
    assert raw.push("I") == [ContentPart("<|channel>thought\n"), ContentPart("I")]
    parser = AnswerParser("<|channel>thought\nI", form=GEMMA, is_thinking=True)
    assert parser.push(" so<channel|>Yes") == [ReasoningPart(" so"), ContentPart("Yes")]


@pytest.mark.parametrize("block", ["\n<think></think>", "</think>", "<think>\n\n</think>\n\n"])
def test_lines_after_reasoning_that_the_prompt_ends_are_no_text(block: str) -> None:
    for cuts in ([], [1], [1, 2]):
        parser = AnswerParser(f"<|assistant|>{block}", form=GLM_LINES)
        answer = Reply()
        for start, end in zip((0, *cuts), (*cuts, 99)):
            answer.add(parser.push("\n\nYes\n"[start:end]))
        answer.add(parser.flush())
        assert (answer.reasoning, answer.content) == ("", "Yes\n")
    # and those of a text that goes on
    assert AnswerParser(f"{block}It is:", form=GLM_LINES).push("\nso") == [ContentPart("\nso")]


def test_without_tools() -> None:
    text = to("look", "{}")
    found = AnswerParser("", form=HARMONY)
    assert found.push(text) + found.flush() == []
    text = gemma("look", "n:1")
    found = AnswerParser("", form=GEMMA)
    answer = Reply()
    answer.add(found.push(text) + found.flush())
    assert answer.content == text


TAGS = [
    "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>assistant", " to=",
    "functions.look", "<|constrain|>json", "<|channel>", "thought\n", "<channel|>", "<|tool_call>",
    "call:look", "{", "at:", '<|"|>', "}", "<tool_call|>", '"', ",", "[", "]", "n:1", "{}", "\n",
    "<tool_call>", "look", "<arg_key>", "at</arg_key>", "<arg_value>", "</arg_value>", "<",
    "</tool_call>", "</think>", "<think>", "x", "é", " ", '{"at": "', "|>",
]  # fmt: skip


@given(
    st.sampled_from([HARMONY, GEMMA, GLM, GLM_LINES]),
    st.lists(st.sampled_from(TAGS), max_size=24).map("".join), st.lists(st.integers(0, 99)),
    st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_any_text_is_read_alike_however_it_is_split(
    form: Form, text: str, cuts: list[int], reasoning: bool
) -> None:
    case = (form, text, "", "", [])
    whole = reply(parts(case, [], reasoning=reasoning))
    assert reply(parts(case, [n for n in cuts if n < len(text)], reasoning=reasoning)) == whole
    assert reply(parts(case, [*range(len(text))], reasoning=reasoning)) == whole
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ '<|channel|>' }}<|message|> tools", HARMONY),
        ("'<|tool_call>call:' + tools", GEMMA),
        ("tools <arg_key>k</arg_key>\n<arg_value>", GLM),
        ("tools <tool_call>{function-name}\n<arg_key>k</arg_key>\n<arg_value>", GLM_LINES),
        ("tools <function=", QWEN),
        ("tools", HERMES),
        ("{{ messages }}", QWEN),
    ],
)
def test_forms_are_recognized_by_the_template(source: str, form: Form) -> None:
    assert form_of(source) is form


@pytest.mark.parametrize(
    ("form", "prompt", "is_open", "is_fresh", "shown"),
    [
        (QWEN, "a<think>\n", True, True, "<think>\n"),
        (QWEN, "a<think>", True, True, "<think>"),
        (QWEN, "a<think>\n\n</think>\n\n", False, False, "<think>\n\n</think>\n\n"),
        (GLM_LINES, "<|assistant|>\n<think>", True, True, "<think>"),
        (GEMMA, "<|turn>model\n", False, True, ""),
    ],
)
def test_what_a_prompt_ends_in(
    form: Form, prompt: str, is_open: bool, is_fresh: bool, shown: str
) -> None:
    assert (form.is_open(prompt), form.is_fresh(prompt), form.shown(prompt)) == (
        is_open, is_fresh, shown,
    )  # fmt: skip


def test_prompts_get_the_ends_that_their_templates_do_not_give_them() -> None:
    assert HARMONY.ended("a<|return|>", False) == "a<|end|>"
    assert HARMONY.ended("a<|return|>", True) == "a<|return|>" and HARMONY.ended("a", False) == "a"
    assert GEMMA.ended("a<turn|>\n", True) == "a<turn|>\n<|turn>model\n"
    for prompt, opens_turn in (("a<turn|>\n", False), ("a<|turn>model\n", True)):
        assert GEMMA.ended(prompt, opens_turn) == prompt


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, None), ({"enable_thinking": True}, None), ({"enable_thinking": False}, "low"),
        ({"reasoning_effort": "high", "enable_thinking": False}, "high"),
        ({"reasoning_effort": "none"}, "low"), ({"reasoning_effort": "xhigh"}, "high"),
        ({"reasoning_effort": "medium"}, "medium"), ({"reasoning_effort": 3}, 3),
    ],
)  # fmt: skip
def test_words_for_the_effort(given: dict[str, Any], word: Any) -> None:
    assert HARMONY.variables(given).get("reasoning_effort") == word
    assert GEMMA.variables(given) == QWEN.variables(given) == given


def test_what_templates_and_readers_of_a_form_need() -> None:
    assert {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"} <= set(GLM.tags)
    assert {"<parameter=", "<think>"} & set(QWEN.tags) == {"<think>"}, "no tag without its end"
    assert HARMONY.described(TOOLS)[2]["function"] == {"description": "", **TOOLS[2]["function"]}
    assert GEMMA.described(TOOLS) == TOOLS


def called(*ids: str, **more: Any) -> dict[str, Any]:
    calls = [{"id": one, "function": {"name": f"f{n}"}} for n, one in enumerate(ids)]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def result(call_id: str, content: str = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_harmony_has_one_call_in_a_message_and_its_result_after_it() -> None:
    assert HARMONY.adapt is not None
    user, (a, b) = {"role": "user", "content": "?"}, called("a", "b")["tool_calls"]
    asked = called("a", "b", content="I look", reasoning_content="So")
    found = HARMONY.adapt([asked, result("b"), result("a"), user], "")
    assert [one.get("tool_calls") for one in found] == [[a], None, [b], None, None]
    assert [one.get("tool_call_id") for one in found] == [None, "a", None, "b", None]
    assert [one.get("thinking") for one in found] == ["So", None, None, None, None]
    assert [one["content"] for one in found] == ["", "1", "", "1", "?"]
    # without ids, results are in the order of the calls
    nameless = [{"role": "tool", "content": text} for text in "12"]
    found = HARMONY.adapt([called("", "", content="I look"), *nameless], "")
    assert [one["content"] for one in found] == ["I look", "1", "", "2"]
    thought = {"role": "assistant", "content": "Yes", "reasoning_content": "So"}
    assert HARMONY.adapt([thought], "") == [{**thought, "thinking": "So"}]


def test_gemma_has_results_and_the_text_after_them_in_the_message_of_the_calls() -> None:
    assert GEMMA.adapt is not None
    answer = {"role": "assistant", "content": "Yes"}
    asked, results = called("a", "b"), [result("b", '{"x": 1}'), result("a", "no JSON")]
    (found,) = GEMMA.adapt([asked, *results, answer], "")
    assert found["content"] == "Yes" and found["tool_responses"] == [
        {"name": "f0", "response": {"x": 1}}, {"name": "f1", "response": "no JSON"},
    ]  # fmt: skip
    assert len(GEMMA.adapt([asked, *results, answer, answer], "")) == 2, "one answer goes there"
    for more in (called("c", content="I look"), {"role": "assistant", "content": ""}):
        found, last = GEMMA.adapt([asked, *results, more], "")
        assert last == {**more, "content": ""} and found["content"] == ""
    newer = [asked, *results]
    assert GEMMA.adapt(newer, "{#- OpenAI Chat Completions: -#}") == newer
