"""Tools for templates that know none: the same told in plain messages, in Qwen's XML form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .calls import CALL, END_OF_CALL, END_OF_FUNCTION, END_OF_PARAMETER, FUNCTION, PARAMETER
from .messages import TemplateMessage
from .rawjson import dumps

# The template of a model that has none.
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_HOW = f"""\
You can call these functions; each line describes one:
{{tools}}

To call one, answer with lines of this form, and with nothing after them:
{CALL}
{FUNCTION}NAME>
{PARAMETER}NAME_OF_PARAMETER>
VALUE
{END_OF_PARAMETER}
{END_OF_FUNCTION}
{END_OF_CALL}"""


def described_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    """Return what a model is told of tools; "" without any."""
    lines = "\n".join(dumps(tool.get("function", tool)) for tool in tools)
    return _HOW.format(tools=lines) if lines else ""


def plain_messages(messages: Sequence[TemplateMessage], described: str) -> list[TemplateMessage]:
    """Return messages with nothing but text: tools, calls and their results are text in them.

    described: of the tools; see `described_tools`.
    """
    found: list[TemplateMessage] = []
    if described:
        found.append({"role": "system", "content": described})
    for message, before in zip(messages, ({"role": ""}, *messages)):
        role, content = message["role"], message["content"]
        if role == "system" and len(found) == 1 and described:
            found[0]["content"] = f"{content}\n\n{found[0]['content']}"
            continue
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if before["role"] == "tool":
                found[-1]["content"] += "\n" + content
                continue
        calls = "\n".join(_written(call["function"]) for call in message.get("tool_calls", ()))
        text = "\n\n".join(part for part in (content, calls) if part)
        found.append({"role": role, "content": text})
    return found


def _written(function: Mapping[str, Any]) -> str:
    lines = [CALL, f"{FUNCTION}{function['name']}>"]
    for key, value in function["arguments"].items():
        text = value if isinstance(value, str) else dumps(value)
        lines += [f"{PARAMETER}{key}>", text, END_OF_PARAMETER]
    return "\n".join([*lines, END_OF_FUNCTION, END_OF_CALL])
