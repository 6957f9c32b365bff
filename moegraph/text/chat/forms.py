"""Forms of answers: how models mark their reasoning and write calls of tools.

A form is recognized by the chat template, as in llama.cpp's common/chat.cpp, and not by the model's
architecture. No module but this one knows a family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .rawjson import dumps, loads

THINK, END_OF_THINK = "<think>", "</think>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class TextCalls:
    """Calls whose arguments stand between tags as plain text.

    function: begins a call, with {name}. key: begins a parameter, with {key}. end_of_value,
    end_of_function: end them. Their line ends are as templates write them. between: two calls.
    """

    function: str
    key: str
    end_of_value: str
    end_of_function: str = ""
    between: str = ""

    @property
    def before_key(self) -> str:
        """The text before a parameter's name."""
        return self.key.partition("{key}")[0]

    @property
    def after_key(self) -> tuple[str, ...]:
        """The tags between a parameter's name and its value."""
        return tuple(re.findall(r"</?\w+>|^>", self.key.partition("{key}")[2]))


XML = TextCalls(
    f"\n{FUNCTION}{{name}}>\n", f"{PARAMETER}{{key}}>\n", f"\n{END_OF_PARAMETER}\n",
    f"{END_OF_FUNCTION}\n", "\n",
)  # fmt: skip


# What a model is told whose template knows no tools, and a call as it then writes it.
HOW_TO_CALL = f"""\
You can call these functions; each line describes one:
{{tools}}

To call one, answer with lines of this form, and with nothing after them:
{CALL}
{FUNCTION}NAME>
{PARAMETER}NAME_OF_PARAMETER>
VALUE
{END_OF_PARAMETER}
{END_OF_FUNCTION}
{END_OF_CALL}"""


def call_text(function: Mapping[str, Any]) -> str:
    """Return a call as `HOW_TO_CALL` asks for it."""
    lines = [CALL, f"{FUNCTION}{function['name']}>"]
    for key, value in function["arguments"].items():
        text = value if isinstance(value, str) else dumps(value)
        lines += [f"{PARAMETER}{key}>", text, END_OF_PARAMETER]
    return "\n".join([*lines, END_OF_FUNCTION, END_OF_CALL])


def _keys(gap: str) -> TextCalls:
    key = f"<arg_key>{{key}}</arg_key>{gap}<arg_value>"
    return TextCalls(f"{{name}}{gap}", key, f"</arg_value>{gap}", between=gap)


@dataclass(frozen=True)
class Headers:
    """Headers as a model writes them where grammars hold.

    start: begins a message of the answer, but for the first, whose prompt has it. thoughts, final,
    calls: begin headers; with {name} in those of calls. kinds: may follow, of text that is JSON.
    end: ends a header. end_of_message: before the next one. function: the prefix of names.
    """

    start: str
    thoughts: tuple[str, ...]
    final: str
    calls: tuple[str, ...]
    kinds: tuple[str, ...]
    end: str
    end_of_message: str
    function: str


