"""From messages to a request for the engine, and from its answer's text back to messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoegraphError, RequestError
from ..sampling import SamplingParams
from ..text.chat.answer import AnswerParser
from ..text.chat.calls import CALL, FUNCTION
from ..text.chat.messages import TemplateMessage, template_messages, without_late_system
from ..text.chat.plaintools import CHATML, plain_messages
from ..text.chat.reasoning import END_OF_THINK, THINK
from ..text.chat.template import TEMPLATE_KEY, ChatTemplate
from ..text.chat.toolgrammar import CallGrammar
from ..text.constraint import GrammarConstraint
from ..text.grammar import Grammars
from ..text.tokenizer import Tokenizer
from .requests import Constraint, Request

if TYPE_CHECKING:
    from .engine import Engine

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
class _Settings:
    """How an answer is drawn: fields as in `Request`."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n_logprobs: int | None = None
    deadline_s: float | None = None
    name: str = ""
    format: Format | None = None


@dataclass(frozen=True)
class ChatRequest(_Settings):
    """A conversation to be answered.

    messages, tools: in OpenAI's form; the last message may be an assistant's, whose text the answer
    then continues. tool_choice: "auto", "none", "required", or the name of a function.
    parallel_tool_calls: False to end the answer after one call. variables: for the template, such
    as enable_thinking. reasoning: False to leave reasoning in the text.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = AUTO
    parallel_tool_calls: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: bool = True


@dataclass(frozen=True)
class TextRequest(_Settings):
    """A text, or token ids, to be continued."""

    prompt: str | Sequence[int]


@dataclass(frozen=True)
class Prepared:
    """A request for the engine. parser: takes its answer's text. prompt: its text."""

    request: Request
    parser: AnswerParser
    prompt: str


def thinking_variables(effort: str | None) -> dict[str, Any]:
    """Return what OpenAI's reasoning_effort means for a chat template; None: nothing."""
    if effort is None:
        return {}
    if effort in ("none", "minimal"):
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": effort}


