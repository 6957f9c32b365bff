"""/v1/messages: blocks to messages, and parts of answers to blocks and events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NoReturn
from uuid import uuid4

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import ChatRequest, Format
from ..loop.requests import Step, Usage
from ..text.chat.parts import CallArguments, CallBegin, CallEnd, Part, ReasoningPart, call_of
from .answers import Update
from .errors import TEXT_SCHEMA, ApiError, object_schema
from .exchange import Exchange, PromptProgress, respond
from .logs import note_usage, request_id
from .replies import EVENTS, named, reply
from .schemas import (
    LIMITS,
    Asking,
    Body,
    Defaults,
    Object,
    Schema,
    Stops,
    Texts,
    contents,
    kind_of,
    picture_part,
    read,
    refuse,
    seen_as,
    text_parts,
)
from .state import Operation, RouteTable, read_schema, state_of


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ToolUse(Body):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Object


class DocumentSource(Body):
    """Where a document is: here, as plain text, or where this server does not look."""

    type: str
    data: str = ""


class Document(Body):
    """A document that a client has attached."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResult(Body):
    """A text that a client has found, with its source."""

    type: Literal["search_result"]
    title: str
    source: str
    content: list[Annotated[Object, seen_as(TextBlock)]]


Text = TextBlock | SearchResult | Document


class ToolResult(Body):
    """What a tool has answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Texts, contents(str | list[Text])] = ""
    is_error: bool | None = None


class MessageParam(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Texts, contents(str | list[Text | ThinkingBlock | ToolUse | ToolResult])]


class Tool(Body):
    """A tool of the client; input_schema: a JSON schema."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: Schema | None = None


class ToolChoice(Body):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons before it answers, and whether the client sees it."""

    type: str
    display: str | None = None


class OutputFormat(Body):
    """What the answer's text must be."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Body):
    """How the answer is made."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[
        list[Annotated[Object, seen_as(MessageParam)]],
        Field(min_length=1, max_length=LIMITS.messages),
    ]
    system: Annotated[Texts, contents(str | list[Text])] | None = None
    tools: (
        Annotated[list[Annotated[Object, seen_as(Tool)]], Field(max_length=LIMITS.tools)] | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody, Asking):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Stops = None


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


ANTHROPIC_ERROR = object_schema(
    type={"const": "error"}, error=object_schema(type=TEXT_SCHEMA, message=TEXT_SCHEMA)
)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the error object of Anthropic's interface."""
    kind, text = _KINDS.get(error.status, "invalid_request_error"), error.message
    if error.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"  # agents look for these words to shorten a chat
    return {"type": "error", "error": {"type": kind, "message": text}}


Block = Mapping[str, Any]
Message = dict[str, Any]

# Reasoning that only Anthropic can read.
_OPAQUE = ("redacted_thinking",)


def read_message(value: Block, where: str) -> list[Message]:
    """Return the messages that one message stands for: each result of a tool is one of its own."""
    message = read(MessageParam, value, where)
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = [(block, f"{where}.content[{at}]") for at, block in enumerate(message.content)]
    if message.role == "assistant":
        return [_answer(blocks)]
    return _question(message.role, blocks)


def _answer(blocks: Sequence[tuple[Block, str]]) -> Message:
    found: Message = {"role": "assistant", "content": ""}
    for block, where in blocks:
        kind = kind_of(block)
        if kind == "text":
            found["content"] += read(TextBlock, block, where).text
        elif kind == "thinking":
            thinking = read(ThinkingBlock, block, where).thinking
            found["reasoning_content"] = found.get("reasoning_content", "") + thinking
        elif kind == "tool_use":
            use = read(ToolUse, block, where)
            call = call_of(use.id, use.name, json.dumps(use.input, ensure_ascii=False))
            found.setdefault("tool_calls", []).append(call)
        elif kind not in _OPAQUE:
            _refuse_block(kind, where)
    return found


def _question(role: str, blocks: Sequence[tuple[Block, str]]) -> list[Message]:
    """Return results of tools and texts in their order; neighbouring texts are one message.

    The template joins its parts.
    """
    found: list[Message] = []
    texts: list[str | Object] = []

    def close() -> None:
        if texts:
            found.append({"role": role, "content": text_parts(texts)})
            texts.clear()

    for block, where in blocks:
        if kind_of(block) == "tool_result":
            close()
            found.append(_result(read(ToolResult, block, where), where))
        else:
            texts.append(_part(block, where))
    close()
    return found


def _result(result: ToolResult, where: str) -> Message:
    content = result.content
    if isinstance(content, str):
        parts: list[str | Object] = [content]
    else:
        parts = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    if result.is_error:
        head = parts.pop(0) if parts and isinstance(parts[0], str) else ""
        parts.insert(0, f"Error: {head}")
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": text_parts(parts)}


