"""The model behind the server: loading, ready, or gone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from .. import __version__
from .contract import ChatModel, Service
from .errors import RETRY_S, ApiError


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
class Loaded:
    """A model that is ready, the service that computes with it, and its facts.

    close: ends the service and frees the model.
    """

    service: Service
    chat: ChatModel
    facts: ModelFacts
    close: Callable[[], None] = lambda: None


class Backend(Protocol):
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

    async def loaded(self) -> Loaded:
        """Return the model, after waking it if it sleeps.

        Raises:
            ApiError: 503, it is loading, closing or has failed.
        """

    def peek(self) -> Loaded | None:
        """Return the model if it is in memory; does not wake it."""

    def enter(self) -> None:
        """A request uses the model from now on."""

    def leave(self) -> None:
        """A request uses it no more."""


def unavailable(condition: str, reason: str) -> ApiError:
    """Return the error of a request that comes while nothing is served."""
    retry = None if condition == "failed" else RETRY_S
    return ApiError(503, reason, code=condition, retry_after_s=retry)
