"""From messages to a request for the engine, and from its answer's text back to messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ..errors import MoegraphError, RequestError
from ..modelfile import ModelFile
from ..text.chat.answer import AnswerParser
from ..text.chat.calls import CALL, FUNCTION
from ..text.chat.marks import first_question, prompt_marks
from ..text.chat.memory import CallMemory
from ..text.chat.messages import TemplateMessage, template_messages, without_late_system
from ..text.chat.plaintools import CHATML, described_tools, plain_messages
from ..text.chat.reasoning import END_OF_THINK, THINK
from ..text.chat.segments import Encoded, SegmentEncoder, turn_tags
from ..text.chat.template import TEMPLATE_KEY, ChatTemplate
from ..text.constraint import GrammarConstraint
from ..text.grammar import Grammars
from ..text.tokenizer import Tokenizer
from .chatrequests import (
    NONE,
    ChatRequest,
    DrawSettings,
    Format,
    Prepared,
    TextRequest,
    answer_grammar,
    check_tools,
    thinking_variables,
)
from .requests import Constraint, Request
from .turns import Turn

__all__ = [
    "ChatModel",
    "ChatRequest",
    "Format",
    "Prepared",
    "TextRequest",
    "thinking_variables",
]

_Render = Callable[[list[TemplateMessage]], str]
# Beginnings of prompts, up to the first question, that are known without rendering them again.
_N_BEGINNINGS = 16
# Types of tokens in a model file: control tokens, and those that a user added.
_CONTROL, _ADDED = 3, 4
# Shorter ones have neither a system prompt nor tools.
_MIN_BEGINNING = 64


class Loaded(Protocol):
    """A loaded model; see `Engine`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def file(self) -> ModelFile:
        """The model's file."""


