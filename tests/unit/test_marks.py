"""Where a conversation's next prompts part from this one: in the text, and in its tokens."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_engine import ByteTokenizer

from moegraph.text.chat import ChatTemplate, Message, parting_places, token_marks

SYSTEM, QUESTION = Message("system", "Be brief."), Message("user", "Ask")
# As reasoning models have it: the reasoning of earlier answers is dropped.
DROPS = """
{%- for m in messages %}
{{- '[' + m.role + ']' + (m.content if loop.last else m.content.split('</think>')[-1]) }}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% if thinks %}<think>{% endif %}{% endif %}"""
KEEPS = DROPS.replace(".split('</think>')[-1]", "").replace("<think>", "")


def places(source: str, *messages: Message, **variables: Any) -> list[str]:
    """Return the text before each place."""
    with ChatTemplate(source) as template:
        prompt = template.render(messages, **variables)
        found = parting_places(template, messages, prompt, variables)
    return [prompt[:place] for place in found]


def test_after_the_system_prompt_and_before_the_answer() -> None:
    start = "[system]Be brief.[user]"
    assert places(DROPS, SYSTEM, QUESTION, thinks=True) == [start, start + "Ask[assistant]"]
    assert places(DROPS, SYSTEM, QUESTION) == [start, start + "Ask[assistant]"]


def test_without_a_system_prompt() -> None:
    assert places(KEEPS, QUESTION) == ["[user]Ask[assistant]"]


def test_a_question_that_begins_as_the_stand_in_does() -> None:
    asked = Message("user", "A or B?")
    assert places(KEEPS, SYSTEM, asked)[0] == "[system]Be brief.[user]"


def test_every_turn_is_before_the_next_ones_place() -> None:
    turns: list[Message] = [SYSTEM]
    before = ""
    with ChatTemplate(DROPS) as template:
        for turn in range(4):
            turns.append(Message("user", f"Question {turn}"))
            prompt = template.render(turns, thinks=True)
            assert prompt.startswith(before)
            before = prompt[: parting_places(template, turns, prompt, {"thinks": True})[-1]]
            turns.append(Message("assistant", f"<think>hm {turn}</think>Answer {turn}"))


@pytest.mark.parametrize("fails", ["raise_exception('one only')", "1 / 0"])
def test_a_template_that_fails_has_no_places(fails: str) -> None:
    source = "{% if messages | length > 1 %}{{ " + fails + " }}{% endif %}x"
    assert places(source, QUESTION) == []


@pytest.mark.parametrize(
    ("at", "marks"), [([], []), ([0], []), ([4, 9], [4, 9]), ([10], [9]), ([12], [9])]
)
def test_marks_are_tokens_before_a_place(at: list[int], marks: list[int]) -> None:
    text = "0123456789"
    assert token_marks(ByteTokenizer(), text, list(text.encode()), at) == marks


class Pairs(ByteTokenizer):
    """A token is two characters, from the left."""

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [hash(text[at : at + 2]) for at in range(0, len(text), 2)]


def test_a_place_inside_a_token_is_no_mark() -> None:
    text = "0123456789"
    ids = Pairs().encode(text)
    assert token_marks(Pairs(), text, ids, [4, 8]) == [2, 4]
    assert token_marks(Pairs(), text, ids, [3, 7]) == []