def _part(block: Block, where: str) -> str | Object:
    """Return the text of a block, where no plain text ends its line, or a picture."""
    if kind_of(block) == "image":
        source = block.get("source")
        if not isinstance(source, Mapping) or source.get("type") != "base64":
            refuse(f"{where}.source", "no address is fetched; send the picture as base64")
        return picture_part(f"data:{source.get('media_type')};base64,{source.get('data')}")
    return _text(block, where) + ("" if kind_of(block) == "text" else "\n")


def _text(block: Block, where: str) -> str:
    """Return the text of a block that a user, a tool or a system prompt may have."""
    kind = kind_of(block)
    if kind == "text":
        return read(TextBlock, block, where).text
    if kind == "search_result":
        result = read(SearchResult, block, where)
        parts = [_text(part, f"{where}.content[{at}]") for at, part in enumerate(result.content)]
        return _joined([f"{result.title} ({result.source})", *parts])
    if kind == "document":
        document = read(Document, block, where)
        if document.source.type != "text":
            refuse(f"{where}.source.type", "this server reads only documents of plain text")
        head = [line for line in (document.title, document.context) if line]
        return _joined([*head, document.source.data])
    _refuse_block(kind, where)


def _refuse_block(kind: object, where: str) -> NoReturn:
    refuse(f"{where}.type", f"blocks of type {kind!r:.80} are not supported here")


def _joined(texts: Sequence[str]) -> str:
    """Return texts as one, each from a line of its own."""
    found = ""
    for text in texts:
        found += ("\n" if found and not found.endswith("\n") else "") + text
    return found


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_request(body: CountBody, defaults: Defaults) -> ChatRequest:
    """Return what a request asks for; one that only counts has no limit of tokens.

    In this interface a model reasons only if it is asked to.
    """
    tools = [_tool(value, f"tools[{at}]") for at, value in enumerate(body.tools or ())]
    thinks = {"enable_thinking": body.thinking.type != "disabled"} if body.thinking else {}
    chat = ChatRequest(
        messages=_messages(body),
        tools=tools,
        tool_choice=_choice(body.tool_choice, tools),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        format=_format(body),
        variables={"enable_thinking": False, **defaults.variables, **thinks},
    )
    if not isinstance(body, MessagesBody):
        return chat
    return replace(
        chat,
        **body.drawn(defaults) | {"stop": (*(body.stop_sequences or ()), *(body.stop or ()))},
        max_tokens=body.max_tokens,
    )


def shows_thinking(thinking: Thinking | None) -> bool:
    """Return whether the client wants to see the reasoning."""
    return thinking is None or thinking.display != "omitted"


def _messages(body: CountBody) -> list[dict[str, Any]]:
    system = body.system or ""
    if not isinstance(system, str):
        system = _joined([_text(block, f"system[{at}]") for at, block in enumerate(system)])
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for at, value in enumerate(body.messages):
        found += read_message(value, f"messages[{at}]")
    return found


def _tool(value: dict[str, Any], where: str) -> dict[str, Any]:
    tool = read(Tool, value, where)
    if tool.type not in (None, "custom"):
        refuse(
            f"{where}.type", f"tools of type {tool.type[:80]!a} are Anthropic's; define your own"
        )
    if tool.input_schema is None:
        refuse(f"{where}.input_schema", "this field is required")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None, tools: Sequence[dict[str, Any]]) -> str:
    if choice is None:
        return "auto"
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name not in {tool["function"]["name"] for tool in tools}:
        refuse("tool_choice.name", "the request has no tool of this name")
    return choice.name or ""


def _format(body: CountBody) -> Format | None:
    asked = body.output_config.format if body.output_config else None
    return Format("json_schema", asked.schema_) if asked else None


Event = dict[str, Any]

# Clients send it back beside the reasoning; it proves nothing here, but must not be empty.
SIGNATURE = "moegraph"
# Kind of block -> the kind of its deltas, and the field of both that has the text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass
class _Block:
    """A block that grows; head: its fields that do not change."""

    head: dict[str, Any]
    text: str = ""

    @property
    def kind(self) -> str:
        return str(self.head["type"])

    def json(self, is_new: bool = False) -> dict[str, Any]:
        """Return the block as it is now; is_new: as it is announced, with nothing in it yet."""
        if self.kind == "tool_use":
            return {**self.head, "input": {} if is_new else _call_input(self.text)}
        if self.kind == "thinking":
            return {
                **self.head, "thinking": self.text, "signature": "" if is_new else SIGNATURE,
            }  # fmt: skip
        return {**self.head, "text": self.text}


