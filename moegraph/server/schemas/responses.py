"""What clients of OpenAI's Responses interface may send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .fields import Body, Object, Sampled, Schema, Texts, contents, seen_as
from .limits import LIMITS


class TextPart(Body):
    """Text of a message, or of a tool's output."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(Body):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


Part = TextPart | RefusalPart


class Message(Body):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Texts, contents(str | list[Part])]


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


Item = Message | FunctionCall | CustomCall | CallOutput | ReasoningItem | ItemReference


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


Tool = FunctionTool | CustomTool | NamespaceTool


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


class ResponsesBody(Sampled):
    """The body of POST /v1/responses."""

    model: str = ""
    input: Annotated[Texts, contents(str | list[Item])]
    instructions: str | None = None
    tools: (
        Annotated[list[Annotated[Object, seen_as(Tool)]], Field(max_length=LIMITS.tools)] | None
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
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
