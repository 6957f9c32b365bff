"""Tests of prompts for gaps, of how their text ends, and of /infill as editors ask it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from helpers.fake_engine import BeginTokenizer, ByteTokenizer
from helpers.server_case import Case

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


# as llama.vim (January 2026) and llama.vscode send them
FIELDS = (
    "content timings/prompt_n timings/prompt_ms timings/prompt_per_token_ms "
    "timings/prompt_per_second timings/predicted_n timings/predicted_ms "
    "timings/predicted_per_token_ms timings/predicted_per_second truncated tokens_cached"
).split()
CHUNK = {"text": "import os\n", "time": [1795875529, 274064], "filename": "/home/u/edit.py"}
COMMON = {"top_k": 40, "stream": False, "samplers": ["top_k", "top_p", "infill"],
          "cache_prompt": True, "n_predict": 128, "t_max_prompt_ms": 500}  # fmt: skip
TEXTS = {"input_prefix": "def f(x):\n", "prompt": "    re", "input_suffix": "\n\nf(1)\n"}
VIM = {**COMMON, **TEXTS, "id_slot": 0, "input_extra": [CHUNK], "stop": [], "n_indent": 4,
       "top_p": 0.9, "t_max_predict_ms": 250, "response_fields": FIELDS, "model": ""}  # fmt: skip
VIM_AHEAD = {"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": [CHUNK],
             "prompt": "", "n_predict": 0, "temperature": 0.0, "samplers": [], "stream": False,
             "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
             "response_fields": [""]}  # fmt: skip
VSCODE = {**COMMON, **TEXTS, "input_extra": [CHUNK], "top_p": 0.99, "n_indent": 4,
          "t_max_predict_ms": 2500}  # fmt: skip

# as Continue (June 2026) sends it to the providers llama.cpp and openai, for a model that is called
# qwen-coder; it chooses the tokens of gaps by that name
MARKED = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
          "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"]  # fmt: skip
CONTINUE = {
    "model": "qwen-coder",
    "prompt": "<|fim_prefix|>def f(x):\n    re<|fim_suffix|>\n<|fim_middle|>",
    "stream": True,
    "stop": [*MARKED, "/src/", "#- coding: utf-8", "```"],
    "temperature": 0.01,
}


def test_continue_is_answered() -> None:
    case = Case(["turn", " x"], ["turn", " x"])
    events = case.events("/completion", {**CONTINUE, "n_predict": 4096})
    assert "".join(one["content"] for one in events) == "turn x"
    assert all(set(one) >= {"content", "stop"} for one in events) and events[-1]["stop"]
    *chunks, done = case.events("/v1/completions", {**CONTINUE, "max_tokens": 4096})
    assert "".join(one["choices"][0]["text"] for one in chunks) == "turn x" and done == "[DONE]"
    for asked in case.model.texts:
        assert asked.prompt == CONTINUE["prompt"] and list(asked.stop) == CONTINUE["stop"]
        assert (asked.max_tokens, asked.sampling.temperature) == (4096, 0.01)


def test_editors_are_answered() -> None:
    case = Case(["turn x"], [], ["turn x\n", "\n"])
    found = case.answer("/infill", VIM)
    assert sorted(found) == sorted(FIELDS) and found["content"] == "turn x"
    assert found["timings/predicted_n"] == 6 and found["truncated"] is False
    assert case.answer("/infill", VIM_AHEAD) == {}
    found = case.answer("/infill", VSCODE)
    assert found["content"] == "turn x\n" and found["timings"]["prompt_ms"] > 0
    first, ahead, _ = case.model.texts
    assert first.gap == Gap(
        "def f(x):\n", "\n\nf(1)\n", "    re", [(CHUNK["filename"], "import os\n")]
    )
    assert first.sampling.temperature == 0 and first.sampling.top_k == 40
    assert (first.max_tokens, ahead.max_tokens) == (128, 0) and first.limit_s == 0.25


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