class MessageWriter:
    """Makes one message: `start`, then `take` for each step's parts, then `finish`.

    Each returns the events that a stream shows; `message` is the object as it is.
    """

    def __init__(self, model: str, max_tokens: int, *, shows_thinking: bool = True) -> None:
        """max_tokens: of the request. shows_thinking: else blocks of reasoning stay empty."""
        self._head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
        self._head["model"] = model
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._blocks: list[_Block] = []
        self._is_open = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage = _usage(Usage(0))

    def message(self) -> dict[str, Any]:
        """Return the message as it is now."""
        blocks = [block.json() for block in self._blocks]
        return {**self._head, "content": blocks, **self._stop, "usage": self._usage}

    def start(self, usage: Usage) -> list[Event]:
        """Return the events that come before the answer."""
        self._usage = _usage(usage)
        return [{"type": "message_start", "message": self.message()}]

    def take(self, parts: Iterable[Part]) -> list[Event]:
        """Take the parts of a step."""
        return [event for part in parts for event in self._part(part)]

    def finish(self, last: Step) -> list[Event]:
        """End the message with the last step; its parts have been taken."""
        events = self._close()
        self._usage = _usage(last.usage)
        self._stop = {"stop_reason": self._reason(last), "stop_sequence": last.stop}
        delta = {"type": "message_delta", "delta": self._stop, "usage": self._usage}
        return [*events, delta, {"type": "message_stop"}]

    def _reason(self, last: Step) -> str:
        if last.finish_reason == "length":
            # fewer tokens than it asked for: the context was full before
            full = last.usage.n_generated < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if last.finish_reason == "deadline":
            return "max_tokens"
        if last.stop is not None:
            return "stop_sequence"
        has_calls = any(block.kind == "tool_use" for block in self._blocks)
        return "tool_use" if has_calls else "end_turn"

    def _part(self, part: Part) -> list[Event]:
        if isinstance(part, CallEnd):
            return self._close()
        if isinstance(part, CallBegin):
            return self._begin({"type": "tool_use", "id": part.id, "name": part.name})
        if isinstance(part, CallArguments):
            return self._grow(part.text)
        kind = "thinking" if isinstance(part, ReasoningPart) else "text"
        events = []
        if not self._is_open or self._blocks[-1].kind != kind:
            events = self._begin({"type": kind})
        if kind == "thinking" and not self._shows_thinking:
            return events
        return events + self._grow(part.text)

    def _begin(self, head: dict[str, Any]) -> list[Event]:
        events = self._close()
        block = _Block(head)
        self._blocks.append(block)
        self._is_open = True
        start = {
            "type": "content_block_start",
            "index": self._at,
            "content_block": block.json(is_new=True),
        }
        return [*events, start]

    def _grow(self, text: str) -> list[Event]:
        block = self._blocks[-1]
        block.text += text
        kind, field = _DELTAS[block.kind]
        return [self._delta({"type": kind, field: text})]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        events = []
        if self._blocks[-1].kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        return [*events, {"type": "content_block_stop", "index": self._at}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._at, "delta": delta}

    @property
    def _at(self) -> int:
        return len(self._blocks) - 1


def _usage(usage: Usage) -> dict[str, Any]:
    """Return what a message has cost; as there, input_tokens leaves out what was cached."""
    return {
        "input_tokens": usage.n_prompt - usage.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.n_cached,
        "output_tokens": usage.n_generated,
    }


def _call_input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that was cut short, none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(kw_only=True)
class _Run(Exchange):
    """One message in the making."""

    body: MessagesBody

    def __post_init__(self) -> None:
        self.writer = MessageWriter(
            self.loaded.facts.name, self.body.max_tokens,
            shows_thinking=shows_thinking(self.body.thinking),
        )  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        async for update in self.answers:
            self._take(update)
        return {**self.writer.message(), **self.report()}

    def _take(self, update: Update) -> list[Event]:
        events = self.writer.take(update.parts)
        if update.is_last:
            note_usage(self.http, update.step.usage, update.step.finish_reason)
            events += self.writer.finish(update.step)
        return events

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the events; the first waits for the first step, which knows what was cached."""
        has_begun, progress = False, PromptProgress()
        async for update in self.answers:
            events = [] if has_begun else self.writer.start(update.step.usage)
            has_begun = True
            events += self._take(update)
            if frames := [*map(named, events), *progress.frames(update)]:
                yield b"".join(frames)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [named(anthropic_body(error))]


async def create(request: HttpRequest) -> Response:
    """Make a message, at once or as it is written."""
    body = await read_schema(request, MessagesBody)
    chat = read_request(body, state_of(request).find(body.model).defaults)
    # the header in which Anthropic's clients look for the request's id
    headers = {"request-id": request_id(request)}
    return await respond(request, _Run, body, lambda _: [chat], headers=headers)


async def count(request: HttpRequest) -> Response:
    """Return how many tokens the prompt of a message would have."""
    body = await read_schema(request, CountBody)
    n_tokens = await state_of(request).count(body.model, partial(read_request, body))
    return reply({"input_tokens": n_tokens})


TABLE = RouteTable(
    [
        Operation("/v1/messages", create, MessagesBody, streams=EVENTS),
        Operation("/v1/messages/count_tokens", count, CountBody),
    ],
    error_body=anthropic_body,
    error_schema=ANTHROPIC_ERROR,
    prefixes=("/v1/messages",),
)