class ChatModel:
    """A model's chat template and tokenizer: what stands between messages and tokens.

    Made once for an engine; any thread may call it. Close it when done.

    warnings: lines for the user, one each.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        specials: Mapping[str, bool] | None = None,
    ) -> None:
        """Own the template; the tokenizer stays the caller's.

        specials: texts that are always one token, and whether it is a control token; from them it
        is known where prompts can be encoded in parts. None: nowhere.
        """
        self.tokenizer = tokenizer
        texts, ends = [*(specials or {})], {self.piece(i).decode() for i in tokenizer.eog_ids}
        controls = {text for text in texts if specials and specials[text]}
        tags = [tag for tag in turn_tags(template.source, texts, ends) if tag in controls]
        # an end of text would be added to every part
        if tags and tokenizer.encode("", add_special=True) not in ([], [tokenizer.bos]):
            tags = []
        self._tokens = special_tokens(tokenizer)
        self._encoder = SegmentEncoder(tokenizer, tags, ends)
        self._calls = CallMemory()
        self._beginnings: tuple[str, ...] = ()
        self.template = template
        self.warnings: list[str] = []
        self.grammars = Grammars(tokenizer)
        self._rendering = threading.Lock()

    @classmethod
    def of(cls, engine: Loaded, template: ChatTemplate | None = None) -> ChatModel:
        """Return the chat model of an engine, with a template of its own or the model's.

        A model without a template gets ChatML, and a warning.

        Raises:
            ModelFileError: the model's template is not valid.
        """
        file, warnings = engine.file, list[str]()
        if template is None and file.kv.get(TEMPLATE_KEY):
            template = ChatTemplate.from_metadata(file.kv, file.path)
        if template is None:
            template = ChatTemplate(CHATML, "ChatML")
            warnings.append(
                f"{file.path}: the model has no chat template ({TEMPLATE_KEY}); ChatML is used, "
                "which it may not know; --chat-template-file names another"
            )
        found = cls(engine.tokenizer, template, special_texts(file.kv, engine.tokenizer))
        found.warnings = warnings
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
        messages = self._messages(chat.messages)
        render = self._renderer(chat.tools, chat.variables)
        prompt = _whole_prompt(render, messages)
        # tools that must not be called are shown too, so that the prompt keeps its beginning
        tools = () if chat.tool_choice == NONE else chat.tools
        encoded = self._encode(prompt)
        parser = AnswerParser(
            prompt, tools, reasoning=chat.reasoning, parallel=chat.parallel_tool_calls,
            memory=self._turn(prompt, encoded),
        )  # fmt: skip
        constraint = self._chat_constraint(chat, parser.is_reasoning)
        marks = prompt_marks(encoded, prompt, messages, self._first(render, messages, prompt))
        request = self._request(chat, encoded.ids, constraint, marks)
        if chat.tools and chat.tool_choice == NONE:
            request = self._without_calls(request)
        return Prepared(request, parser, prompt)

    def _without_calls(self, request: Request) -> Request:
        """Return a request whose answer cannot begin a call, if that takes one token."""
        ids = self.tokenizer.encode(CALL, add_special=False)
        if len(ids) > 1:
            return request
        bias = {**request.sampling.logit_bias, ids[0]: -math.inf}
        return replace(request, sampling=replace(request.sampling, logit_bias=bias))

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[TemplateMessage]:
        """Return messages for the template, with calls as the model wrote them if that is known."""
        return template_messages(messages, None if self._calls_are_json else self._calls.shown)

    def _turn(self, prompt: str, encoded: Encoded) -> Turn:
        at, n = encoded.starts[-1]
        return Turn(self.tokenizer, self._encoder, self._calls, prompt[at:], encoded.ids[n:])

    def _first(self, render: _Render, messages: list[TemplateMessage], prompt: str) -> int:
        """Return where the first question begins, after the system prompt and tools."""
        known = max((len(one) for one in self._beginnings if prompt.startswith(one)), default=0)
        if known:
            return known
        try:
            found = first_question(render, messages, prompt)
        except RequestError:
            return 0  # a template that wants more than one question
        # a beginning without a system prompt or tools would be that of other prompts too
        if found > _MIN_BEGINNING:
            self._beginnings = (*self._beginnings[1 - _N_BEGINNINGS :], prompt[:found])
        return found

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
        return Prepared(
            self._request(text, ids, constraint, ()), AnswerParser(reasoning=False), prompt
        )

    def _chat_constraint(self, chat: ChatRequest, is_reasoning: bool) -> Constraint | None:
        """Return what the answer must follow, after its reasoning if the prompt begins that."""
        try:
            asked = answer_grammar(chat, self._calls_are_json, self._is_tag)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"tools: a schema is not JSON: {error}") from error
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
        self,
        settings: DrawSettings,
        ids: list[int],
        constraint: Constraint | None,
        marks: tuple[int, ...] = (),
    ) -> Request:
        if constraint is not None and settings.ignore_eos:
            raise RequestError("ignore_eos: an answer with a format or grammar ends with it")
        return Request(
            ids, settings.sampling, settings.max_tokens, settings.stop, settings.ignore_eos,
            marks, constraint=constraint, n_logprobs=settings.n_logprobs,
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
        return _whole_prompt(self._renderer(tools, variables or {}), self._messages(messages))

    def _renderer(
        self, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> _Render:
        """Return what makes prompts of messages, with these tools."""
        if tools and self.template.knows_tools:
            variables = {**variables, "tools": list(tools)}
        try:
            described = "" if self.template.knows_tools else described_tools(tools)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"tools: a schema is not JSON: {error}") from error

        def render(messages: list[TemplateMessage]) -> str:
            if not self.template.knows_tools:
                messages = plain_messages(messages, described)
            try:
                return self._apply(messages, variables)
            except RequestError:
                plain = without_late_system(messages)
                if plain == messages:
                    raise
                return self._apply(plain, variables)

        return render

    def _apply(self, messages: list[TemplateMessage], variables: Mapping[str, Any]) -> str:
        reserved = {"messages", "add_generation_prompt"}
        allowed = {name: value for name, value in variables.items() if name not in reserved}
        with self._rendering:
            try:
                return self.template.render(messages, **{**self._tokens, **allowed})
            except RequestError:
                raise
            except (MoegraphError, TypeError, ValueError, RecursionError) as error:
                # if it fails for any messages, it is broken, and the client is right
                self.template.render([{"role": "user", "content": "A"}], **self._tokens)
                raise RequestError(
                    f"the chat template fails for these messages: {error}"
                ) from error

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt that the template made."""
        return self._encode(prompt).ids

    def _encode(self, prompt: str) -> Encoded:
        bos = self.tokenizer.bos
        # If the template prints the BOS, the tokenizer must not add a second one.
        begins = bos is not None and prompt.startswith(
            self.tokenizer.piece(bos, special=True).decode(errors="replace")
        )
        return self._encoder.encode(prompt, add_special=not begins)

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


def special_texts(kv: Mapping[str, object], tokenizer: Tokenizer) -> dict[str, bool]:
    """Return the texts that are always one token, and whether it is a control token."""
    types = np.asarray(kv.get("tokenizer.ggml.token_type", ()))
    return {
        tokenizer.piece(int(token), special=True).decode(errors="replace"): kind == _CONTROL
        for kind in (_ADDED, _CONTROL)
        for token in np.flatnonzero(types == kind)
    }


def _whole_prompt(render: _Render, messages: list[TemplateMessage]) -> str:
    """Return the prompt for messages; if the last is an assistant's, the prompt ends in it."""
    if len(messages) > 1 and _is_begun(messages[-1]):
        return _continued(render(messages[:-1]), messages[-1])
    return render(messages)


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