class ChatModel:
    """A model's chat template and tokenizer: what stands between messages and tokens.

    Made once for an engine; any thread may call it. Close it when done.

    warnings: lines for the user, one each.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Own the template; the tokenizer stays the caller's."""
        self.tokenizer = tokenizer
        self.template = template
        self.warnings: list[str] = []
        self.grammars = Grammars(tokenizer)
        self._rendering = threading.Lock()

    @classmethod
    def of(cls, engine: Engine, template_file: Path | None = None) -> ChatModel:
        """Return the chat model of an engine; a file's template replaces the model's own.

        A model without a template gets ChatML, and a warning.

        Raises:
            ConfigError, ModelFileError: the template cannot be read, or is not valid.
        """
        tokenizer, file = engine.tokenizer, engine.file
        tokens = special_tokens(tokenizer)
        if template_file is not None:
            return cls(tokenizer, ChatTemplate.from_file(template_file, tokens))
        if file.kv.get(TEMPLATE_KEY):
            return cls(tokenizer, ChatTemplate.from_metadata(file.kv, file.path, tokens))
        found = cls(tokenizer, ChatTemplate(CHATML, "ChatML", tokens=tokens))
        found.warnings.append(
            f"{file.path}: the model has no chat template ({TEMPLATE_KEY}); ChatML is used, which "
            "it may not know; --chat-template-file names another"
        )
        return found

    def close(self) -> None:
        """Close the template; a second call does nothing."""
        with self._rendering:
            self.template.close()

    def __enter__(self) -> ChatModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, chat: ChatRequest) -> Prepared:
        """Return what the engine and the reader of its answer need.

        Raises:
            RequestError: the messages, tools or the format are wrong, or the template refuses them.
        """
        check_tools(chat.tools, chat.tool_choice)
        prompt = self.render(chat.messages, chat.tools, chat.variables)
        # tools that must not be called are shown too, so that the prompt keeps its beginning
        tools = () if chat.tool_choice == NONE else chat.tools
        parser = AnswerParser(
            prompt, tools, reasoning=chat.reasoning, parallel=chat.parallel_tool_calls
        )
        constraint = self._chat_constraint(chat, parser.is_reasoning)
        return Prepared(self._request(chat, self.encode(prompt), constraint), parser, prompt)

    def prepare_text(self, text: TextRequest) -> Prepared:
        """Return what the engine needs to continue a text; its parser only finds text.

        Raises:
            RequestError: the text or the format is wrong.
        """
        if isinstance(text.prompt, str):
            prompt, ids = text.prompt, self.tokenizer.encode(text.prompt)
        else:
            prompt, ids = self.detokenize(text.prompt), list(text.prompt)
        constraint = None
        if text.format is not None:
            compiled = self.grammars.compile(text.format.kind, text.format.source)
            constraint = GrammarConstraint(compiled)
        return Prepared(self._request(text, ids, constraint), AnswerParser(reasoning=False), prompt)

    def _chat_constraint(self, chat: ChatRequest, is_reasoning: bool) -> Constraint | None:
        """Return what the answer must follow, after its reasoning if the prompt begins that."""
        asked = answer_grammar(chat, self._calls_are_json, self._is_tag)
        if asked is None:
            return None
        kind, source, after = asked
        try:
            compiled = self.grammars.compile(kind, source)
        except RequestError as error:
            if chat.tools and kind == "lark":
                raise RequestError(f"tools: {error}") from error
            raise
        if after is not None:
            return GrammarConstraint(compiled, after, blank=False)
        return GrammarConstraint(compiled, END_OF_THINK if is_reasoning else None)

    @property
    def _calls_are_json(self) -> bool:
        """Whether the template shows calls in the older form."""
        return self.template.knows_tools and FUNCTION not in self.template.source

    def _is_tag(self, text: str) -> bool:
        ids = self.tokenizer.encode(text, add_special=False)
        return len(ids) == 1 and self.tokenizer.is_special(ids[0])

    def _request(
        self, settings: _Settings, ids: list[int], constraint: Constraint | None
    ) -> Request:
        if constraint is not None and settings.ignore_eos:
            raise RequestError("ignore_eos: an answer with a format or grammar ends with it")
        return Request(
            ids, settings.sampling, settings.max_tokens, settings.stop, settings.ignore_eos,
            constraint=constraint, n_logprobs=settings.n_logprobs,
            deadline_s=settings.deadline_s, name=settings.name,
        )  # fmt: skip

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for messages; if the last is an assistant's, the prompt ends in it.

        Raises:
            RequestError: the messages are wrong, or the template refuses them.
        """
        found = template_messages(messages)
        begun = found.pop() if len(found) > 1 and _is_begun(found[-1]) else None
        prompt = self._rendered(found, tools, variables or {})
        return prompt if begun is None else _continued(prompt, begun)

    def _rendered(
        self,
        messages: list[TemplateMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        if not self.template.knows_tools:
            messages = plain_messages(messages, tools)
        elif tools:
            variables = {**variables, "tools": list(tools)}
        try:
            return self._apply(messages, variables)
        except RequestError:
            plain = without_late_system(messages)
            if plain == messages:
                raise
            return self._apply(plain, variables)

    def _apply(self, messages: list[TemplateMessage], variables: Mapping[str, Any]) -> str:
        reserved = {"messages", "add_generation_prompt"}
        allowed = {name: value for name, value in variables.items() if name not in reserved}
        try:
            with self._rendering:
                return self.template.render(messages, **allowed)
        except RequestError:
            raise
        except (MoegraphError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template fails for these messages: {error}") from error

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt that the template made."""
        bos = self.tokenizer.bos
        # If the template prints the BOS, the tokenizer must not add a second one.
        begins = bos is not None and prompt.startswith(
            self.tokenizer.piece(bos, special=True).decode(errors="replace")
        )
        return self.tokenizer.encode(prompt, add_special=not begins)

    def tokenize(
        self, text: str, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text; arguments as in `Tokenizer.encode`."""
        return self.tokenizer.encode(text, add_special, parse_special)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, of a control token too.

        Raises:
            RequestError: the id is not in the vocabulary.
        """
        return self.tokenizer.piece(token, special=True)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens included.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        return self.tokenizer.decode(ids, special=True)


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the variables bos_token and eos_token of chat templates."""
    return {
        name: tokenizer.piece(token, special=True).decode(errors="replace")
        for name, token in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos))
        if token is not None
    }


def check_tools(tools: Sequence[Mapping[str, Any]], choice: str) -> None:
    """Check tools in OpenAI's form, and which of them is to be called.

    Raises:
        RequestError: a tool has no name, or the choice names none of them.
    """
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
) -> tuple[str, Any, str | None] | None:
    """Return kind and source of the grammar that an answer must follow, if there is one.

    The third: the text after which it begins; None: at once, or after the reasoning. is_json,
    is_tag: as in `CallGrammar`.

    Raises:
        RequestError: the format cannot be had together with tools.
    """
    tools, choice, asked = chat.tools, chat.tool_choice, chat.format
    if choice not in (AUTO, NONE, REQUIRED):
        tools = [tool for tool in tools if tool["function"]["name"] == choice]
    parallel = chat.parallel_tool_calls and choice in (AUTO, REQUIRED)
    calls = CallGrammar(tools, is_json, parallel, is_tag)
    if tools and choice not in (AUTO, NONE):
        return "lark", calls.whole(), None
    if asked is None:
        is_strict = any(tool["function"].get("strict") is True for tool in tools)
        return ("lark", calls.after_tag(), CALL) if is_strict and choice == AUTO else None
    if not tools or choice == NONE:
        return asked.kind, asked.source, None
    schema = {"type": "object"} if asked.kind == "json_object" else asked.source
    if asked.kind not in ("json_object", "json_schema") or not isinstance(schema, Mapping):
        raise RequestError("grammar: not together with tools; use tool_choice 'none'")
    return "lark", calls.whole(schema), None


def _is_begun(message: TemplateMessage) -> bool:
    return message["role"] == "assistant" and "tool_calls" not in message


def _continued(prompt: str, begun: TemplateMessage) -> str:
    """Return a prompt that ends in the text of a message which the model is to continue."""
    text, reasoning = str(begun["content"]), str(begun.get("reasoning_content", ""))
    if prompt.rstrip().endswith(THINK):
        if reasoning and not text:
            return prompt + reasoning
        return f"{prompt}{reasoning}\n{END_OF_THINK}\n\n{text}"
    return prompt + text
