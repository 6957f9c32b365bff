"""The model that requests find: loading, ready, or gone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from .. import __version__
from ..engine.chat import ChatRequest, Prepared, Prompt, TextRequest
from ..loop.requests import Request, Step
from .errors import RETRY_S, ApiError


class ChatInterface(Protocol):
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


class ServiceInterface(Protocol):
    """Computes the requests of many clients on one engine; see `engine.service.Service`."""

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


@dataclass(frozen=True)
class ModelFacts:
    """What clients may know of a model; zeros are not known.

    n_ctx: tokens that one request may hold. n_bytes: of the file. template: the chat template.
    """

    name: str
    n_ctx: int = 0
    n_ctx_train: int = 0
    n_vocab: int = 0
    n_embd: int = 0
    n_params: int = 0
    n_bytes: int = 0
    n_slots: int = 1
    created: int = 0
    device: str = ""
    bos_token: str = ""
    eos_token: str = ""
    template: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """A name for what may change answers: this program, the model and its settings."""
        parts = [self.n_bytes, self.created, self.device, self.template, self.settings]
        found = hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode())
        return f"b{__version__}-{found.hexdigest()[:8]}"


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready, the service that computes with it, and its facts.

    close: ends the service and frees the model.
    """

    service: ServiceInterface
    chat: ChatInterface
    facts: ModelFacts
    close: Callable[[], None] = lambda: None


class ModelSource(Protocol):
    """Where requests find the model."""

    @property
    def condition(self) -> str:
        """One of "loading", "ready", "sleeping", "closing" and "failed"."""

    @property
    def reason(self) -> str:
        """Why nothing is served, for clients."""

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model, also while it is loading."""

    async def loaded(self) -> LoadedModel:
        """Return the model, after waking it if it sleeps."""

    def peek(self) -> LoadedModel | None:
        """Return the model if it is in memory; does not wake it."""

    def enter(self) -> None:
        """A request uses the model from now on."""

    def leave(self) -> None:
        """A request uses it no more."""


def unavailable(condition: str, reason: str) -> ApiError:
    """Return the error of a request that comes while nothing is served."""
    retry = None if condition == "failed" else RETRY_S
    return ApiError(503, reason, code=condition, retry_after_s=retry)
