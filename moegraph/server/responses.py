"""/v1/responses: items to messages, and parts of answers to items and events."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import ChatRequest, Format
from ..loop.requests import Step, Usage
from ..sampling import SamplingParams
from ..text.chat.parts import CallArguments, CallBegin, CallEnd, ContentPart, Part, ReasoningPart
from .answers import Update
from .errors import ApiError
from .exchange import Exchange, PromptProgress, chat_logprobs, respond
from .guards import owner_of
from .logs import note_usage
from .replies import EVENTS, named, reply
from .responsestore import Item, ResponseStore
from .schemas import (
    LIMITS,
    Asking,
    Body,
    Defaults,
    Object,
    Schema,
    Texts,
    contents,
    kind_of,
    picture_part,
    read,
    refuse,
    schema_format,
    seen_as,
    text_parts,
)
from .state import RouteTable, operations, read_schema, state_of


class TextPart(Body):
    """Text of a message, or of a tool's output."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(Body):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class Message(Body):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Texts, contents(str | list[TextPart | RefusalPart])]


class FunctionCall(Body):
    """A call of a function in an earlier answer; arguments: the text of a JSON object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCall(Body):
    """A call of a tool whose input is plain text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutput(Body):
    """What a tool has answered."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[Texts, contents(str | list[TextPart])]


class ReasoningItem(Body):
    """Reasoning of an earlier answer; content wins over the summary."""

    type: Literal["reasoning"]
    content: list[Annotated[Object, seen_as(TextPart)]] | None = None
    summary: list[Annotated[Object, seen_as(TextPart)]] | None = None


class ItemReference(Body):
    """The id of an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class FunctionTool(Body):
    """A function that the model may call; parameters: a JSON schema."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class CustomTool(Body):
    """A tool whose input is plain text, perhaps of a grammar."""

    type: Literal["custom"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    format: Object | None = None


class NamespaceTool(Body):
    """Tools that share the first part of their name."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    tools: list[Annotated[Object, seen_as(FunctionTool | CustomTool)]]


AnyTool = FunctionTool | CustomTool | NamespaceTool


class ToolChoice(Body):
    """Which tool is called, or which tools may be called (type "allowed_tools")."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[Object] = Field(default_factory=list)


class TextFormat(Body):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    """How the answer's text is made."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """Whether and how the model reasons before it answers."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class ResponsesBody(Asking):
    """The body of POST /v1/responses."""

    input: Annotated[
        Texts,
        contents(
            str
            | list[Message | FunctionCall | CustomCall | CallOutput | ReasoningItem | ItemReference]
        ),
    ]
    instructions: str | None = None
    tools: (
        Annotated[
            list[Annotated[Object, seen_as(AnyTool)]],
            Field(max_length=LIMITS.tools),
        ]
        | None
    ) = None
    tool_choice: Annotated[
        Any, seen_as(Literal["auto", "none", "required"] | ToolChoice | None)
    ] = "auto"
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: int | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.top_logprobs)] | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    conversation: Any = None
    prompt: Object | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    background: bool | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None


Kind = Literal["function", "custom"]

# OpenAI runs such tools itself: requests are served as if they did not name them.
HOSTED = frozenset(
    """web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11 file_search
    code_interpreter image_generation mcp computer computer_use_preview local_shell shell
    apply_patch tool_search programmatic_tool_calling""".split()
)
# The only argument of the function that stands for a tool with plain text as its input.
INPUT = "input"
_JOINT = "__"
_CHOICE_WORDS = ("auto", "none", "required")


@dataclass(frozen=True)
class ToolName:
    """What a client calls a tool."""

    name: str
    namespace: str | None = None
    kind: Kind = "function"


@dataclass
class Tools:
    """The tools of one request.

    functions: in the form of chat completions. names: the function's name -> the client's. inputs:
    the function's name -> Lark grammar of its input.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, ToolName] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)

    def name(self, function: str) -> ToolName:
        """Return what the client calls a function; one it has not named keeps its name."""
        return self.names.get(function) or ToolName(function)

    def only(self, functions: set[str]) -> Tools:
        """Return the tools of these functions."""
        kept = [entry for entry in self.functions if entry["function"]["name"] in functions]
        inputs = {name: text for name, text in self.inputs.items() if name in functions}
        return Tools(kept, self.names, inputs)


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that stands for a client's tool."""
    if not namespace:
        return name
    return f"{namespace.removesuffix(_JOINT)}{_JOINT}{name}"


