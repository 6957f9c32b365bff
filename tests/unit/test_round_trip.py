"""A turn that the model wrote, sent back by a client: the next prompt has the tokens it drew."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from helpers.qwen_template import JSON_CALLS, QWEN
from helpers.tag_tokenizer import TAGS, TagTokenizer

from moegraph.engine.chat import ChatModel, ChatRequest
from moegraph.text.chat.parts import Reply
from moegraph.text.chat.template import ChatTemplate
from moegraph.text.tokenizer import Tokenizer

SPECIALS = {tag: tag.startswith("<|") for tag in TAGS}
TOOL = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "properties": {
                "text": {"type": "string"}, "n": {"type": "number"}, "on": {"type": "boolean"},
                "all": {"type": "object"}, "none": {"type": ["null", "integer"]},
            },
        },
    },
}  # fmt: skip
USER = {"role": "user", "content": "Do it"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "done"}

Client = Callable[[dict[str, Any]], dict[str, Any]]


def verbatim(message: dict[str, Any]) -> dict[str, Any]:
    return message


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """Return what a client makes of a message that keeps values only, as JavaScript's do."""

    def whole(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return {k: whole(v) for k, v in value.items()} if isinstance(value, dict) else value

    found = json.loads(json.dumps(message))
    for call in found.get("tool_calls", ()):
        values = whole(json.loads(call["function"]["arguments"]))
        call["function"]["arguments"] = json.dumps(values, separators=(",", ":"))
        call["id"] = "other"
    return cast(dict[str, Any], found)


def call(**values: str) -> str:
    given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=set>\n{given}</function>\n</tool_call>"


class Talk:
    """A model with a scripted voice, and what its prompts are."""

    def __init__(self, source: str = QWEN) -> None:
        self.tokenizer = TagTokenizer()
        self.model = ChatModel(cast(Tokenizer, self.tokenizer), ChatTemplate(source), SPECIALS)

    def turn(self, *messages: dict[str, Any]) -> tuple[list[int], Any]:
        prepared = self.model.prepare(ChatRequest(messages, [TOOL]))
        return list(prepared.request.prompt), prepared.parser

    def says(self, parser: Any, tokens: list[int]) -> dict[str, Any]:
        """Return the message of an answer, given one token at a time and then its end."""
        reply, decoder = Reply(), codecs.getincrementaldecoder("utf-8")()
        for token in tokens:
            text = decoder.decode(self.tokenizer.piece(token))
            reply.add(parser.push(text, [token]))
        reply.add(parser.push("", [self.tokenizer.eos]))
        reply.add(parser.flush())
        return reply.message()

    def goes_on(self, text: str | list[int], client: Client) -> bool:
        """Return whether the prompt after a turn begins with the tokens of that turn."""
        tokens = self.tokenizer.encode(text) if isinstance(text, str) else text
        before, parser = self.turn(USER)
        message = client(self.says(parser, tokens))
        after, _ = self.turn(USER, message, RESULT)
        held = [*before, *tokens, self.tokenizer.eos]
        return after[: len(held)] == held


@pytest.fixture
def talk() -> Any:
    found = Talk()
    yield found
    found.model.close()


THOUGHT = "I set it.\n</think>\n\n"
WRITTEN = {
    "text": {"text": 'a "b"\n\tc \\ é\n'},
    "numbers": {"n": "1.50", "text": "x"},
    "exponents": {"n": "1e3"},
    "whole numbers": {"n": "2.0"},
    "words": {"on": "true", "none": "null"},
    "Python's words": {"on": "True", "none": "None"},
    "Python's quotes": {"all": "{'k': [1, 2.0]}"},
    "blanks": {"all": '{"z":1,  "a" : [ 1,2 ]}'},
    "several lines": {"all": '{\n  "k": 1.0\n}'},
    "order": {"text": "last", "n": "3", "all": "{}"},
    "what no schema has": {"other": "[1,2]", "more": "text"},
}


@pytest.mark.parametrize("client", [verbatim, rewritten])
@pytest.mark.parametrize("values", WRITTEN.values(), ids=WRITTEN)
def test_arguments_are_shown_as_they_were_written(
    talk: Talk, values: dict[str, str], client: Client
) -> None:
    assert talk.goes_on(THOUGHT + call(**values), client)


@pytest.mark.parametrize("client", [verbatim, rewritten])
def test_text_and_several_calls(talk: Talk, client: Client) -> None:
    text = f"{THOUGHT}Now both.\n\n{call(n='1.0')}\n{call(text='b', on='True')}"
    assert talk.goes_on(text, client)


@pytest.mark.parametrize("client", [verbatim, rewritten])
def test_tokens_that_the_text_is_not_encoded_to(talk: Talk, client: Client) -> None:
    """The vocabulary has longer tokens, which encoding never gives."""
    encode, id_of = talk.tokenizer.encode, talk.tokenizer.id_of
    tokens = [
        *encode("I set it.\n</think>"), id_of("\n\n"), *encode("<tool_call>\n<function=set>\n"),
        *encode("<parameter=all>\n"), id_of('{"'), *encode("on"), id_of('": '), id_of("true"),
        *encode("}\n</parameter>\n</function>\n</tool_call>"),
    ]  # fmt: skip
    assert tokens != encode(talk.tokenizer.decode(tokens))
    assert talk.goes_on(tokens, client)


def test_what_the_client_changed_is_shown_changed(talk: Talk) -> None:
    def changes(message: dict[str, Any]) -> dict[str, Any]:
        message["tool_calls"][0]["function"]["arguments"] = '{"n": 7}'
        return message

    _, parser = talk.turn(USER)
    message = changes(talk.says(parser, talk.tokenizer.encode(THOUGHT + call(n="1.50"))))
    after, _ = talk.turn(USER, message, RESULT)
    assert "<parameter=n>\n7\n</parameter>" in talk.tokenizer.decode(after)


def test_an_answer_that_was_cut_is_not_remembered(talk: Talk) -> None:
    _, parser = talk.turn(USER)
    tokens = [talk.tokenizer.id_of("\n\n"), *b"Yes."]
    for one in (*talk.tokenizer.encode("so</think>"), *tokens):
        parser.push(talk.tokenizer.decode([one]), [one])
    parser.flush(is_cut=True)
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "so"}
    after, _ = talk.turn(USER, message, RESULT)
    assert after == talk.tokenizer.encode(talk.tokenizer.decode(after))


@pytest.mark.parametrize(
    "arguments", ['{"n": 1.5, "text": "b"}', '{"text":"b",  "n": 1.50}', '{"n": "7"}', "{}"]
)
@pytest.mark.parametrize("takes_text", [True, False])
def test_the_older_form(arguments: str, takes_text: bool) -> None:
    text = "{% if args is string %}{{ args }}{% else %}{{ args | tojson }}{% endif %}"
    if not takes_text:
        text = "{{ args | tojson }}"
    shown = "call.function.arguments"
    source = JSON_CALLS.replace(f"{{{{ {shown} | tojson }}}}", text.replace("args", shown))
    assert takes_text == (source != JSON_CALLS)
    talk = Talk(source)
    before, parser = talk.turn(USER)
    said = f'<tool_call>\n{{"name": "set", "arguments": {arguments}}}\n</tool_call>'
    message = talk.says(parser, talk.tokenizer.encode(THOUGHT + said))
    shown = talk.tokenizer.decode(talk.turn(USER, message, RESULT)[0][len(before) :])
    talk.model.close()
    if takes_text:
        assert shown.startswith(THOUGHT + said)
    else:
        values = json.loads(arguments)
        assert shown.startswith(THOUGHT + said.replace(arguments, json.dumps(values)))