@dataclass(frozen=True)
class Channels:
    """Answers that are made of messages with headers, of which some are calls.

    begins: tags of which each begins a header. ends: tags that end a message. header: matches one
    that is whole: of what role and kind it is, and to whom it goes. partial: matches what may
    become one. headers: answers begin with one, and a message has no text without; None: not so.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    header: re.Pattern[str]
    partial: re.Pattern[str]
    headers: Headers | None = None


@dataclass(frozen=True, eq=False)
class Form:
    """One form of answers.

    marks: texts that every template of the form has. think, end_of_think: open and end reasoning,
    as a prompt has them that the model continues. call, end_of_call: tags around a call; "": a call
    is a message. text: how the arguments are written as plain text; None: as an object. is_dict: it
    has bare keys and QUOTE. channels: the answer has headers; None: it has not. adapt: makes
    messages what templates of the form read. ended: gives a prompt the end that its template should
    have given it, if it opens a turn or not. describes: each tool must have a description. efforts:
    words of reasoning_effort, and of "" for no reasoning.
    """

    marks: tuple[str, ...] = ()
    think: str = f"{THINK}\n"
    end_of_think: str = END_OF_THINK
    call: str = CALL
    end_of_call: str = END_OF_CALL
    text: TextCalls | None = None
    is_dict: bool = False
    channels: Channels | None = None
    adapt: Callable[[Messages, str], Messages] | None = None
    ended: Callable[[str, bool], str] = lambda prompt, opens_turn: prompt
    describes: bool = False
    efforts: Mapping[str, str] | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that a reader of answers must see, also where they are control tokens."""
        found = [self.think, self.end_of_think, self.call, self.end_of_call]
        if self.text:
            found += [self.text.key, self.text.end_of_value]
        if self.channels:
            found += [*self.channels.begins, *self.channels.ends, QUOTE]
        return tuple(dict.fromkeys(TAG.findall(" ".join(found))))

    def is_open(self, prompt: str) -> bool:
        """Return whether a prompt ends inside reasoning."""
        return prompt.rstrip().endswith(self.think.strip())

    def is_fresh(self, prompt: str) -> bool:
        """Return whether the model may begin with reasoning after a prompt that opens none."""
        return not prompt.rstrip().endswith(self.end_of_think)

    def shown(self, prompt: str) -> str:
        """Return the tags that a prompt ends in: an open one, or an empty block."""
        think, end = re.escape(self.think.strip()), re.escape(self.end_of_think)
        found = re.search(rf"{think}\s*({end}\s*)?\Z", prompt)
        return found.group() if found else ""

    def variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of a template whose words for the effort differ from OpenAI's."""
        if self.efforts is None:
            return dict(given)
        effort = given.get("reasoning_effort")
        if effort is None and given.get("enable_thinking") is False:
            effort = ""
        word = self.efforts.get(effort, effort) if isinstance(effort, str) else effort
        return dict(given) if word is None else {**given, "reasoning_effort": word}

    def described(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return tools as templates read them."""
        if not self.describes:
            return list(tools)
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]

    @property
    def headers(self) -> Headers | None:
        """The headers that each message of an answer has, if it has any."""
        return self.channels.headers if self.channels else None


# Gemma's quotes.
QUOTE = '<|"|>'
TAG = re.compile(r"</?[\w|\"]+>")
_NAME = r"[\w.:/-]{1,256}"


def _harmony_messages(messages: Messages, _: str) -> Messages:
    """Return messages with thoughts where the template looks for them, and one call in each.

    It shows the first call of a message only, and not both text and thoughts beside a call.
    """
    found: Messages = []
    left = list(messages)
    while left:
        message = dict(left.pop(0))
        calls = message.pop("tool_calls", ())
        if thoughts := message.get("reasoning_content"):
            message["thinking"] = thoughts
            message |= {"content": ""} if calls else {}
        if not calls:
            found.append(message)
            continue
        n_results = next((n for n, m in enumerate(left) if m["role"] != "tool"), len(left))
        results, left = left[:n_results], left[n_results:]
        for n, call in enumerate(calls):
            head = message if n == 0 else {"role": "assistant", "content": ""}
            found.append({**head, "tool_calls": [call]})
            if len(calls) > 1:
                own = [m for m in results if call["id"] and m.get("tool_call_id") == call["id"]]
                own = own or results[:1]
                found += own
                results = [m for m in results if m not in own]
        found += results
    return found


def _harmony_end(prompt: str, opens_turn: bool) -> str:
    """Return a prompt whose last message ends as in a history: the template's end trains."""
    before, end, after = prompt.rpartition("<|return|>")
    return prompt if opens_turn or not end else f"{before}<|end|>{after}"


def _gemma_end(prompt: str, opens_turn: bool) -> str:
    """Return a prompt that opens the model's turn, which templates do not do after results."""
    return f"{prompt}<|turn>model\n" if opens_turn and prompt.endswith("<turn|>\n") else prompt


def _gemma_messages(messages: Messages, source: str) -> Messages:
    """Return messages with the results of calls in the message of the calls, for older templates.

    The text of the answer that follows goes there too, as llama.cpp has it.
    """
    if "{#- OpenAI Chat Completions:" in source:
        return messages
    found: Messages = []
    for message in messages:
        before: dict[str, Any] = found[-1] if found else {}
        takes = "tool_calls" in before and not before["content"]
        if takes and message["role"] == "tool":
            results, calls = before.setdefault("tool_responses", []), before["tool_calls"]
            name = str(message.get("tool_call_id", ""))
            if len(results) < len(calls):
                name = calls[len(results)]["function"]["name"]
            try:
                response = loads(message["content"])
            except ValueError:
                response = message["content"]
            results.append({"name": name, "response": response})
        elif (
            takes and "tool_responses" in before and message["role"] == "assistant"
            and "tool_calls" not in message and message["content"]
        ):  # fmt: skip
            before["content"] = message["content"]
        else:
            one = dict(message)
            found.append(one | {"content": ""} if "tool_calls" in one else one)
    return found


# In headers of harmony: words, the channel, and the recipient.
_PIECES = (
    r"(?:[\s\w.:/-]|<\|channel\|>\s*(?P<kind>\w+)\b|<\|constrain\|>|"
    r"to=(?P<to>[^\s<]+)(?=[\s<]))*"
)
_START = r"\s*(?:<\|start\|>(?P<role>[\w.:/-]+))?"
_HEADERS = Headers(
    "<|start|>assistant", ("<|channel|>analysis", "<|channel|>commentary"), "<|channel|>final",
    (" to=functions.{name}<|channel|>commentary", "<|channel|>commentary to=functions.{name}"),
    (" <|constrain|>json", " json"), "<|message|>", "<|end|>", "functions.",
)  # fmt: skip
HARMONY = Form(
    ("<|channel|>", "<|message|>"),
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>",
    call="", end_of_call="", adapt=_harmony_messages, ended=_harmony_end, describes=True,
    channels=Channels(
        ("<|start|>", "<|channel|>"), ("<|end|>", "<|return|>", "<|call|>"),
        re.compile(rf"{_START}{_PIECES}<\|message\|>"),
        re.compile(rf"{_START}{_PIECES}(?:<[|\w]*>?\s*|to=[^\s<]*)?"), _HEADERS,
    ),
    efforts={"": "low", "none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
)  # fmt: skip
GEMMA = Form(
    ("<|tool_call>call:",),
    "<|channel>thought\n", "<channel|>", "<|tool_call>", "<tool_call|>",
    is_dict=True, adapt=_gemma_messages, ended=_gemma_end,
    channels=Channels(
        ("<|channel>", "<|tool_call>"), ("<channel|>", "<tool_call|>"),
        re.compile(rf"<\|channel>(?P<kind>thought)|<\|tool_call>\s*call:(?P<to>{_NAME})(?={{)"),
        re.compile(
            r"<\|channel>(?:t|th|tho|thou|thoug|though)?|"
            r"<\|tool_call>\s*(?:c|ca|cal|call|call:[\w.:/-]*)?"
        ),
    ),
)  # fmt: skip
GLM = Form(("<arg_key>", "<arg_value>"), THINK, text=_keys(""))
GLM_LINES = Form(("<arg_key>", "<arg_value>", "{function-name}\n"), f"\n{THINK}", text=_keys("\n"))
QWEN = Form((FUNCTION,), text=XML)
HERMES = Form(("tools",))
_FORMS = (HARMONY, GEMMA, GLM_LINES, GLM, QWEN, HERMES)


def form_of(template: str) -> Form:
    """Return the form of answers to prompts of a template; a template without tools has Qwen's."""
    found = (form for form in _FORMS if all(mark in template for mark in form.marks))
    return next(found, QWEN)
