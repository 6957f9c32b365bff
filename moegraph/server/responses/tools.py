"""Tools of the Responses interface, as functions of a chat, and the way back from their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..schemas.parts import kind_of, read, refuse
from ..schemas.responses import CustomTool, FunctionTool, NamespaceTool, ToolChoice

Kind = Literal["function", "custom"]

# Whoever runs such a tool is not here: its requests are served as if it had not been named.
HOSTED = frozenset(
    """web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11 file_search
    code_interpreter image_generation mcp computer computer_use_preview local_shell shell
    apply_patch tool_search programmatic_tool_calling""".split()
)
# The only argument of the function that stands for a tool with plain text as its input.
INPUT = "input"
_JOINT = "__"
_CHOICES = ("auto", "none", "required")


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
    """Return the functions of a request; tools that OpenAI's servers would run are left out.

    Raises:
        ApiError: a type of tool that is not known, or two functions with one name.
    """
    found = Tools()
    for at, tool in enumerate(tools):
        _read_tool(found, tool, f"tools[{at}]", None)
    return found


def _read_tool(found: Tools, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
    kind = kind_of(tool)
    if kind == "function":
        function = read(FunctionTool, tool, where)
        _add(found, _function(function), ToolName(function.name, namespace), where)
    elif kind == "custom":
        custom = read(CustomTool, tool, where)
        name = ToolName(custom.name, namespace, "custom")
        _add(found, _custom(custom), name, where)
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


def _function(tool: FunctionTool) -> dict[str, Any]:
    made: dict[str, Any] = {"description": tool.description} if tool.description else {}
    made["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    if tool.strict is not None:
        made["strict"] = tool.strict
    return made


def _custom(tool: CustomTool) -> dict[str, Any]:
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
    """Return the Lark grammar of a tool's input; None: any text.

    Raises:
        ApiError: the format is not one of OpenAI's.
    """
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
    """Return the tools that may be called, and the choice as a chat request has it.

    Raises:
        ApiError: it is malformed, or names a tool that the request does not have.
    """
    if given in _CHOICES:
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
