"""What is asked of a chat model, and what it makes of that: a request, and a reader of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..arch import ModelFile
from ..closing import Closable
from ..errors import ContextOverflow, RequestError
from ..gguf.reader import StringArray
from ..gguf.vocab import TOKENS
from ..loop.generated import room_after
from ..loop.requests import Constraint, Request
from ..sampling import SamplingParams
from ..text.chat import prompting
from ..text.chat.answer import AnswerParser
from ..text.chat.forms import Form
from ..text.chat.messages import ReadArguments, TemplateMessage, template_messages
from ..text.chat.prompting import Encoded, SegmentEncoder, Turn, continued, is_continued
from ..text.chat.rawjson import CallMemory
from ..text.chat.template import TEMPLATE_KEY, ChatTemplate
from ..text.chat.tools import CallGrammar
from ..text.grammar import GrammarConstraint, Grammars
from ..text.infill import Gap, LineParser, infill_prompt
from ..text.pictures import PictureReader, Shown
from ..text.tokenizer import Tokenizer

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
    n_keep: int | None = None


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
    """A text to be continued: pieces of text and token ids, or what is around a gap.

    n_indent, limit_s: as in `LineParser`.
    """

    prompt: str | Sequence[int | str] = ""
    gap: Gap | None = None
    n_indent: int = 0
    limit_s: float | None = None


@dataclass(frozen=True)
class Prompt:
    """What the model reads of a conversation.

    text: with the beginning of the answer. encoded: its token ids. messages: as the template got
    them. first: the character where the first question begins; see `prompt_marks`. begun: the text
    of the last message that the answer continues. is_thinking: the answer begins inside reasoning.
    is_fresh: it may begin with reasoning that the prompt has not opened.
    """

    text: str
    encoded: Encoded
    messages: Sequence[TemplateMessage]
    first: int
    begun: str = ""
    is_thinking: bool = False
    is_fresh: bool = False


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


@dataclass(frozen=True)
class AnswerGrammar:
    """A grammar that an answer must follow.

    kind, source, frame: as in `Grammars.compile`. after: the text after which it begins; None: at
    once, or after the reasoning. passed_over: keywords of tools that it leaves out.
    """

    kind: str
    source: Any
    frame: str = ""
    after: str | None = None
    passed_over: Collection[str] = ()


def answer_grammar(
    chat: ChatRequest, form: Form, is_tag: Callable[[str], bool], prompt: Prompt
) -> AnswerGrammar | None:
    """Return the grammar that an answer must follow, if there is one.

    form, is_tag: as in `CallGrammar`.
    """
    tools, choice, asked = chat.tools, chat.tool_choice, chat.format
    if not tools and asked is None:
        return None
    if choice not in (AUTO, NONE, REQUIRED):
        tools = [tool for tool in tools if tool["function"]["name"] == choice]
    parallel = chat.parallel_tool_calls and choice in (AUTO, REQUIRED)
    allowed = () if choice == NONE else tools
    calls = CallGrammar(
        allowed, form, parallel, is_tag, chat.inputs, prompt.is_fresh, prompt.is_thinking
    )
    if not allowed:
        if asked is not None:
            return AnswerGrammar(asked.kind, asked.source, calls.framed())
        # a tag that begins calls can be forbidden; without one, a grammar has to do it
        return AnswerGrammar("calls", calls.messages()) if tools and not form.call else None
    if choice != AUTO:
        return AnswerGrammar("calls", calls.whole(), passed_over=calls.passed_over)
    if asked is None:
        is_strict = any(tool["function"].get("strict") is True for tool in tools)
        if not (is_strict or (chat.inputs and form.text)):
            return None
        text = calls.after_tag() if form.call else calls.messages()
        return AnswerGrammar("calls", text, "", form.call or None, calls.passed_over)
    schema = {"type": "object"} if asked.kind == "json_object" else asked.source
    if asked.kind not in ("json_object", "json_schema") or not isinstance(schema, Mapping):
        raise RequestError("grammar: not together with tools; use tool_choice 'none'")
    return AnswerGrammar("calls", calls.whole(schema), passed_over=calls.passed_over)


# Characters that a token has at most in usual text, several times over.
_CHARS_PER_TOKEN = 8


@dataclass(frozen=True)
class PromptRoom:
    """How much a prompt may have.

    A word of a megabyte costs the tokenizer a second and a hundred megabytes. No such text fits
    into a small context, as no token is longer than n_longest bytes.
    """

    n_ctx: int
    n_longest: int

    @classmethod
    def of(cls, kv: Mapping[str, object], n_ctx: int) -> PromptRoom | None:
        """Return the room for prompts of a model file, or None if the file has no tokens."""
        tokens = kv.get(TOKENS)
        return cls(n_ctx, tokens.n_longest) if isinstance(tokens, StringArray) else None

    def require(self, prompt: str | Sequence[int]) -> None:
        """Check a text, as far as its length tells, or token ids."""
        if not isinstance(prompt, str):
            if prompt:
                room_after(len(prompt), self.n_ctx)
        elif len(prompt) > self.n_ctx * self.n_longest:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} characters, the context holds {self.n_ctx} tokens "
                f"of at most {self.n_longest}; shorten the prompt or raise -c/--ctx-size",
                -(-len(prompt) // self.n_longest), self.n_ctx,
            )  # fmt: skip

    def require_beginning(self, prompt: str, encode: Callable[[str], list[int]]) -> None:
        """Check a text, and its beginning if it is much longer than usual texts that fit."""
        self.require(prompt)
        n_chars = self.n_ctx * _CHARS_PER_TOKEN
        if len(prompt) <= n_chars:
            return
        # the last tokens may be others in the whole text
        n_tokens = len(encode(prompt[:n_chars])) - self.n_longest
        if n_tokens > self.n_ctx:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} characters, of which the first {n_chars} have at "
                f"least {n_tokens} tokens; the context holds {self.n_ctx}; shorten the prompt or "
                "raise -c/--ctx-size", n_tokens, self.n_ctx,
            )  # fmt: skip


def text_ids(
    text: TextRequest, tokenizer: Tokenizer, room: PromptRoom | None
) -> tuple[list[int], tuple[int, ...]]:
    """Return the ids of a text to be continued, and its marks."""
    if text.gap is not None:
        limits = (room.n_ctx, room.n_longest) if room else (1 << 20, 256)
        return infill_prompt(tokenizer, text.gap, *limits)
    pieces = [text.prompt] if isinstance(text.prompt, str) else text.prompt
    if room:
        room.require([one for one in pieces if not isinstance(one, str)])
    ids = list[int]()
    for n, one in enumerate(pieces):
        if isinstance(one, str) and room:
            room.require_beginning(one, tokenizer.encode)
        ids += tokenizer.encode(one, add_special=n == 0) if isinstance(one, str) else [one]
    # the text may come again, or a longer one, and seldom changes more than its last token; where a
    # client itself has marked a gap, the line before it changes next
    suffix = tokenizer.fim("suf")
    end = ids.index(suffix) if suffix is not None and suffix in ids else 0
    while end and not tokenizer.piece(ids[end - 1]).endswith(b"\n"):
        end -= 1
    return ids, tuple(sorted({end, len(ids) - 1} - {0, -1}))


# Types of tokens in a model file: control tokens, and those that a user added.
_CONTROL, _ADDED = 3, 4


class Loaded(Protocol):
    """A loaded model; see `Engine`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def file(self) -> ModelFile:
        """The model's file."""

    @property
    def n_ctx(self) -> int:
        """Positions of the context."""


