"""A service and a chat model that follow a script, for tests of the server without a model.

A token is a byte. The prompt of a conversation is one line per message, `role: content`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moegraph.engine.chat import ChatRequest, Prepared, Prompt, TextRequest
from moegraph.errors import MoegraphError, RequestError
from moegraph.loop.generated import room_after
from moegraph.loop.requests import (
    Request,
    ServiceCounts,
    ServiceStatus,
    SlotStatus,
    Step,
    TokenLogprobs,
    Usage,
)
from moegraph.server.host import Line, LoadedModel, Model, ModelFacts, Use
from moegraph.text.chat.answer import AnswerParser
from moegraph.text.chat.messages import template_messages
from moegraph.text.chat.prompting import Encoded
from moegraph.text.infill import LineParser

N_CTX = 4096


class FakeTicket:
    """A request that the fake service has accepted."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.name = request.name
        self.gone = threading.Event()
        self.ended = threading.Event()

    def cancel(self) -> None:
        self.gone.set()


@dataclass
class FakeService:
    """Answers each request with the next script; the last one is used again and again.

    A script is the texts of an answer, one step each, or an error that the answer ends with.
    n_read_steps: steps without text before the first one. hold: answers wait for it before each
    step. refusal: raised by submit. capacity: most requests at a time, which nobody counts.
    """

    scripts: Sequence[Sequence[str | MoegraphError]] = (("Hello", " world"),)
    n_read_steps: int = 0
    hold: threading.Event | None = None
    refusal: Exception | None = None
    capacity: int = 64
    step_s: float = 0.0
    n_cached: int = 0
    experts: Any = None
    tickets: list[FakeTicket] = field(default_factory=list)
    is_closed: bool = False
    busy_s: float = 0.0
    slots: tuple[SlotStatus, ...] = (SlotStatus(0),)

    @property
    def requests(self) -> list[Request]:
        """The requests that were accepted."""
        return [ticket.request for ticket in self.tickets]

    def submit(self, request: Request, deliver: Callable[[Step], None]) -> FakeTicket:
        if self.refusal is not None:
            raise self.refusal
        if request.prompt:
            room_after(len(request.prompt), N_CTX)
        request.sampling.validate(256)
        script = self.scripts[min(len(self.tickets), len(self.scripts) - 1)]
        ticket = FakeTicket(request)
        self.tickets.append(ticket)
        run = _Run(self, ticket, script, deliver)
        threading.Thread(target=run.all, daemon=True).start()
        return ticket

    failure: str | None = None

    def status(self) -> ServiceStatus:
        return ServiceStatus(
            self.slots, n_running=0, n_waiting=0, n_ctx=N_CTX, counts=ServiceCounts(),
            experts=self.experts, busy_s=self.busy_s, failure=self.failure,
        )  # fmt: skip

    def drain(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True
        for ticket in self.tickets:
            ticket.cancel()


class _Run:
    """One answer, on a thread of its own."""

    def __init__(
        self, service: FakeService, ticket: FakeTicket,
        script: Sequence[str | MoegraphError], deliver: Callable[[Step], None],
    ) -> None:  # fmt: skip
        self.service, self.ticket, self.script, self.deliver = service, ticket, script, deliver
        n_prompt = len(ticket.request.prompt)
        self.usage = Usage(n_prompt=n_prompt, n_cached=service.n_cached)

    def all(self) -> None:
        self.deliver(self._last())
        self.ticket.ended.set()

    def _last(self) -> Step:
        request = self.ticket.request
        self.usage = replace(self.usage, n_read=self.service.n_cached)
        for i in range(self.service.n_read_steps):
            if self._is_gone():
                return Step(self.usage, finish_reason="cancelled")
            n_read = self.usage.n_prompt * (i + 1) // self.service.n_read_steps
            self.usage = replace(self.usage, n_read=n_read, prefill_s=0.001 * (i + 1))
            self.deliver(Step(self.usage))
        self.usage = replace(self.usage, n_read=self.usage.n_prompt, prefill_s=0.01)
        left = 1 << 30 if request.max_tokens is None else request.max_tokens
        for text in self.script:
            if self._is_gone():
                return Step(self.usage, finish_reason="cancelled")
            if isinstance(text, MoegraphError):
                return Step(self.usage, finish_reason="error", error=text)
            tokens = tuple(text.encode())[:left]
            left -= len(tokens)
            n = self.usage.n_generated + len(tokens)
            self.usage = replace(self.usage, n_generated=n, decode_s=0.001 * n)
            text = bytes(tokens).decode(errors="replace")
            stop = next((s for s in request.stop if s in text), None)
            text = text if stop is None else text.partition(stop)[0]
            step = Step(self.usage, tokens, text, self._logprobs(tokens))
            if stop is not None:
                return replace(step, finish_reason="stop", stop=stop)
            if left <= 0:
                return replace(step, finish_reason="length")
            self.deliver(step)
        return Step(self.usage, finish_reason="stop")

    def _is_gone(self) -> bool:
        if self.service.hold is not None:
            while not self.service.hold.wait(0.001) and not self.ticket.gone.is_set():
                pass
        time.sleep(self.service.step_s)
        return self.ticket.gone.is_set()

    def _logprobs(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        n = self.ticket.request.n_logprobs
        if n is None:
            return ()
        return tuple(
            TokenLogprobs(t, -0.5, tuple((t + i, -0.5 - i) for i in range(n))) for t in tokens
        )


class FakeTokenizer:
    """Tokens are bytes."""

    n_vocab = 256

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        if any(not 0 <= token < self.n_vocab for token in ids):
            raise RequestError("an id is not in the vocabulary")
        return bytes(ids).decode(errors="replace")

    def piece(self, token: int, special: bool = False) -> bytes:
        return bytes([token])


class FakeChatModel:
    """Renders and tokenizes as the module's docstring says; keeps the requests it was given."""

    tokenizer = FakeTokenizer()
    warnings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.chats: list[ChatRequest] = []
        self.asked: list[ChatRequest] = []  # also those whose prompt alone was asked for
        self.texts: list[TextRequest] = []

    def prepare(self, chat: ChatRequest) -> Prepared:
        self.chats.append(chat)
        prompt = self.prompt(chat).text
        if chat.format is not None and chat.format.source == "broken":
            raise RequestError("the grammar is wrong in line 1")
        request = Request(
            list(prompt.encode()), chat.sampling, chat.max_tokens, chat.stop, chat.ignore_eos,
            n_logprobs=chat.n_logprobs, deadline_s=chat.deadline_s, name=chat.name,
        )  # fmt: skip
        parser = AnswerParser(
            prompt, chat.tools, reasoning=chat.reasoning, parallel=chat.parallel_tool_calls
        )
        return Prepared(request, parser, self.warnings)

    def prepare_text(self, text: TextRequest) -> Prepared:
        self.texts.append(text)
        gap = text.gap
        pieces = [gap.before, gap.line, "|", gap.after] if gap else text.prompt
        pieces = [pieces] if isinstance(pieces, str) else pieces
        ids = [i for p in pieces for i in (p.encode() if isinstance(p, str) else [p])]
        request = Request(
            ids, text.sampling, text.max_tokens, text.stop, text.ignore_eos,
            n_logprobs=text.n_logprobs, deadline_s=text.deadline_s, name=text.name,
        )  # fmt: skip
        return Prepared(request, LineParser(text.n_indent, text.limit_s))

    def prompt(self, chat: ChatRequest) -> Prompt:
        self.asked.append(chat)
        lines = [f"{m['role']}: {m['content']}" for m in template_messages(chat.messages)]
        text = "\n".join([*lines, json.dumps(list(chat.tools))] if chat.tools else lines)
        return Prompt(text, Encoded(list(text.encode()), [(0, 0)]), (), 0)


class FixedBackend:
    """A model that is ready and stays so."""

    condition, reason, any_name = "ready", "", True

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.facts = loaded.facts
        self.models, self.line = [Model(lambda: loaded, loaded.facts)], Line()

    async def loaded(self, use: Use) -> LoadedModel:
        """Return it."""
        return self._loaded

    def peek(self) -> LoadedModel | None:
        """Return it."""
        return self._loaded

    def status(self, model: Model) -> str:
        """Tell that it is there."""
        return "loaded"


def fake_backend(service: FakeService | None = None, chat: Any = None) -> FixedBackend:
    """Return a backend with a model that is ready; chat: its chat model, a fake one by default."""
    facts = ModelFacts(
        "fake", n_ctx=N_CTX, n_ctx_train=2 * N_CTX, n_vocab=256, n_embd=8, n_params=1000,
        n_bytes=1000, created=1, fills_gaps=True,
    )  # fmt: skip
    return FixedBackend(LoadedModel(service or FakeService(), chat or FakeChatModel(), facts))
