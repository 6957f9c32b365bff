"""Clients of a service, for tests: they collect the steps of their requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moegraph.engine import Engine
from moegraph.engine.service import Service, Ticket
from moegraph.loop.requests import Request, Step
from moegraph.sampling import SamplingParams

from .patience import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0)


class Client:
    """One request, and what came of it. on_step: called with each step on the engine's thread."""

    def __init__(self, service: Service, prompt: Sequence[int], **more: Any) -> None:
        self._on_step = more.pop("on_step", lambda step: None)
        more = {"sampling": GREEDY, "text": False, "ignore_eos": True, **more}
        self.steps: list[Step] = []
        self._done = threading.Event()
        self.request = Request([int(token) for token in prompt], **more)
        self.ticket: Ticket = service.submit(self.request, self._take)

    def _take(self, step: Step) -> None:
        assert not self._done.is_set(), "a step after the last one"
        self.steps.append(step)
        try:
            self._on_step(step)
        finally:
            if step.finish_reason is not None:
                self._done.set()

    def wait(self, timeout_s: float = PATIENCE_S) -> Client:
        """Wait for the last step."""
        assert self._done.wait(timeout_s), "no last step"
        return self

    @property
    def is_done(self) -> bool:
        """Whether the last step came."""
        return self._done.is_set()

    @property
    def last(self) -> Step:
        """The last step so far."""
        return self.steps[-1]

    @property
    def reason(self) -> str | None:
        """Why the answer ended."""
        return self.last.finish_reason

    @property
    def tokens(self) -> list[int]:
        """The tokens of the answer."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(step.text for step in self.steps)


@contextmanager
def serving(engine: Engine, **settings: Any) -> Iterator[Service]:
    """Run a service; afterwards the engine belongs to this thread again."""
    service = Service(engine, **settings)
    service.start()
    try:
        yield service
    finally:
        service.close()


@contextmanager
def together(service: Service) -> Iterator[None]:
    """Let no work begin meanwhile, so that requests come at once, however slow this thread is."""
    with service._loop.lock:
        yield


def alone(engine: Engine, request: Request) -> tuple[list[int], str, str | None]:
    """Return tokens, text and reason of a request that an engine answers by itself."""
    events = list(
        engine.generate(
            request.prompt, request.sampling, request.max_tokens, request.stop,
            ignore_eos=request.ignore_eos, text=request.text,
        )
    )  # fmt: skip
    tokens = [event.token for event in events if event.token is not None]
    return tokens, "".join(event.text for event in events), events[-1].finish_reason
