"""Messages of a conversation: those of clients, in OpenAI's form, made what templates read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError
from .forms import END_OF_THINK, THINK
from .parts import call_of
from .rawjson import dumps, load_object

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One message; role is "system", "user" or "assistant"."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RequestError(f"message role {self.role!r}; allowed: {', '.join(ROLES)}")


class History:
    """A conversation: an optional system message, then alternating user and assistant."""

    def __init__(self, system: str | None = None) -> None:
        self._messages: list[Message] = []
        if system is not None:
            self._messages.append(Message("system", system))

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages so far, oldest first."""
        return tuple(self._messages)

    @property
    def system(self) -> str | None:
        """Return the system prompt, if there is one."""
        first = self._messages[0] if self._messages else None
        return first.content if first and first.role == "system" else None

    @system.setter
    def system(self, content: str | None) -> None:
        if self.system is not None:
            del self._messages[0]
        if content is not None:
            self._messages.insert(0, Message("system", content))

    @property
    def n_turns(self) -> int:
        """Return the number of questions."""
        return sum(message.role == "user" for message in self._messages)

    def ask(self, content: str) -> None:
        """Add a user message."""
        self._messages.append(Message("user", content))

    def answer(self, content: str) -> None:
        """Add an assistant message, also for an answer that was stopped early.

        Reasoning without an end tag is left out: later prompts would present it as the answer.
        """
        if content.lstrip().startswith(THINK) and END_OF_THINK not in content:
            content = ""
        self._messages.append(Message("assistant", content))

    def undo(self) -> str | None:
        """Remove the last question and its answer; return the question, or None."""
        if not self.n_turns:
            return None
        while (message := self._messages.pop()).role != "user":
            pass
        return message.content

    def forget_oldest(self) -> bool:
        """Remove the oldest question and its answer; False if there is only one question."""
        if self.n_turns < 2:
            return False
        start = 1 if self.system is not None else 0
        end = start + 1
        while self._messages[end].role != "user":
            end += 1
        del self._messages[start:end]
        return True

    def restore(self, messages: Iterable[Message]) -> None:
        """Replace the conversation by these messages, oldest first.

        Raises:
            RequestError: they are not an optional system message, then questions with answers.
        """
        found = list(messages)
        roles = [m.role for m in found]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if turns != ["user", "assistant"] * (len(turns) // 2):
            raise RequestError("the messages do not alternate: user, then assistant, in pairs")
        self._messages = found

    def clear(self) -> None:
        """Remove all messages except the system prompt."""
        del self._messages[1 if self.system is not None else 0 :]


TemplateMessage = dict[str, Any]
ReadArguments = Callable[[str, str], Mapping[str, Any] | str]
Show = Callable[[object, str], str]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool", "function": "tool"}  # fmt: skip
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Claude Code begins its system prompt with a line that differs in every request.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*;?)*\s*")


def template_messages(
    messages: Iterable[Mapping[str, Any]],
    read: ReadArguments | None = None,
    separator: Callable[[], str] = lambda: "\n",
    show: Show | None = None,
) -> list[TemplateMessage]:
    """Return messages with the roles system, user, assistant and tool, whose content is text.

    Calls of tools have their arguments as objects. System messages at the beginning become one, and
    lines in it that only identify the request are left out: they would keep the prompt from having
    the beginning that earlier prompts have.

    read: makes the JSON text of a call's arguments what the template gets, given the call's name
    too; None: their values. separator: returns what stands between the parts of one message. show:
    returns the text that stands for a picture, given its address and place; None: there are none.
    """
    found: list[TemplateMessage] = []
    read = read or (lambda _, arguments: load_object(arguments))
    for n, message in enumerate(messages):
        one = _template_message(message, f"messages[{n}]", read, separator, show)
        if one["role"] == "system" and not any(m["role"] != "system" for m in found):
            one["content"] = _BILLING.sub("", one["content"])
            if found and one["content"]:
                found[0]["content"] += "\n\n" + one["content"]
                continue
            if not one["content"]:
                continue
        found.append(one)
    if not found:
        raise RequestError("messages: there is none")
    return found


def _template_message(
    message: Mapping[str, Any], where: str, read: ReadArguments, separator: Callable[[], str],
    show: Show | None,
) -> TemplateMessage:  # fmt: skip
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise RequestError(
            f"{where}.role: {message.get('role')!r}; allowed: {', '.join(sorted(_ROLES))}"
        )
    content = text_of(message.get("content"), f"{where}.content", separator, show)
    found: TemplateMessage = {"role": role, "content": content}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            found["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            found["tool_calls"] = _calls(calls, f"{where}.tool_calls", read)
    found |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    return found


def text_of(
    content: object, where: str, separator: Callable[[], str], show: Show | None = None
) -> str:
    """Return the text of a message's content: a string, None, or parts; show: of pictures."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}: neither text nor a list of parts")
    texts = [_part_text(part, f"{where}[{n}]", show) for n, part in enumerate(content)]
    return (separator() if len(texts) > 1 else "").join(texts)


def _part_text(part: object, where: str, show: Show | None) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where}: not a part with a type")
    kind = part.get("type")
    if kind == "image_url" and show:
        found = part.get(kind)
        return show(found.get("url") if isinstance(found, Mapping) else found, f"{where}.{kind}")
    if kind not in _TEXT_PARTS:
        reads = "text and pictures" if show else "text"
        raise RequestError(f"{where}.type: {kind!r}; this model reads {reads} only")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{_TEXT_PARTS[kind]}: not text")
    return text


def _calls(calls: object, where: str, read: ReadArguments) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}: not a list of calls")
    found = []
    for n, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{n}].function: not a function with a name")
        arguments = _arguments(function["name"], function.get("arguments"), read)
        found.append(call_of(str(call.get("id") or ""), function["name"], arguments))
    return found


def _arguments(name: str, arguments: object, read: ReadArguments) -> Mapping[str, Any] | str:
    """Return a call's arguments as an object; what is none, a model wrote wrongly, and stays."""
    try:
        text = dumps(arguments) if isinstance(arguments, Mapping) else str(arguments or "{}")
        return read(name, text)
    except (ValueError, TypeError):
        return {"arguments": str(arguments)}


def without_late_system(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """Return messages whose system messages after the first message are the user's.

    Many templates refuse them there. They keep their place, so that the prompt before them stays.
    """
    found = list(messages)
    for n, message in enumerate(found):
        if n and message["role"] == "system":
            text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
            found[n] = {"role": "user", "content": text}
    return found
