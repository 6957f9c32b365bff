"""A request of Anthropic's Messages interface, as a request of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...engine.chat import ChatRequest, Format
from ..schemas.anthropic import CountBody, MessagesBody, Thinking, Tool, ToolChoice
from ..schemas.fields import Defaults
from ..schemas.parts import read, refuse
from .blocks import read_message, system_text

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_request(body: CountBody, defaults: Defaults, name: str = "") -> ChatRequest:
    """Return what a request asks for; one that only counts has no limit of tokens.

    In this interface a model reasons only if it is asked to. name: for logs.

    Raises:
        ApiError: something in it is malformed or not supported.
    """
    tools = [_tool(value, f"tools[{at}]") for at, value in enumerate(body.tools or ())]
    chat = ChatRequest(
        messages=_messages(body),
        sampling=defaults.sampling,
        tools=tools,
        tool_choice=_choice(body.tool_choice, tools),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        format=_format(body),
        variables={"enable_thinking": False, **defaults.variables, **_variables(body.thinking)},
        deadline_s=defaults.deadline_s,
        name=name,
    )
    if not isinstance(body, MessagesBody):
        return chat
    return replace(
        chat,
        sampling=body.sampling(defaults.sampling),
        max_tokens=body.max_tokens,
        stop=(*(body.stop_sequences or ()), *body.stops),
        ignore_eos=body.ignores_eos(defaults),
    )


def _variables(thinking: Thinking | None) -> dict[str, Any]:
    """Return whether the model reasons, as a variable of the template; nothing if not said."""
    return {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}


def shows_thinking(thinking: Thinking | None) -> bool:
    """Return whether the client wants to see the reasoning."""
    return thinking is None or thinking.display != "omitted"


def _messages(body: CountBody) -> list[dict[str, Any]]:
    system = system_text(body.system)
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
