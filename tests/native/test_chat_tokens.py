"""Control tokens in chat: the template's are tokens to the model, and never text to the user.

With the shipped model's own vocabulary; the scripted engine of tests/unit spells all text in bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from moegraph.cli import main
from moegraph.engine import Engine
from moegraph.gguf import resolve_target
from moegraph.text.chat.prompting import SegmentEncoder
from moegraph.text.tokenizer import Tokenizer

CPU = ("--device", "cpu", "-t", "1", "-c", "256", "--temp", "0")
START, END = "<|im_start|>", "<|im_end|>"


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list to which each request adds its ids, its text, and the control tokens' ids."""
    seen: list[dict[str, Any]] = []
    generate = Engine.generate

    def spy(engine: Engine, ids: Any, *args: Any, **kwargs: Any) -> Any:
        control = {name: engine.tokenizer.encode(name) for name in (START, END)}
        shown = b"".join(engine.tokenizer.piece(i, special=True) for i in ids).decode()
        seen.append({"ids": list(ids), "text": shown, **control})
        return generate(engine, ids, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", spy)
    return seen


def chat(*args: object, stdin: str | None = None) -> str:
    result = CliRunner().invoke(main, ["chat", "tiny", *CPU, *map(str, args)], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_templates_control_tokens_are_single_tokens(prompts: list[dict[str, Any]]) -> None:
    chat("--system", "Be short.", "-p", "What is 2 + 2?", "-n", 3)
    (prompt,) = prompts
    (start,), (end,) = prompt[START], prompt[END]
    assert prompt["text"] == (
        f"{START}system\nBe short.{END}\n{START}user\nWhat is 2 + 2?{END}\n{START}assistant\n"
    )
    control = [token for token in prompt["ids"] if token in (start, end)]
    assert control == [start, end, start, end, start]
    assert prompt["ids"][0] == start, "no token before the template's"


def test_control_tokens_can_be_shown() -> None:
    with Tokenizer(resolve_target("tiny")) as tokenizer:
        (start,), (end,) = (tokenizer.encode(tag) for tag in (START, END))
        tokenizer.show([start])
        assert (tokenizer.piece(start), tokenizer.piece(end)) == (START.encode(), b"")


def test_the_token_that_ends_an_answer_is_no_text_and_the_next_turn_has_it_once(
    prompts: list[dict[str, Any]],
) -> None:
    """The model is made to end its turn at once; then both turns are in the second prompt."""
    end = 4094
    said = chat("--logit-bias", f"{end}+100", stdin="one\ntwo\n")
    assert END not in said and START not in said
    first, second = prompts
    assert first[END] == [end]
    assert second["text"] == (
        f"{START}user\none{END}\n{START}assistant\n{END}\n{START}user\ntwo{END}\n{START}assistant\n"
    )
    assert second["ids"].count(end) == 3


@given(
    st.lists(st.sampled_from([START, END, "<|endoftext|>", "def f(x):\n", " ", "a", "<|", "\n"]))
)
def test_prompts_encoded_in_segments_have_the_tokens_of_the_whole(parts: list[str]) -> None:
    tokenizer, text = vocabulary(), "".join(parts)
    encoded = SegmentEncoder(tokenizer, [START]).encode(text, add_special=True)
    assert encoded.ids == tokenizer.encode(text)
    for at, n in encoded.starts:
        assert tokenizer.encode(text[:at]) == encoded.ids[:n]


@cache
def vocabulary() -> Tokenizer:
    return Tokenizer(resolve_target("tiny"))
