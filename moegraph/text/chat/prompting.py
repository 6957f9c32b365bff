"""Prompts made of messages by a chat template, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...errors import MoegraphError, RequestError
from .marks import first_question
from .messages import TemplateMessage, without_late_system
from .plaintools import described_tools, plain_messages
from .reasoning import END_OF_THINK, THINK
from .template import ChatTemplate

Render = Callable[[list[TemplateMessage]], str]
# Beginnings of prompts, up to the first question, that are known without rendering them again; and
# their characters.
_N_BEGINNINGS, _MAX_CHARS = 16, 4 * 1024 * 1024
# Shorter ones have neither a system prompt nor tools.
_MIN_BEGINNING = 64


class PromptMaker:
    """Renders conversations with a template, which it owns.

    tokens: variables of every rendering, such as bos_token.
    """

    def __init__(self, template: ChatTemplate, tokens: Mapping[str, str]) -> None:
        self.template = template
        self._tokens = dict(tokens)
        self._beginnings: tuple[str, ...] = ()
        self._rendering = threading.Lock()

    def close(self) -> None:
        """Close the template; a second call does nothing."""
        with self._rendering:
            self.template.close()

    def renderer(self, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Render:
        """Return what makes prompts of messages, with these tools.

        Raises:
            RequestError: a tool is not JSON; and so for messages that the template refuses.
        """
        if tools and self.template.knows_tools:
            variables = {**variables, "tools": list(tools)}
        try:
            described = "" if self.template.knows_tools else described_tools(tools)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"tools: a schema is not JSON: {error}") from error

        def render(messages: list[TemplateMessage]) -> str:
            if not self.template.knows_tools:
                messages = plain_messages(messages, described)
            try:
                return self._apply(messages, variables)
            except RequestError:
                plain = without_late_system(messages)
                if plain == messages:
                    raise
                return self._apply(plain, variables)

        return render

    def _apply(self, messages: list[TemplateMessage], variables: Mapping[str, Any]) -> str:
        reserved = {"messages", "add_generation_prompt"}
        allowed = {name: value for name, value in variables.items() if name not in reserved}
        with self._rendering:
            try:
                return self.template.render(messages, **{**self._tokens, **allowed})
            except RequestError:
                raise
            except (MoegraphError, TypeError, ValueError, RecursionError) as error:
                # if it fails for any messages, it is broken, and the client is right
                with suppress(RequestError):
                    self.template.render([{"role": "user", "content": "A"}], **self._tokens)
                raise RequestError(
                    f"the chat template fails for these messages: {error}"
                ) from error

    def first_question(self, render: Render, messages: list[TemplateMessage], prompt: str) -> int:
        """Return where the first question begins, after the system prompt and tools."""
        known = max((len(one) for one in self._beginnings if prompt.startswith(one)), default=0)
        if known:
            return known
        try:
            found = first_question(render, messages, prompt)
        except MoegraphError:
            return 0  # a template that wants more than one question
        # a beginning without a system prompt or tools would be that of other prompts too
        if found > _MIN_BEGINNING:
            self._remember(prompt[:found])
        return found

    def _remember(self, beginning: str) -> None:
        found = (*self._beginnings[1 - _N_BEGINNINGS :], beginning)
        while sum(map(len, found)) > _MAX_CHARS:
            found = found[1:]
        self._beginnings = found


def whole_prompt(render: Render, messages: list[TemplateMessage]) -> str:
    """Return the prompt for messages; if the last of several is an assistant's, it ends in that."""
    if len(messages) > 1 and _is_begun(messages[-1]):
        return _continued(render(messages[:-1]), messages[-1])
    return render(messages)


def _is_begun(message: TemplateMessage) -> bool:
    return message["role"] == "assistant" and "tool_calls" not in message


def _continued(prompt: str, begun: TemplateMessage) -> str:
    """Return a prompt that ends in the text of a message which the model is to continue."""
    text, reasoning = str(begun["content"]), str(begun.get("reasoning_content", ""))
    if prompt.rstrip().endswith(THINK):
        if reasoning and not text:
            return prompt + reasoning
        return f"{prompt}{reasoning}\n{END_OF_THINK}\n\n{text}"
    return prompt + text
