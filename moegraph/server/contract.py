"""What the server needs of the engine's room; the fakes of the tests have no more than this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..engine.chat import ChatRequest, Prepared, Prompt, TextRequest
from ..loop.requests import Request, Step


class ChatModel(Protocol):
    """Template, tokenizer and grammars of a model; see `engine.chat.ChatModel`."""

    def prepare(self, chat: ChatRequest) -> Prepared:
        """Render, tokenize and compile a conversation."""

    def prepare_text(self, text: TextRequest) -> Prepared:
        """Tokenize a text that goes on without a template."""

    def prompt(self, chat: ChatRequest) -> Prompt:
        """Render and tokenize a conversation."""

    def tokenize(
        self, text: str, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Return the ids of a text."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, also of a control token."""


class Ticket(Protocol):
    """A request that a service has accepted."""

    def cancel(self) -> None:
        """End the request soon; every thread may call it, more than once."""


class Service(Protocol):
    """Computes the requests of many clients on one engine; see `service.service.Service`."""

    @property
    def failure(self) -> str | None:
        """Why requests are not answered any more; None if they are."""

    @property
    def capacity(self) -> int:
        """How many requests there may be at a time, those included that wait."""

    def submit(self, request: Request, deliver: Callable[[Step], None]) -> Ticket:
        """Accept a request, or raise; `deliver` is called on another thread."""

    def status(self) -> Any:
        """Return what the service is doing, a `ServiceStatus`."""

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait for those that run; return whether they have ended."""

    def close(self) -> None:
        """End all requests."""