def read_tools(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the functions of a request; tools that OpenAI's servers would run are left out."""
    found = Tools()
    for at, tool in enumerate(tools):
        _read_tool(found, tool, f"tools[{at}]", None)
    return found


def _read_tool(found: Tools, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
    kind = kind_of(tool)
    if kind == "function":
        function = read(FunctionTool, tool, where)
        _add(found, _plain_function(function), ToolName(function.name, namespace), where)
    elif kind == "custom":
        custom = read(CustomTool, tool, where)
        name = ToolName(custom.name, namespace, "custom")
        _add(found, _custom_function(custom), name, where)
        if grammar := _grammar(custom, where):
            found.inputs[function_name(name.name, namespace)] = grammar
    elif kind == "namespace" and namespace is None:
        group = read(NamespaceTool, tool, where)
        for at, inner in enumerate(group.tools):
            _read_tool(found, inner, f"{where}.tools[{at}]", group.name)
    elif kind not in HOSTED:
        refuse(f"{where}.type", f"there is no type of tool named {kind!r:.80}")


def _add(found: Tools, function: dict[str, Any], name: ToolName, where: str) -> None:
    full = function_name(name.name, name.namespace)
    if full in found.names:
        refuse(where, f"two tools are named {full[:80]}")
    found.names[full] = name
    found.functions.append({"type": "function", "function": {"name": full, **function}})


def _plain_function(tool: FunctionTool) -> dict[str, Any]:
    made: dict[str, Any] = {"description": tool.description} if tool.description else {}
    made["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    if tool.strict is not None:
        made["strict"] = tool.strict
    return made


def _custom_function(tool: CustomTool) -> dict[str, Any]:
    """Return a function with the plain text as its only argument."""
    described = tool.description or ""
    shape = tool.format or {}
    if kind_of(shape) == "grammar":
        syntax, definition = shape.get("syntax", ""), shape.get("definition", "")
        described += f"\n\nThe input follows this {syntax} grammar:\n{definition}"
    text = {"type": "string", "description": "The whole input, as plain text."}
    return {
        "description": described.strip(),
        "parameters": {"type": "object", "properties": {INPUT: text}, "required": [INPUT]},
    }


def _grammar(tool: CustomTool, where: str) -> str | None:
    """Return the Lark grammar of a tool's input; None: any text."""
    shape = tool.format or {"type": "text"}
    kind, syntax, text = kind_of(shape), shape.get("syntax"), shape.get("definition")
    if kind == "text":
        return None
    if kind != "grammar" or syntax not in ("lark", "regex") or not isinstance(text, str):
        refuse(
            f"{where}.format", "not text, nor a grammar with syntax lark or regex and definition"
        )
    if syntax == "lark":
        return text
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", text, flags=re.DOTALL)
    return "start: /" + escaped.replace("\n", r"\n") + "/"


def read_choice(given: Any, tools: Tools) -> tuple[Tools, str]:
    """Return the tools that may be called, and the choice as a chat request has it."""
    if given in _CHOICE_WORDS:
        return tools, given
    choice = read(ToolChoice, given, "tool_choice")
    if choice.type != "allowed_tools":
        return tools, _chosen(choice, tools, "tool_choice")
    allowed = set()
    for at, entry in enumerate(choice.tools):
        if kind_of(entry) not in HOSTED:
            where = f"tool_choice.tools[{at}]"
            allowed.add(_chosen(read(ToolChoice, entry, where), tools, where))
    return tools.only(allowed), choice.mode


def _chosen(choice: ToolChoice, tools: Tools, where: str) -> str:
    named = function_name(choice.name or "", choice.namespace)
    if choice.type not in ("function", "custom") or named not in tools.names:
        refuse(where, f"the request has no tool {(named or choice.type)[:80]} to call")
    return named


# An answer reasons, speaks, then calls.
_REASONS, _SPEAKS, _CALLS = range(3)
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_MEDIA = ("input_image", "input_file", "input_audio", "computer_screenshot", "image_url")


class Conversation:
    """Messages of a chat, from items: what one answer consists of becomes one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        self._stage = _REASONS

    def add(self, item: Item, where: str) -> None:
        """Take the next item."""
        kind = kind_of(item) or ("message" if "role" in item else "")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "function_call":
            function = read(FunctionCall, item, where)
            self._call(function, function.arguments)
        elif kind == "custom_tool_call":
            custom = read(CustomCall, item, where)
            self._call(custom, json.dumps({INPUT: custom.input}, ensure_ascii=False))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, where)
        else:
            text = "images, files and audio" if kind in _MEDIA else f"items of type {kind!r:.80}"
            refuse(f"{where}.type", f"{text} are not supported")

    def _message(self, item: Item, where: str) -> None:
        message = read(Message, item, where)
        is_answer = message.role == "assistant"
        content = _contents(message.content, f"{where}.content", not is_answer)
        if not is_answer:
            self._answer = None
            self.messages.append({"role": message.role, "content": content})
            return
        self._assistant(_SPEAKS)["content"] += _plain_text(content)

    def _reasoning(self, item: Item, where: str) -> None:
        reasoning = read(ReasoningItem, item, where)
        parts = reasoning.content or reasoning.summary or []
        if text := _plain_text(_contents(parts, f"{where}.content")):
            answer = self._assistant(_REASONS)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _call(self, call: FunctionCall | CustomCall, arguments: str) -> None:
        name = function_name(call.name, call.namespace)
        calls = self._assistant(_CALLS).setdefault("tool_calls", [])
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call.call_id, "type": "function", "function": function})

    def _output(self, item: Item, where: str) -> None:
        output = read(CallOutput, item, where)
        content = _contents(output.output, f"{where}.output", True)
        self._answer = None
        self.messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})

    def _assistant(self, stage: int) -> dict[str, Any]:
        """Return the message of the answer; a new one if the last has gone on past this stage."""
        if self._answer is None or stage < self._stage:
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        self._stage = stage
        return self._answer


def _contents(content: str | Sequence[Any], where: str, may_show: bool = False) -> Texts:
    """Return a content as chat messages have it: a text, or parts that the template joins.

    may_show: pictures may be among them.
    """
    if isinstance(content, str):
        return content
    found: list[str | Object] = []
    for at, part in enumerate(content):
        kind = kind_of(part)
        if kind in _TEXTS:
            found.append(read(TextPart, part, f"{where}[{at}]").text)
        elif kind == "refusal":
            found.append(read(RefusalPart, part, f"{where}[{at}]").refusal)
        elif kind == "input_image" and may_show:
            found.append(picture_part(part.get("image_url")))
        elif kind in _MEDIA:
            refuse(f"{where}[{at}]", f"{kind}: this server reads text only")
        else:
            refuse(f"{where}[{at}].type", f"content of type {kind!r:.80} is not supported")
    return text_parts(found)


def _plain_text(content: Texts) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# What `include` must name for log probabilities to come.
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class ReadRequest:
    """A request that has been understood.

    chat: for the model. tools: their names for the way back. items: of the
    input, as a store keeps them.
    """

    chat: ChatRequest
    tools: Tools
    items: Sequence[Item]


def read_request(
    body: ResponsesBody, store: ResponseStore, owner: str, defaults: Defaults
) -> ReadRequest:
    """Return what a request asks for.

    store: has the responses before this one. owner: the client.
    """
    _refuse_unsupported(body)
    tools = read_tools(body.tools or ())
    allowed, choice = read_choice(body.tool_choice, tools)
    items = _input_items(body.input, partial(store.item, owner))
    conversation = Conversation()
    if body.instructions:
        conversation.messages.append({"role": "system", "content": body.instructions})
    if body.previous_response_id:
        for item in store.items(owner, body.previous_response_id):
            conversation.add(item, "previous_response_id")
    for at, item in enumerate(items):
        conversation.add(item, f"input[{at}]")
    chat = ChatRequest(
        messages=conversation.messages,
        tools=allowed.functions,
        inputs=allowed.inputs,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=_format(body.text.format if body.text else None),
        variables=defaults.with_effort(body.reasoning.effort if body.reasoning else None),
        max_tokens=body.max_output_tokens or defaults.max_tokens,
        n_logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        **body.drawn(defaults),
    )
    return ReadRequest(chat, tools, items)


def _input_items(given: str | list[Item], find: Callable[[str], Item | None]) -> list[Item]:
    """Return the items of an input, those of the store in place of references to them."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if len(given) > LIMITS.messages:
        refuse("input", f"{len(given)} items; at most {LIMITS.messages} are read")
    return [_referenced(item, find, f"input[{at}]") for at, item in enumerate(given)]


def _referenced(item: Item, find: Callable[[str], Item | None], where: str) -> Item:
    # a reference may leave its type out: it then has an id and nothing else
    if item.get("type") != "item_reference" and item.keys() != {"id"}:
        return item
    reference = read(ItemReference, item, where)
    found = find(reference.id)
    if found is None:
        refuse(f"{where}.id", f"there is no item {reference.id[:80]!a}; send the item itself")
    return found


def _refuse_unsupported(body: ResponsesBody) -> None:
    if body.background:
        refuse("background", "responses in the background are not supported; use stream")
    if body.conversation is not None:
        refuse("conversation", "conversations are not kept; use previous_response_id")
    if body.prompt is not None:
        refuse("prompt", "stored prompts are not supported; send instructions and input")


def _format(asked: TextFormat | None) -> Format | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Format("json_object")
    if asked.schema_ is None:
        refuse("text.format.schema", "this field is required")
    return schema_format(asked.schema_, asked.strict is True)


def response_fields(
    body: ResponsesBody, sampling: SamplingParams, model: str, created_at: int
) -> dict[str, Any]:
    """Return the fields that do not change while the response is made.

    sampling: that the answer is drawn with. created_at: seconds since the epoch.
    """
    given = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {
        "created_at": created_at,
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **(given.get("reasoning") or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **(given.get("text") or {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [_tool_field(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        # a prompt that is too long is refused; nothing is ever left out of it
        "truncation": "disabled",
        "user": body.user,
    }


def _tool_field(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}


# An event: its fields, but not yet its number.
Event = dict[str, Any]
Logprobs = Sequence[dict[str, Any]]


@dataclass
class _OutputItem:
    """An item that grows: `begin`, then `grow` as text comes, then `end`.

    at: its place in the output. head: its fields that do not change, such as its type: message,
    reasoning (of which a summary is never made), function_call (whose text is a JSON object) or
    custom_tool_call (whose plain text is known when it has ended). status: as OpenAI has it.
    """

    at: int
    head: dict[str, Any]
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def kind(self) -> str:
        return str(self.head["type"])

    def json(self) -> dict[str, Any]:
        own: dict[str, Any]
        if self.kind == "function_call":
            own = {"arguments": self.text}
        elif self.kind == "custom_tool_call":
            own = {"input": "" if self.status == "in_progress" else plain_input(self.text)}
        else:
            own = {"content": [self._part()] if self.text else []}
        return {**self.head, **own, "status": self.status}

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        made = {"type": "output_text", "text": self.text, "annotations": []}
        return {**made, "logprobs": self.logprobs}

    def begin(self) -> list[Event]:
        events = [self._event("output_item.added", item=self.json())]
        if self.kind in ("message", "reasoning"):
            events.append(self._content("content_part.added", part=self._part()))
        return events

    def grow(self, text: str, logprobs: Logprobs = ()) -> list[Event]:
        self.text += text
        if self.kind == "custom_tool_call":
            return []
        if self.kind == "function_call":
            return [self._event("function_call_arguments.delta", delta=text)]
        if self.kind == "reasoning":
            return [self._content("reasoning_text.delta", delta=text)]
        self.logprobs += logprobs
        return [self._content("output_text.delta", delta=text, logprobs=list(logprobs))]

    def end(self, status: str) -> list[Event]:
        self.status = status
        if self.kind == "function_call":
            name = self.head["name"]
            done = "function_call_arguments.done"
            events = [self._event(done, name=name, arguments=self.text)]
        elif self.kind == "custom_tool_call":
            text, kind = plain_input(self.text), "custom_tool_call_input"
            events = [
                self._event(f"{kind}.delta", delta=text), self._event(f"{kind}.done", input=text),
            ]  # fmt: skip
        else:
            part = self._part()
            more = {"logprobs": self.logprobs} if self.kind == "message" else {}
            events = [
                self._content(f"{part['type']}.done", text=self.text, **more),
                self._content("content_part.done", part=part),
            ]
        return [*events, self._event("output_item.done", item=self.json())]

    def _content(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        own = {} if "item" in fields else {"item_id": self.head["id"]}
        return {"type": f"response.{kind}", "output_index": self.at, **own, **fields}


def plain_input(arguments: str) -> str:
    """Return the plain text in a function's arguments; what is no such object stays as it is."""
    try:
        found = json.loads(arguments)[INPUT]
    except (ValueError, KeyError, TypeError):
        return arguments
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def new_id(kind: str) -> str:
    """Return an id that cannot be guessed: knowing it is enough to get a response."""
    return f"{kind}_{uuid4().hex}"


_MESSAGE = {"type": "message", "role": "assistant"}
_REASONING: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}


def _call_head(call: CallBegin, name: ToolName) -> dict[str, Any]:
    prefix, kind = "fc", "function_call"
    if name.kind == "custom":
        prefix, kind = "ctc", "custom_tool_call"
    head = {"id": new_id(prefix), "type": kind, "call_id": call.id, "name": name.name}
    return {**head, "namespace": name.namespace} if name.namespace else head


# Status of an error -> its code in a response object; others are the server's.
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseWriter:
    """Makes one response: `start`, then `take` for each step's parts, then `finish`.

    Each returns the events that a stream shows; `response` is the object as it is.
    """

    def __init__(self, fields: Mapping[str, Any], tools: Tools, response_id: str) -> None:
        """fields: of the response object that do not change: model, created_at, tools, ..."""
        self._fields = dict(fields)
        self._tools = tools
        self._id = response_id
        self._numbers = itertools.count()
        self._items: list[_OutputItem] = []
        self._open: _OutputItem | None = None
        self._held: list[dict[str, Any]] = []
        self._ended: dict[str, Any] = {"status": "in_progress"}

    def response(self) -> dict[str, Any]:
        """Return the response object as it is now."""
        empty = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        made = {"id": self._id, "object": "response", **self._fields, **empty, **self._ended}
        return {**made, "output": [item.json() for item in self._items]}

    def start(self) -> list[Event]:
        """Return the events that come before the answer."""
        return self._numbered(
            {"type": f"response.{name}", "response": self.response()}
            for name in ("created", "in_progress")
        )

    def progress(self, found: Mapping[str, Any]) -> Event:
        """Return an event, in llama-server's form, that tells how far the prompt is read."""
        event = {"type": "response.in_progress", "response": self.response()}
        return self._numbered([{**event, "prompt_progress": found}])[0]

    def take(self, parts: Sequence[Part], logprobs: Logprobs = ()) -> list[Event]:
        """Take the parts of a step; logprobs: of its tokens, if the client wants them.

        Those of tokens whose text is held back are told with the text that comes of them.
        """
        events: list[Event] = []
        held = [*self._held, *logprobs]
        for part in parts:
            events += self._part(part, held)
            held = [] if isinstance(part, ContentPart) or not held else list(logprobs)
        self._held = [] if parts else held
        return self._numbered(events)

    def finish(self, last: Step, completed_at: int, n_reasoning: int = 0) -> list[Event]:
        """End the response with the last step; its parts have been taken.

        completed_at: seconds since the epoch. n_reasoning: tokens of reasoning.
        """
        self._ended["usage"] = _usage(last.usage, n_reasoning)
        if last.finish_reason == "stop":
            self._ended["completed_at"] = completed_at
            return self._end("completed", "completed", [])
        self._ended["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._end("incomplete", "incomplete", [])

    def fail(self, error: ApiError) -> list[Event]:
        """End the response with an error; clients read it in the stream's last events."""
        message = {"code": error.code or error.kind, "message": error.message}
        # the names that clients know are few; what programs compare is in the event
        self._ended["error"] = {**message, "code": _FAILURES.get(error.status, "server_error")}
        return self._end("failed", "incomplete", [{"type": "error", **message, "param": None}])

    def _end(self, status: str, item_status: str, notices: list[Event]) -> list[Event]:
        events = self._close(item_status) + notices
        self._ended["status"] = status
        last = {"type": f"response.{status}", "response": self.response()}
        return self._numbered([*events, last])

    def _part(self, part: Part, logprobs: Logprobs) -> list[Event]:
        if isinstance(part, CallEnd):
            return self._close("completed" if part.is_whole else "incomplete")
        if isinstance(part, CallBegin):
            return self._begin(_call_head(part, self._tools.name(part.name)))
        if isinstance(part, CallArguments):
            return self._open.grow(part.text) if self._open else []
        is_reasoning, events = isinstance(part, ReasoningPart), list[Event]()
        head = _REASONING if is_reasoning else _MESSAGE
        if self._open is None or self._open.kind != head["type"]:
            events = self._begin({"id": new_id("rs" if is_reasoning else "msg"), **head})
        return events + self._items[-1].grow(part.text, logprobs)

    def _begin(self, head: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self._open = _OutputItem(len(self._items), head)
        self._items.append(self._open)
        return events + self._open.begin()

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        return item.end(status) if item else []

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        return [{**event, "sequence_number": next(self._numbers)} for event in events]


def _usage(usage: Usage, n_reasoning: int) -> dict[str, Any]:
    """Return what a response has cost; nothing is written to a cache that is paid for."""
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
        "output_tokens": usage.n_generated,
        "output_tokens_details": {"reasoning_tokens": n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_generated,
    }


@dataclass(kw_only=True)
class _Run(Exchange):
    """One response in the making."""

    read: ReadRequest
    body: ResponsesBody

    def __post_init__(self) -> None:
        name, sampling = self.loaded.facts.name, self.read.chat.sampling
        fields = response_fields(self.body, sampling, name, int(time.time()))
        self.writer = ResponseWriter(fields, self.read.tools, new_id("resp"))

    def _take(self, update: Update) -> list[Event]:
        """Return the events of a step; the last one stores the response."""
        logprobs = chat_logprobs(update.step.logprobs, self.loaded.chat.tokenizer)["content"]
        events = self.writer.take(update.parts, logprobs)
        if update.is_last:
            events += self.writer.finish(update.step, int(time.time()), self.answers.n_reasoning)
            note_usage(self.http, update.step.usage, update.step.finish_reason)
            if self.body.store is not False:
                stores = state_of(self.http).responses
                stores.put(owner_of(self.http), self.writer.response(), self.read.items)
        return events

    async def whole(self) -> dict[str, Any]:
        async for update in self.answers:
            self._take(update)
        return {**self.writer.response(), **self.costs()}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        for one in self.writer.start():
            yield named(one)
        progress = PromptProgress(self._progress if self.body.return_progress else None)
        async for update in self.answers:
            frames = progress.frames(update)
            events = self._take(update)
            if events and (update.is_last or self.body.timings_per_token):
                events[-1] = {**events[-1], "timings": self.timings()}
            if frames := [*frames, *map(named, events)]:
                yield b"".join(frames)

    def _progress(self, _: int, found: dict[str, Any]) -> bytes:
        return named(self.writer.progress(found))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return map(named, self.writer.fail(error))


def _read(request: HttpRequest, body: ResponsesBody, defaults: Defaults) -> ReadRequest:
    return read_request(body, state_of(request).responses, owner_of(request), defaults)


async def create(request: HttpRequest) -> Response:
    """Make a response, at once or as it is written."""
    body = await read_schema(request, ResponsesBody)
    read = _read(request, body, state_of(request).find(body.model).defaults)
    return await respond(request, _Run, body, lambda _: [read.chat], read=read)


async def count(request: HttpRequest) -> Response:
    """Return how many tokens the prompt of a response would have."""
    body = await read_schema(request, ResponsesBody)
    n_tokens = await state_of(request).count(body.model, lambda d: _read(request, body, d).chat)
    return reply({"object": "response.input_tokens", "input_tokens": n_tokens})


async def retrieve(request: HttpRequest) -> Response:
    """Return a response that is stored."""
    stored = state_of(request).responses
    return reply(stored.response(owner_of(request), request.path_params["id"]))


async def delete(request: HttpRequest) -> Response:
    """Forget a response."""
    response_id = request.path_params["id"]
    state_of(request).responses.delete(owner_of(request), response_id)
    return reply({"id": response_id, "object": "response", "deleted": True})


TABLE = RouteTable(
    [
        *operations("/v1/responses", create, ResponsesBody, streams=EVENTS),
        *operations("/v1/responses/input_tokens", count, ResponsesBody),
        *operations("/v1/responses/{id}", retrieve),
        *operations("/v1/responses/{id}", delete, method="DELETE"),
    ]
)
