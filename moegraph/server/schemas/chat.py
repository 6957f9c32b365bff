"""The body of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ...engine.chat import ChatRequest
from ..body import json_depth
from ..errors import ApiError
from ..limits import LIMITS
from ..thinking import template_variables
from .fields import MAX_TOKENS, Body, Defaults, Sampled, Streamed, wrong
from .formats import Formatted, Schema


def _text(value: object) -> object:
    """Return the text of a content: a string, or the joined texts of its parts."""
    if not isinstance(value, list):
        return value
    return "".join(_part_text(part, i) for i, part in enumerate(value))


def _part_text(part: object, index: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong(f"part {index} is no object with a type")
    kind, text = part["type"], part.get("text", part.get("refusal"))
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise wrong(f"part {index} is no text, and this model reads only text")
    if not isinstance(text, str):
        raise wrong(f"part {index} has no text")
    return text


Text = Annotated[str | None, BeforeValidator(_text)]


def _arguments(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class CalledFunction(Body):
    """The function of a call, and its arguments as JSON text."""

    name: str
    arguments: Annotated[str, BeforeValidator(_arguments)] = "{}"


class ToolCall(Body):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in OpenAI's form, without empty fields."""
        found = self.model_dump(exclude_none=True, exclude={"reasoning"})
        if self.reasoning_content is None and self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if not self.tool_calls:
            found.setdefault("content", "")
            found.pop("tool_calls", None)
        return found


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Schema | None = None


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


def _chosen(value: object) -> object:
    """Return "auto", "none", "required", or the name of the function that must be called."""
    if value is None or value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return {"name": name}
    raise wrong("expected auto, none, required, or an object that names a function")


def _few(value: dict[str, Any]) -> dict[str, Any]:
    if json_depth(value) > LIMITS.depth:
        raise wrong(f"it is nested more than {LIMITS.depth} deep")
    return value


Messages = Annotated[list[Message], Field(min_length=1, max_length=LIMITS.messages)]
Tools = Annotated[list[Tool], Field(max_length=LIMITS.tools)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Variables = Annotated[dict[str, Any], AfterValidator(_few)]


class ChatBody(Sampled, Formatted, Streamed):
    """A conversation and how it goes on."""

    messages: Messages
    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=LIMITS.choices)
    max_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    n_predict: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=LIMITS.top_logprobs)
    tools: Tools | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | dict[str, str] | None, BeforeValidator(_chosen)
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_few)] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None

    @property
    def n_choices(self) -> int:
        """Return how many answers are wanted."""
        return self.n or 1

    @property
    def n_logprobs(self) -> int | None:
        """Return how many likely tokens are listed beside each token; None: no probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400, "top_logprobs needs logprobs: true", param="top_logprobs",
                code="invalid_value",
            )  # fmt: skip
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self, default: int | None) -> int | None:
        """Return the most tokens of an answer; None: until the context is full."""
        given = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        asked = next((n for n in given if n is not None), None)
        return default if asked is None else None if asked < 0 else asked

    def choice_of_tool(self) -> str:
        """Return what `ChatRequest.tool_choice` takes.

        Raises:
            ApiError: it names a function that is not among the tools.
        """
        chosen, names = self.tool_choice, {tool.function.name for tool in self.tools or ()}
        name = chosen["name"] if isinstance(chosen, Mapping) else chosen or "auto"
        if (isinstance(chosen, Mapping) and name not in names) or (
            name == "required" and not names
        ):
            raise ApiError(
                400, "tool_choice asks for a tool that is not among tools",
                param="tool_choice", code="invalid_value",
            )  # fmt: skip
        return name

    def chat(self, defaults: Defaults, name: str) -> ChatRequest:
        """Return the request of one answer; name: for logs."""
        return ChatRequest(
            messages=[message.plain() for message in self.messages],
            sampling=self.sampling(defaults.sampling),
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            tool_choice=self.choice_of_tool(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            format=self.format(),
            variables={
                **defaults.variables,
                **template_variables(self.reasoning_effort, self.chat_template_kwargs),
            },
            max_tokens=self.limit(defaults.max_tokens),
            stop=self.stops,
            ignore_eos=self.ignores_eos(defaults),
            reuse=self.cache_prompt is not False,
            n_logprobs=self.n_logprobs,
            deadline_s=defaults.deadline_s,
            name=name,
        )
