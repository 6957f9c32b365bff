"""Where a conversation's next prompts part from this one, and prompts encoded in segments."""

from __future__ import annotations

from typing import Any, cast

import pytest
from helpers.qwen_template import QWEN
from helpers.tag_tokenizer import TAGS, TagTokenizer
from hypothesis import given
from hypothesis import strategies as st

from moegraph.engine.chat import ChatModel, ChatRequest
from moegraph.text.chat.prompting import MAX_QUESTIONS, SegmentEncoder, continued, turn_tags
from moegraph.text.chat.template import ChatTemplate
from moegraph.text.recent import Recent
from moegraph.text.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
SYSTEM = {"role": "system", "content": "You are a helper with a system prompt of some length."}
SPECIALS = {tag: tag.startswith("<|") for tag in TAGS}


class Counting(TagTokenizer):
    """Notes what it is asked to encode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        self.seen.append(text)
        return super().encode(text, add_special, parse_special)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "hm", calls: int = 0) -> dict[str, Any]:
    call = {"function": {"name": "look", "arguments": "{}"}}
    return {
        "role": "assistant", "content": text, "reasoning_content": reasoning,
        "tool_calls": [call] * calls,
    }  # fmt: skip


class Talk:
    """Prompts of one chat model, and the texts before their marks."""

    def __init__(self, source: str = QWEN) -> None:
        self.tokenizer = Counting()
        self.model = ChatModel(cast(Tokenizer, self.tokenizer), ChatTemplate(source), SPECIALS)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()

    def prompt(self, *messages: dict[str, Any], tools: bool = False) -> tuple[str, list[str]]:
        asked = ChatRequest(messages=messages, tools=[TOOL] * tools)
        found = self.model.prepare(asked)
        ids = list(found.request.prompt)
        prompt = self.model.prompt(asked).text
        assert ids == TagTokenizer().encode(prompt)
        return prompt, [self.tokenizer.decode(ids[:mark]) for mark in found.request.marks]


def test_behind_the_system_prompt_and_before_the_answer() -> None:
    with Talk() as talk:
        prompt, marks = talk.prompt(SYSTEM, user("Ask"))
    start = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n"
    assert marks == [start, start + "<|im_start|>user\nAsk<|im_end|>\n"]
    assert prompt == marks[-1] + "<|im_start|>assistant\n<think>\n"


def test_a_turn_with_calls_parts_where_its_reasoning_is_dropped() -> None:
    turn = [user("Do it"), assistant("I look", calls=1), {"role": "tool", "content": "42"}]
    with Talk() as talk:
        prompt, marks = talk.prompt(SYSTEM, *turn)
        later, _ = talk.prompt(SYSTEM, *turn, assistant("Done."), user("Thanks"))
        more, _ = talk.prompt(
            SYSTEM, *turn, assistant("", calls=1), {"role": "tool", "content": "7"}
        )
        forgets, _ = talk.prompt(SYSTEM, *turn, assistant("", reasoning="", calls=1), turn[-1])
    assert forgets.startswith(marks[-1])  # a client that sends no reasoning back
    assert not later.startswith(marks[-1]) and later.startswith(marks[-2])
    assert marks[-2].endswith("Do it<|im_end|>\n")
    assert more.startswith(marks[-1]) and prompt[len(marks[-1]) :].startswith("<|im_start|>assis")


def test_before_the_latest_questions() -> None:
    turns = [one for n in range(9) for one in (user(f"Question {n}"), assistant(f"Answer {n}"))]
    with Talk() as talk:
        _, marks = talk.prompt(SYSTEM, *turns, user("Question 9"))
    asked = [mark.rpartition("\n<|im_start|>assistant\n")[2] for mark in marks[1:-1]]
    assert len(asked) == MAX_QUESTIONS
    assert asked == [f"Answer {n}<|im_end|>\n" for n in range(9 - MAX_QUESTIONS, 9)]


def test_every_turn_goes_on_behind_a_mark_of_the_one_before() -> None:
    turns, before = [SYSTEM], ""
    with Talk() as talk:
        for n in range(4):
            turns.append(user(f"Question {n}"))
            prompt, marks = talk.prompt(*turns)
            assert prompt.startswith(before)
            before = marks[-1]
            turns.append(assistant(f"Answer {n}"))


def test_what_was_encoded_is_not_encoded_again() -> None:
    turns = [SYSTEM, user("One"), assistant("Two"), user("Three")]
    with Talk() as talk:
        talk.prompt(*turns)
        talk.tokenizer.seen.clear()
        talk.prompt(*turns, assistant("Four"), user("Five"))
        seen = [text for text in talk.tokenizer.seen if text]
    assert seen == [
        "<|im_start|>assistant\nFour<|im_end|>\n", "<|im_start|>user\nFive<|im_end|>\n",
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages | length }}"])
def test_a_template_without_control_tokens_has_no_marks(source: str) -> None:
    with Talk(source) as talk:
        assert talk.prompt(SYSTEM, user("Ask"))[1] == []


def test_prompts_are_cut_only_at_control_tokens_that_no_other_token_reaches_into() -> None:
    specials = ["<a>", "<b>", "x<b>", "<c", "<end>"]
    assert turn_tags("<a> <b> <c> <end>", specials, ["<end>"]) == ["<a>", "<c"]
    assert turn_tags("<a>", ["<a>", "x<"], []) == []
    assert turn_tags("none", specials, []) == []


@given(st.lists(st.sampled_from([*TAGS, "a", "\n", "<", "|im_start|>", "é"]), max_size=12))
def test_segments_have_the_tokens_of_the_whole(parts: list[str]) -> None:
    text, whole = "".join(parts), TagTokenizer()
    encoded = SegmentEncoder(whole, ["<|im_start|>", "<think>"]).encode(text, True)
    assert encoded.ids == whole.encode(text)
    for at, n in encoded.starts:
        assert whole.decode(encoded.ids[:n]) == text[:at]


def test_a_model_that_begins_texts_with_a_token() -> None:
    class Begins(TagTokenizer):
        def encode(self, text: str, add_special: bool = True, parse: bool = True) -> list[int]:
            return [65] * add_special + super().encode(text)

    text = "x<|im_start|>y"
    encoded = SegmentEncoder(Begins(), ["<|im_start|>"]).encode(text, True)
    assert encoded.ids == Begins().encode(text) and encoded.starts == [(0, 1), (1, 2)]
    assert SegmentEncoder(Begins(), ["<|im_start|>"]).encode(text, False).ids[0] == ord("x")


def test_a_memory_forgets_what_was_not_used_for_longest() -> None:
    memory = Recent[str, int](10)
    for key, size in (("a", 4), ("b", 4), ("a", 5)):  # a text that comes again counts once
        memory.put(key, size, size)
    assert memory.get("b") == 4
    memory.put("c", 3, 3)
    assert [memory.get(key) for key in "abc"] == [None, 4, 3]


def test_reasoning_that_goes_on_takes_the_place_of_an_empty_one() -> None:
    begun = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert continued("A<think>\n\n</think>\n\n", begun) == ("A<think>\nHm", "Hm", True)
