"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import ChatRequest
from ..loop.requests import Step, TokenLogprobs
from ..text.chat.parts import CallArguments, CallBegin, CallEnd, ContentPart, ReasoningPart, Reply
from .answers import Update
from .exchange import Completion, chat_logprobs, finish_reason, respond
from .replies import EVENTS, reply
from .schemas import LIMITS, MAX_TOKENS, Body, CompletionBody, Defaults, Schema, refuse, wrong
from .state import RouteTable, operations, read_schema, state_of


def _content(value: object) -> object:
    """Return a content: a string, or parts, texts and pictures, which the template joins."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("expected a text, or a list of parts")
    return [_part(part, i) for i, part in enumerate(value)]


def _part(part: object, index: int) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong(f"part {index} is no object with a type")
    kind, text = part["type"], part.get("text", part.get("refusal"))
    if kind == "image_url":
        return part
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise wrong(f"part {index} is neither text nor a picture, and nothing else is read")
    if not isinstance(text, str):
        raise wrong(f"part {index} has no text")
    return {"type": "text", "text": text}


class TextPart(Body):
    """A part of a content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(_content, json_schema_input_type=str | list[TextPart] | None),
]


def _arguments(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class CalledFunction(Body):
    """The function of a call, and its arguments as JSON text."""

    name: str
    arguments: Annotated[
        str, BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any])
    ] = "{}"


class ToolCall(Body):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _asks(self) -> Message:
        if self.role == "user" and self.content is None:
            raise wrong("a message of the user needs content")
        return self

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


@dataclass(frozen=True)
class Allowed:
    """The functions that may be called. mode: auto, required, or None: the only one must be."""

    names: tuple[str, ...]
    mode: str | None = None


_CHOICE = "an object that names a function, or allowed_tools"


