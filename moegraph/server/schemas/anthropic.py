"""What clients of Anthropic's Messages interface may send."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .fields import Body, Object, Sampled, Schema, Stops, Texts, contents, seen_as
from .limits import LIMITS


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


Block = Text | ThinkingBlock | ToolUse | ToolResult


class MessageParam(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Texts, contents(str | list[Block])]


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

    model: str = ""
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


class MessagesBody(CountBody, Sampled):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Stops = None
    stream: bool | None = None