class ChatModel(Closable):
    """A model's chat template and tokenizer: what stands between messages and tokens.

    Made once for an engine; any thread may call it. Close it when done.

    warnings: lines for the user, one each.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        specials: Mapping[str, bool] | None = None,
        room: PromptRoom | None = None,
    ) -> None:
        """Own the template; the tokenizer stays the caller's.

        specials: texts that are always one token, and whether it is a control token; from them it
        is known where prompts can be encoded in parts. None: nowhere. room: prompts that cannot
        fit are refused before work is spent on them; None: whoever computes them refuses them.
        """
        self.tokenizer = tokenizer
        self._room = room
        texts, ends = [*(specials or {})], {tokenizer.decode([i], True) for i in tokenizer.eog_ids}
        controls = {text for text in texts if specials and specials[text]}
        tags = [tag for tag in prompting.turn_tags(template.source, texts, ends) if tag in controls]
        # an end of text would be added to every part
        if tags and tokenizer.encode("", add_special=True) not in ([], [tokenizer.bos]):
            tags = []
        self._prompts = prompting.PromptMaker(template, special_tokens(tokenizer))
        self.form = self._prompts.form
        ids = [tokenizer.encode(tag, add_special=False) for tag in self.form.tags]
        hidden = {one[0] for one in ids if len(one) == 1 and not tokenizer.piece(one[0])}
        if hidden := hidden - tokenizer.eog_ids:
            tokenizer.show(hidden)
        self._encoder = SegmentEncoder(tokenizer, tags, ends)
        self._calls = CallMemory()
        self.template = template
        self.warnings: list[str] = []
        self.grammars = Grammars(tokenizer)
        self.pictures: PictureReader | None = None

    @classmethod
    def of(
        cls, engine: Loaded, template: ChatTemplate | None = None,
        pictures: PictureReader | None = None,
    ) -> ChatModel:  # fmt: skip
        """Return the chat model of an engine, with a template of its own or the model's.

        A model without a template gets ChatML, and a warning. pictures: reads them; it is closed
        with the model.
        """
        file, warnings = engine.file, list[str]()
        if template is None and file.kv.get(TEMPLATE_KEY):
            template = ChatTemplate.from_metadata(file.kv, file.path)
        if template is None:
            template = ChatTemplate(prompting.CHATML, "ChatML")
            warnings.append(
                f"{file.path}: the model has no chat template ({TEMPLATE_KEY}); ChatML is used, "
                "which it may not know; --chat-template-file names another"
            )
        specials = special_texts(file.kv, engine.tokenizer)
        room = PromptRoom.of(file.kv, engine.n_ctx)
        found = cls(engine.tokenizer, template, specials, room)
        found.warnings, found.pictures = warnings, pictures
        return found

    def close(self) -> None:
        """Close the template; a second call does nothing."""
        self._prompts.close()
        if self.pictures:
            self.pictures.close()

    def prepare(self, chat: ChatRequest) -> Prepared:
        """Return what the engine and the reader of its answer need."""
        prompt = self.prompt(chat, must_fit=True)
        text, encoded = prompt.text, prompt.encoded
        # tools that must not be called are shown too, so that the prompt keeps its beginning
        tools = () if chat.tool_choice == NONE else chat.tools
        parser = AnswerParser(
            text, tools, reasoning=chat.reasoning, parallel=chat.parallel_tool_calls,
            memory=self._turn(text, encoded), is_thinking=prompt.is_thinking,
            begun=prompt.begun if chat.echo else "", form=self.form,
        )  # fmt: skip
        constraint = self._chat_constraint(chat, prompt)
        marks = prompting.prompt_marks(encoded, text, prompt.messages, prompt.first)
        request = self._request(chat, encoded.ids, constraint, marks)
        request = replace(request, pictures=encoded.pictures)
        if chat.tools:
            request = self._with_calls(request, chat.tool_choice != NONE)
        return Prepared(request, parser, () if constraint is None else constraint.warnings)

    def prompt(self, chat: ChatRequest, must_fit: bool = False) -> Prompt:
        """Return what the model reads of a conversation.

        must_fit: refuse a text that cannot fit before all of it is encoded.
        """
        check_tools(chat.tools, chat.tool_choice)
        shown: dict[str, Shown] = {}
        messages = self._messages(chat.messages, shown)
        asked = chat.continue_final_message
        goes_on = is_continued(messages, asked)
        opens_turn = chat.add_generation_prompt or goes_on
        render = self._prompts.renderer(chat.tools, chat.variables, opens_turn)
        text, begun = render(messages[:-1] if goes_on else messages), ""
        is_thinking = self.form.is_open(text)
        is_fresh = not goes_on and not is_thinking and self._may_think(text)
        if goes_on:
            closing = self._prompts.closing
            text, begun, is_thinking = continued(text, messages[-1], asked, self.form, closing)
        if must_fit and self._room:
            self._room.require_beginning(text, self.tokenizer.encode)
        first = self._prompts.first_question(render, messages, text)
        return Prompt(
            text, self._encode(text, shown), messages, first, begun, is_thinking, is_fresh
        )

    def _may_think(self, prompt: str) -> bool:
        """Return whether the model may open reasoning after a prompt that has not."""
        knows = self.form.channels is not None or self.form.end_of_think in self.template.source
        return knows and self.form.is_fresh(prompt)

    def _with_calls(self, request: Request, are_allowed: bool) -> Request:
        """Return a request whose answer may have calls or not, if one token begins them.

        A client may send a call back rewritten, so the state before its text is kept.
        """
        begin = self.tokenizer.encode(self.form.call, add_special=False)
        if len(begin) != 1:
            return request
        if are_allowed:
            return replace(request, keep_after=frozenset(begin))
        bias = {**request.sampling.logit_bias, begin[0]: -math.inf}
        return replace(request, sampling=replace(request.sampling, logit_bias=bias))

    def _messages(
        self, messages: Sequence[Mapping[str, Any]], shown: dict[str, Shown]
    ) -> list[TemplateMessage]:
        """Return messages for the template, with calls as the model wrote them if that is known.

        shown: gets pictures, by the text that stands for each.
        """
        read: ReadArguments | None = self._calls.shown
        if self.form.text is None:
            has_calls = any(message.get("tool_calls") for message in messages)
            read = self._calls.written if has_calls and self._prompts.takes_json else None
        show = partial(self.pictures.show, shown) if self.pictures else None
        return template_messages(messages, read, lambda: self._prompts.separator, show)

    def _turn(self, prompt: str, encoded: Encoded) -> Turn:
        at, n = encoded.starts[-1]
        return Turn(self.tokenizer, self._encoder, self._calls, prompt[at:], encoded.ids[n:])

    def prepare_text(self, text: TextRequest) -> Prepared:
        """Return what the engine needs to continue a text; its parser only finds text."""
        ids, marks = text_ids(text, self.tokenizer, self._room)
        if text.gap is not None:
            text = replace(text, n_keep=-1)  # without a part of it, a gap is none
        constraint = None
        if text.format is not None:
            compiled = self.grammars.compile(text.format.kind, text.format.source)
            constraint = GrammarConstraint(compiled)
        request = self._request(text, ids, constraint, marks)
        warnings = () if constraint is None else constraint.warnings
        return Prepared(request, LineParser(text.n_indent, text.limit_s), warnings)

    def _chat_constraint(self, chat: ChatRequest, prompt: Prompt) -> GrammarConstraint | None:
        """Return what the answer must follow, after its reasoning if the prompt begins that."""
        form = self.form
        try:
            asked = answer_grammar(chat, form, self._is_tag, prompt)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"tools: a schema is not JSON: {error}") from error
        if asked is None:
            return None
        try:
            compiled = self.grammars.compile(asked.kind, asked.source, asked.frame)
        except RequestError as error:
            if chat.tools and asked.kind == "calls":
                raise RequestError(f"tools: {error}") from error
            raise
        if asked.passed_over:
            told = f"tools: schema keywords passed over: {', '.join(sorted(asked.passed_over))}"
            compiled = replace(compiled, warnings=(*compiled.warnings, told))
        if asked.after is not None:
            return GrammarConstraint(compiled, asked.after, blank=False)
        waits = prompt.is_thinking and form.call  # other grammars have the reasoning in them
        return GrammarConstraint(compiled, form.end_of_think if waits else None)

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
            marks, reuse=settings.reuse, constraint=constraint, n_logprobs=settings.n_logprobs,
            deadline_s=settings.deadline_s, name=settings.name, n_keep=settings.n_keep,
        )  # fmt: skip

    def _encode(self, prompt: str, shown: Mapping[str, Shown]) -> Encoded:
        if self._room is not None:
            self._room.require(prompt)
        bos = self.tokenizer.bos
        # If the template prints the BOS, the tokenizer must not add a second one.
        begins = bos is not None and prompt.startswith(self.tokenizer.decode([bos], special=True))
        if shown:
            return self._encoder.encode_around(prompt, shown, not begins)
        return self._encoder.encode(prompt, add_special=not begins)


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the variables bos_token and eos_token of chat templates."""
    return {
        name: tokenizer.decode([token], special=True)
        for name, token in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos))
        if token is not None
    }


def special_texts(kv: Mapping[str, object], tokenizer: Tokenizer) -> dict[str, bool]:
    """Return the texts that are always one token, and whether it is a control token."""
    types = np.asarray(kv.get("tokenizer.ggml.token_type", ()))
    return {
        tokenizer.decode([int(token)], special=True): kind == _CONTROL
        for kind in (_ADDED, _CONTROL)
        for token in np.flatnonzero(types == kind)
    }