def _chosen(value: object) -> object:
    """Return a choice of tools: a word, or the functions that may be called."""
    if value is None or value in ("auto", "none", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "function":
        return Allowed((_named(value),))
    if isinstance(value, dict) and kind == "allowed_tools":
        given = value.get("allowed_tools")
        found = given if isinstance(given, dict) else {}
        tools, mode = found.get("tools"), found.get("mode", "auto")
        if isinstance(tools, list) and tools and mode in ("auto", "required"):
            return Allowed(tuple(map(_named, tools)), mode)
    raise wrong(f"expected auto, none, required, or {_CHOICE}")


def _named(tool: object) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise wrong(f"a tool has no name; expected {_CHOICE}")
    return name


def _no_number(value: object) -> object:
    if type(value) is int:  # 1 is True
        raise wrong("expected true, false, content or reasoning_content")
    return value


Messages = Annotated[list[Message], Field(min_length=1, max_length=LIMITS.messages)]
Tools = Annotated[list[Tool], Field(max_length=LIMITS.tools)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Continued = Annotated[
    Literal[True, False, "content", "reasoning_content"], BeforeValidator(_no_number)
]


class ChatBody(CompletionBody):
    """A conversation and how it goes on."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=LIMITS.top_logprobs)
    max_completion_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    tools: Tools | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | Allowed | None,
        BeforeValidator(
            _chosen,
            json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any] | None,
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    chat_template_kwargs: Schema | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Continued | None = None

    @property
    def n_logprobs(self) -> int | None:
        """Return how many likely tokens are listed beside each token; None: no probabilities."""
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "it needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def choice_of_tool(self) -> str:
        """Return what `ChatRequest.tool_choice` takes."""
        chosen, names = self.tool_choice, {tool.function.name for tool in self.tools or ()}
        wanted = chosen.names if isinstance(chosen, Allowed) else []
        if not names.issuperset(wanted) or (chosen == "required" and not names):
            refuse("tool_choice", "it asks for a tool that is not among tools")
        if isinstance(chosen, Allowed):
            return chosen.mode or chosen.names[0]
        return chosen or "auto"

    def _continues(self) -> bool | str | None:
        """Return what `ChatRequest.continue_final_message` takes."""
        asked, problem = self.continue_final_message, ""
        if asked and self.add_generation_prompt:
            problem = "not together with add_generation_prompt: true"
        elif asked is None and [m.role for m in self.messages[-2:]] == ["assistant"] * 2:
            problem = "the last two messages are the assistant's; say whether the last one goes on"
        if problem:
            refuse("continue_final_message", problem)
        return asked

    def _callable(self) -> list[dict[str, Any]]:
        chosen, tools = self.tool_choice, self.tools or ()
        if isinstance(chosen, Allowed) and chosen.mode:
            tools = [tool for tool in tools if tool.function.name in chosen.names]
        return [tool.model_dump(exclude_none=True) for tool in tools]

    def texts(self, defaults: Defaults) -> list[ChatRequest]:
        """Return the request of each answer, as bodies of texts do."""
        return [self.chat(defaults)]

    def chat(self, defaults: Defaults) -> ChatRequest:
        """Return the request of one answer."""
        return ChatRequest(
            messages=[message.plain() for message in self.messages],
            tools=self._callable(),
            tool_choice=self.choice_of_tool(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            format=self.format(),
            variables=defaults.with_effort(self.reasoning_effort, self.chat_template_kwargs),
            reasoning=self.reasoning_format != "none",
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=self._continues(),
            echo=bool(self.echo),
            max_tokens=self.limit(defaults.max_tokens, self.max_completion_tokens),
            n_logprobs=self.n_logprobs,
            **self.drawn(defaults),
        )


@dataclass(kw_only=True)
class _Run(Completion):
    """One chat completion in the making."""

    body: ChatBody
    _called: set[int] = field(default_factory=set, init=False)

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    may_reason = True
    empty: ClassVar = {"delta": {}}

    def choice(self, index: int, reply: Reply, last: Step) -> dict[str, Any]:
        return {
            "index": index,
            "message": {**reply.message(), "refusal": None},
            "logprobs": self._logprobs(last.logprobs),
            "finish_reason": finish_reason(last, bool(reply.calls)),
        }

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(found, self.loaded.chat.tokenizer) if self.body.logprobs else None

    def first(self, index: int) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": None, "refusal": None}}

    def step(self, update: Update) -> tuple[list[dict[str, Any]], str | None]:
        """Return the chunks of a step; the first has the probabilities, the last ends a choice."""
        index = update.index
        chunks = []
        for part in update.parts:
            if isinstance(part, CallBegin):
                self._called.add(index)
            if not isinstance(part, CallEnd):
                chunks.append(self.chunk(index, {"delta": _delta(part)}))
        if self.body.logprobs and update.step.logprobs:
            chunks = chunks or [self.chunk(index, self.empty)]
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(update.step.logprobs)
        if chunks and self.body.timings_per_token:
            chunks[-1] |= {"timings": self.timings()}
        reason = finish_reason(update.step, index in self._called)
        if update.is_last:
            chunks.append(self.chunk(index, self.empty))
            chunks[-1]["choices"][0]["finish_reason"] = reason
            if not self.body.wants_usage:
                chunks[-1] |= {"timings": self.timings()}
        return chunks, reason


async def complete(request: HttpRequest) -> Response:
    """Answer a conversation, at once or as it is written."""
    body = await read_schema(request, ChatBody)
    return await respond(request, _Run, body, body.texts, body.n_choices)


def _delta(part: ContentPart | ReasoningPart | CallBegin | CallArguments) -> dict[str, Any]:
    if isinstance(part, ContentPart):
        return {"content": part.text}
    if isinstance(part, ReasoningPart):
        return {"reasoning_content": part.text}
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    else:
        call = {"index": part.index, "function": {"arguments": part.text}}
    return {"tool_calls": [call]}


async def count(request: HttpRequest) -> Response:
    """Return how many tokens the prompt of a conversation would have."""
    body = await read_schema(request, ChatBody)
    n_tokens = await state_of(request).count(body.model, body.chat)
    return reply({"object": "chat.completion.input_tokens", "input_tokens": n_tokens})


TABLE = RouteTable(
    [
        *operations("/v1/chat/completions", complete, ChatBody, streams=EVENTS),
        *operations("/v1/chat/completions/input_tokens", count, ChatBody),
    ]
)
