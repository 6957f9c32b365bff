"""What is asked of a chat model: conversations, texts, and the form of their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from ..loop.requests import Request
from ..sampling import SamplingParams
from ..text.chat.answer import AnswerParser
from ..text.chat.messages import TemplateMessage
from ..text.chat.prompting import Encoded
from ..text.chat.tools import CALL, CallGrammar

AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True)
class Format:
    """The form of an answer.

    kind: "json_object", "json_schema", "gbnf", "lark" or "regex". source: the JSON schema, or the
    text of the grammar; None for "json_object".
    """

    kind: str
    source: Any = None


@dataclass(frozen=True, kw_only=True)
class DrawSettings:
    """How an answer is drawn: fields as in `Request`."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    reuse: bool = True
    n_logprobs: int | None = None
    deadline_s: float | None = None
    name: str = ""
    format: Format | None = None


@dataclass(frozen=True)
class ChatRequest(DrawSettings):
    """A conversation to be answered.

    messages, tools: in OpenAI's form. add_generation_prompt: the prompt ends with the beginning of
    the answer's turn. continue_final_message: the answer continues the last message, which is an
    assistant's; "content" or "reasoning_content": this field of it; None: it does if there are
    several messages. echo: the answer has the text that it continues. tool_choice: "auto", "none",
    "required", or the name of a function. inputs: function's name -> Lark grammar that the text of
    its parameters follows.
    parallel_tool_calls: False to end the answer after one call. variables: for the template, such
    as enable_thinking. reasoning: False to leave reasoning in the text.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = AUTO
    inputs: Mapping[str, str] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool | str | None = None
    echo: bool = False


@dataclass(frozen=True)
class TextRequest(DrawSettings):
    """A text, or token ids, to be continued."""

    prompt: str | Sequence[int]


@dataclass(frozen=True)
class Prompt:
    """What the model reads of a conversation.

    text: with the beginning of the answer. encoded: its token ids. messages: as the template got
    them. first: the character where the first question begins; see `prompt_marks`. begun: the text
    of the last message that the answer continues. is_thinking: the answer begins inside reasoning.
    """

    text: str
    encoded: Encoded
    messages: Sequence[TemplateMessage]
    first: int
    begun: str = ""
    is_thinking: bool = False


@dataclass(frozen=True)
class Prepared:
    """A request for the engine. parser: takes its answer's text. warnings: lines for the client."""

    request: Request
    parser: AnswerParser
    warnings: tuple[str, ...] = ()


def thinking_variables(effort: str | None) -> dict[str, Any]:
    """Return what OpenAI's reasoning_effort means for a chat template; None: nothing."""
    if effort is None:
        return {}
    if effort in ("none", "minimal"):
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": effort}


def check_tools(tools: Sequence[Mapping[str, Any]], choice: str) -> None:
    """Check tools in OpenAI's form, and which of them is to be called."""
    names = []
    for n, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"tools[{n}].function.name: not a name")
        names.append(name)
    if choice == REQUIRED and not names:
        raise RequestError("tool_choice: 'required', but there are no tools")
    if choice not in (AUTO, NONE, REQUIRED, *names):
        raise RequestError(f"tool_choice: {choice!r} is none of the tools")


def answer_grammar(
    chat: ChatRequest, is_json: bool, is_tag: Callable[[str], bool]
) -> tuple[str, Any, str | None, set[str]] | None:
    """Return kind and source of the grammar that an answer must follow, if there is one.

    The third: the text after which it begins; None: at once, or after the reasoning. The fourth:
    keywords of tools that it passes over. is_json, is_tag: as in `CallGrammar`.
    """
    tools, choice, asked = chat.tools, chat.tool_choice, chat.format
    if choice not in (AUTO, NONE, REQUIRED):
        tools = [tool for tool in tools if tool["function"]["name"] == choice]
    parallel = chat.parallel_tool_calls and choice in (AUTO, REQUIRED)
    calls = CallGrammar(tools, is_json, parallel, is_tag, chat.inputs)
    if tools and choice not in (AUTO, NONE):
        return "calls", calls.whole(), None, calls.passed_over
    if asked is None:
        is_strict = any(tool["function"].get("strict") is True for tool in tools)
        is_strict = is_strict or (bool(chat.inputs) and not is_json)
        if not is_strict or choice != AUTO:
            return None
        return "calls", calls.after_tag(), CALL, calls.passed_over
    if not tools or choice == NONE:
        return asked.kind, asked.source, None, set()
    schema = {"type": "object"} if asked.kind == "json_object" else asked.source
    if asked.kind not in ("json_object", "json_schema") or not isinstance(schema, Mapping):
        raise RequestError("grammar: not together with tools; use tool_choice 'none'")
    return "calls", calls.whole(schema), None, calls.passed_over
