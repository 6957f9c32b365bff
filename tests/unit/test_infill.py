"""Tests of prompts for gaps, of how their text ends, and of /infill as editors ask it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.fake_engine import BeginTokenizer, ByteTokenizer
from helpers.server_case import Case, events_of

from moegraph.errors import RequestError
from moegraph.text.infill import Gap, LineParser, infill_prompt
from moegraph.text.tokenizer import Tokenizer

MARKS = {"pre": "<", "suf": ">", "mid": "^", "rep": "#", "sep": "@"}


def prompt(gap: Gap, n_ctx: int = 8192, marks: dict[str, str] = MARKS, **more: Any) -> Any:
    """Return the text of a prompt whose tokens are bytes, and its marks."""
    tokenizer: Any = more.get("tokenizer") or ByteTokenizer()
    tokenizer.fim = lambda name: ord(marks[name]) if name in marks else None
    ids, found = infill_prompt(cast(Tokenizer, tokenizer), gap, n_ctx, 1)
    return bytes(ids).decode(), found


GAP = Gap("a\nb\n", "\nz", "  c", [("one", "x"), ("two", "y")])


def test_the_parts_have_the_order_of_llama_server() -> None:
    text, marks = prompt(GAP)
    assert text == "#myproject\n@one\nx@two\ny@filename\n<a\nb\n  c>\nz^"
    assert [text[:n] for n in marks] == ["#myproject\n@one\nx@two\ny", text[: text.index("  c")]]
    whole, same = prompt(Gap("a\nb\n  c", GAP.after, "", GAP.extra))
    assert (whole, same) == (text, marks)


def test_a_model_with_few_tokens_has_separators_of_text() -> None:
    bare = {name: MARKS[name] for name in ("pre", "suf", "mid")}
    text, _ = prompt(GAP, marks=bare, tokenizer=BeginTokenizer())
    assert text == "\n\n--- snippet ---\n\nx\n\n--- snippet ---\n\ny\1<a\nb\n  c>\nz^"
    with pytest.raises(RequestError, match="not supported by this model"):
        prompt(GAP, marks={"pre": "<", "suf": ">"})


def test_what_is_far_from_the_gap_is_cut() -> None:
    gap = Gap("b" * 5000, "a" * 5000, "line", [("far", "f" * 3000), ("near", "n" * 3000)])
    text, _ = prompt(gap)
    head, _, rest = text.partition("<")
    assert rest == "b" * 1536 + "line>" + "a" * (512 - 2 - 4) + "^"
    assert len(text) <= 8192 - 1024 + 1 and head.endswith("@near\n" + "n" * 3000 + "@filename\n")
    assert head.startswith("f" * 2000)  # the end of it, without its name
    assert len(prompt(gap, 512)[0]) <= 512
    text, _ = prompt(Gap("no line end" * 5000, "a"))
    assert text.endswith("<" + ("no line end" * 5000)[-1024:] + ">^")


def test_a_cut_begins_at_the_same_line_while_lines_are_added() -> None:
    lines = [f"line {i * i}\n" for i in range(400)]
    starts = [prompt(Gap("".join(lines[n : n + 200]), ""))[0].partition("<")[2] for n in range(100)]
    assert all(len(text) > 3 * 1536 // 4 - 10 for text in starts)
    assert sum(new[:100] == old[:100] for old, new in zip(starts, starts[1:])) > 80


@pytest.mark.parametrize(
    ("n_indent", "pieces", "text"),
    [
        (0, ["a\n", "b"], "a\nb"),
        (2, ["a\n", "  b\n", "    c"], "a\n  b\n    c"),
        (2, ["a\n", " ", "b\n"], "a\n "),
        (2, ["a\n\n", "  b"], "a\n"),
        (2, ["a\n  b\nc"], "a\n  b\n"),
        (2, ["a\n", "\t\tb\n "], "a\n\t\tb\n "),
    ],
)
def test_a_text_ends_before_a_line_of_less_indentation(
    n_indent: int, pieces: list[str], text: str
) -> None:
    case = Case(pieces)
    body = {"input_prefix": "", "input_suffix": "", "n_indent": n_indent}
    assert case.answer("/infill", body)["content"] == text


def test_an_answer_that_its_lines_end_is_over_at_once() -> None:
    case = Case(["a\n", "b", *["c"] * 1000], step_s=0.01)
    found = case.answer("/infill", {"input_prefix": "", "input_suffix": "", "n_indent": 1})
    assert (found["content"], found["stop_type"]) == ("a\n", "limit")
    assert case.service.tickets[0].gone.is_set()


def test_a_text_ends_with_its_line_when_its_time_is_over() -> None:
    parser = LineParser(limit_s=0.0)
    parser.push("a")
    assert not parser.is_done
    parser.push("b\nc")
    assert parser.is_done
    later = LineParser(limit_s=60.0)
    assert later.push("a\nb") and not later.is_done


# what plug-ins have sent; without a key, llama.vim and Continue send a header too
EDITORS = Path(__file__).parents[1] / "data" / "editors.json"
VIM, VSCODE, CONTINUE = json.loads(EDITORS.read_text("utf-8")).values()
TEXTS = {"input_prefix": "def f(x):\n", "prompt": "    re", "input_suffix": "\n\nf(1)\n"}


def test_continue_is_answered() -> None:
    case = Case(["turn", " x"], ["y"], ["turn", " x"])
    for asked, text in zip(CONTINUE, ["turn x", "y"], strict=True):
        key = {"Authorization": asked["authorization"]}
        response = case.post(asked["path"], asked["body"], headers=key)
        events = list(events_of(response.text))
        assert "".join(one["content"] for one in events) == text
        assert all(set(one) >= {"content", "stop"} for one in events) and events[-1]["stop"]
    body = asked["body"]  # its provider openai, as its source has it
    *chunks, done = case.events("/v1/completions", {**body, "max_tokens": body["n_predict"]})
    assert "".join(one["choices"][0]["text"] for one in chunks) == "turn x" and done == "[DONE]"
    for asked, prepared in zip([*CONTINUE, CONTINUE[-1]], case.model.texts, strict=True):
        body = asked["body"]
        assert prepared.prompt == body["prompt"] and list(prepared.stop) == body["stop"]
        assert (prepared.max_tokens, prepared.sampling.temperature) == (64, 0.01)


def gap(body: dict[str, Any]) -> Gap:
    extra = [(one["filename"], one["text"]) for one in body["input_extra"]]
    return Gap(body["input_prefix"], body["input_suffix"], body["prompt"], extra)


def test_llama_vim_is_answered() -> None:
    case = Case([], ["turn x\n"], ["a"], ["b"])
    for asked, content in zip(VIM[:4], [None, "turn x\n", "a", "b"], strict=True):
        body, key = asked["body"], {"Authorization": asked["authorization"]}
        response = case.post(asked["path"], body, headers=key)
        assert response.status_code == 200, response.text
        found, text = response.json(), case.model.texts[-1]
        assert sorted(found) == sorted(filter(None, body["response_fields"]))
        assert found.get("content") == content and found.get("truncated", False) is False
        assert text.gap == gap(body) and text.max_tokens == body["n_predict"]
        assert (text.limit_s, text.sampling.temperature) == (body["t_max_predict_ms"] / 1e3, 0)
    assert found["timings/predicted_n"] == 1 and text.sampling.top_k == 40


def test_llama_vims_instructions_are_followed() -> None:
    case = Case([], ["a", "b"])
    ahead, asked = VIM[4:]
    assert case.answer(ahead["path"], ahead["body"])["choices"][0]["message"]["content"] == ""
    *chunks, done = case.events(asked["path"], asked["body"])
    told = [one["choices"][0]["delta"].get("content") for one in chunks if one["choices"]]
    assert "".join(filter(None, told)) == "ab" and done == "[DONE]"
    first, second = case.model.chats
    assert first.max_tokens == 0 and second.sampling.min_p == 0.1


def test_llama_vscode_is_answered() -> None:
    case = Case([], *["ab\n", "c\n", ""] * 2, ["edited"])
    found = [case.answer(asked["path"], asked["body"]) for asked in VSCODE]
    ahead, first, again, template, tokens, edit = found
    assert ahead["content"] == "" and template["prompt"] and tokens["tokens"]
    assert edit["choices"][0]["message"]["content"] == "edited"
    for answers in (first, again):  # three suggestions, of which it shows what differs
        assert [one["content"] for one in answers] == ["ab\n", "c\n", ""]
        assert [one["index"] for one in answers] == [0, 1, 2]
        assert answers[0]["timings"]["prompt_ms"] > 0
    assert [text.gap for text in case.model.texts[1::3]] == [gap(VSCODE[i]["body"]) for i in (1, 2)]
    drawn = case.model.texts[1].sampling
    assert drawn.temperature > 0 and (drawn.min_p, drawn.top_p) == (0.2, 0.99)


def test_a_suffix_of_openai_is_the_text_after_a_gap() -> None:
    case = Case(["b"])
    found = case.answer("/v1/completions", {"prompt": "a\n", "suffix": "c"})
    assert found["choices"][0]["text"] == "b" and case.model.texts[0].gap == Gap("a\n", "c")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_suffix": None}, "input_suffix"),
        ({"input_extra": [{}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": 1, "text": "a"}]}, "input_extra[0].filename"),
        ({"prompt": [1]}, "prompt"),
        ({"n_indent": -1}, "n_indent"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], param: str) -> None:
    response = Case().post("/infill", {**TEXTS, **change})
    assert response.status_code == 400 and response.json()["error"]["param"] == param
