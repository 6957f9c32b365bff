"""A server around the fake service, and a client of it that needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from starlette.testclient import TestClient

from helpers.fake_service import FakeChatModel, FakeService, fake_backend
from moegraph.server.app import build_site
from moegraph.server.guards import Guard, Keys
from moegraph.server.schemas import Defaults
from moegraph.server.state import ServerState

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Case:
    """A server, its fake service and model, and a client.

    state: settings of `ServerState`. guard: who is let in; every name by default. chat: a model in
    place of the fake one. defaults: what a request gets that says nothing.
    """

    def __init__(
        self, *scripts: Any, guard: Guard | None = None, state: dict[str, Any] | None = None,
        chat: Any = None, defaults: dict[str, Any] | None = None, **service: Any,
    ) -> None:  # fmt: skip
        self.service = FakeService(scripts or FakeService.scripts, **service)
        backend = fake_backend(self.service, chat)
        backend.models[0].defaults = Defaults(**(defaults or {}))
        self.state = ServerState(cast(Any, backend), **(state or {}))
        self.app = build_site(self.state, guard or Guard(Keys(), hosts=None))
        self.client = TestClient(self.app, raise_server_exceptions=False)
        loaded = backend.peek()
        assert loaded is not None and (chat or isinstance(loaded.chat, FakeChatModel))
        self.model: FakeChatModel = cast(Any, loaded.chat)

    def post(self, path: str, body: Any, **given: Any) -> Any:
        """Return the response to a JSON body."""
        return self.client.post(path, json=body, **given)

    def answer(self, path: str, body: Any) -> Any:
        """Return the JSON of an answer that must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, **given: Any) -> Any:
        """Return the JSON of a chat completion."""
        return self.answer("/v1/chat/completions", {**CHAT, **given})

    def events(self, path: str, body: Any) -> list[Any]:
        """Return the data of a stream's events, "[DONE]" as it is."""
        response = self.post(path, {**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return list(events_of(response.text))


def events_of(text: str) -> Iterator[Any]:
    """Yield the values of the data lines of a stream."""
    for line in text.splitlines():
        if line.startswith("data: "):
            value = line[len("data: ") :]
            yield value if value == "[DONE]" else json.loads(value)
