"""What the server needs of the rooms below: a service, a chat model, and the parts of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine.requests import Request, Step
from ..sampling import SamplingParams


@dataclass(frozen=True)
class Format:
    """What an answer must look like.

    kind: "json_object", "json_schema", "gbnf", "lark" or "regex". source: the schema, or the text
    of the grammar; None of any JSON object.
    """

    kind: str
    source: Mapping[str, Any] | str | None = None


@dataclass(frozen=True)
class ReasoningPart:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class ContentPart:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete."""

    index: int


Part = ReasoningPart | ContentPart | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class ChatRequest:
    """A conversation, and how its next answer is drawn; messages and tools in OpenAI's form."""

    messages: Sequence[Mapping[str, Any]]
    sampling: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    format: Format | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n_logprobs: int | None = None
    deadline_s: float | None = None
    name: str = ""


class AnswerParser(Protocol):
    """Splits the text of an answer into its parts."""

    def push(self, text: str) -> list[Part]:
        """Take the next text; return the parts that are known by now."""

    def flush(self) -> list[Part]:
        """Return what was held back, at the end of the answer."""


class Prepared(Protocol):
    """A request that is ready to be submitted, and the parser of its answer."""

    @property
    def request(self) -> Request:
        """The request, with token ids."""

    @property
    def parser(self) -> AnswerParser:
        """A parser for this answer alone."""


class ChatModel(Protocol):
    """Template, tokenizer and grammars of a model; every thread may use it."""

    def prepare(self, chat: ChatRequest) -> Prepared:
        """Render, tokenize and compile a conversation."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt of a conversation."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of a text."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, also of a special one."""


class Ticket(Protocol):
    """A request that a service has accepted."""

    def cancel(self) -> None:
        """End the request soon; every thread may call it, more than once."""


class Service(Protocol):
    """Computes the requests of many clients on one engine; every thread may use it."""

    def submit(self, request: Request, deliver: Callable[[Step], None]) -> Ticket:
        """Accept a request, or raise; `deliver` is called on another thread."""

    def status(self) -> Any:
        """Return what the service is doing."""

    def drain(self, timeout_s: float | None) -> bool:
        """Take no more requests and wait for those that run."""

    def close(self) -> None:
        """End all requests and free the engine."""
