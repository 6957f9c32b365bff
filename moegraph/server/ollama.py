"""Ollama's interface: chats and texts in its form, as lines of JSON, and what models there are."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from hashlib import sha256
from typing import Any, Literal

from pydantic import AliasChoices, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..loop.requests import Step
from ..text.chat.parts import CallEnd, Reply, ToolCall
from .completions import TextBody
from .errors import ApiError
from .exchange import Exchange, finish_reason, respond
from .host import ModelFacts
from .logs import note_usage
from .openai_chat import ChatBody, Content, Message
from .replies import LINES, line, reply
from .schemas import LIMITS, MAX_TOKENS, Body, Sampled, Schema, picture_part, refuse, text_parts
from .state import Operation, RouteTable, read_schema, state_of

# Of Ollama: clients ask for it to know what they may use.
_VERSION = "0.12.6"


def _content(images: Sequence[str] | None, content: Content) -> Content:
    """Return the content of a message in OpenAI's form, pictures first, which are base64."""
    shown = [picture_part(f"data:;base64,{one}") for one in images or ()]
    texts = content if isinstance(content, list) else [content] if content else []
    return text_parts([*shown, *texts]) or ""


class Options(Sampled):
    """How tokens are drawn; what else Ollama has, such as num_ctx, is ignored."""

    num_predict: int | None = Field(default=None, ge=-2, le=MAX_TOKENS)


class OllamaMessage(Message):
    """One message of a conversation."""

    content: Content = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_name: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in OpenAI's form."""
        own = {"reasoning_content": self.thinking, "name": self.tool_name}
        found = super().plain() | {name: text for name, text in own.items() if text}
        return found | {"content": _content(found.pop("images", None), self.content)}


class OllamaBody(Body):
    """A conversation, or a question; with raw or a suffix, a text and how it goes on.

    keep_alive is ignored; see --sleep-idle.
    """

    model: str | None = Field(default=None, validation_alias=AliasChoices("model", "name"))
    messages: list[OllamaMessage] = Field(default_factory=list, max_length=LIMITS.messages)
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    stream: bool | None = None
    format: Literal["", "json"] | Schema | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    @property
    def name(self) -> str:
        """Return the name of the model, to which clients add :latest."""
        return (self.model or "").removesuffix(":latest")

    def openai(self) -> ChatBody | TextBody | None:
        """Return the same request in OpenAI's form; None: the model is only to be loaded."""
        found = self.options.model_dump(exclude_none=True) if self.options else {}
        found |= {"model": self.name, "stream": self.stream is not False}
        if "num_predict" in found:
            found["max_tokens"] = max(found.pop("num_predict"), -1)
        if isinstance(self.format, dict):
            found["json_schema"] = self.format
        elif self.format:
            found["response_format"] = {"type": "json_object"}
        if self.raw or self.suffix:
            found |= {"prompt": self.prompt or "", "suffix": self.suffix}
            if self.images:
                refuse("images", "a raw prompt or a gap has no pictures")
            return TextBody.model_validate(found)
        messages = [message.plain() for message in self.messages]
        if self.prompt or self.images:
            asked = {"system": self.system, "user": _content(self.images, self.prompt)}
            messages += [{"role": role, "content": text} for role, text in asked.items() if text]
        if isinstance(self.think, bool):
            found["chat_template_kwargs"] = {"enable_thinking": self.think}
        else:
            found["reasoning_effort"] = self.think
        found |= {"messages": messages, "tools": self.tools}
        return ChatBody.model_validate(found) if messages else None


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S.%fZ}"


def _answer(name: str, is_chat: bool, said: Reply, calls: Collection[ToolCall]) -> dict[str, Any]:
    """Return what is said and called, without its end."""
    found: dict[str, Any] = {"thinking": said.reasoning} if said.reasoning else {}
    if calls:
        told = [{"name": one.name, "arguments": json.loads(one.arguments)} for one in calls]
        found["tool_calls"] = [{"function": function} for function in told]
    message = {"role": "assistant", "content": said.content, **found}
    own = {"message": message} if is_chat else {"response": said.content, **found}
    now = datetime.now(timezone.utc).timestamp()
    return {"model": name, "created_at": _time(now), **own, "done": False}


@dataclass(kw_only=True)
class _Run(Exchange):
    """An answer in the making."""

    is_chat: bool
    _said: Reply = field(default_factory=Reply, init=False)
    stream_kind = LINES

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        async for update in self.answers:
            self._said.add(update.parts)
            last = update.step
        return self._told([one for one in self._said.calls if one.is_whole]) | self._end(last)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines: a call is told when it is complete."""
        async for update in self.answers:
            self._said.add(update.parts)
            ends = [one for one in update.parts if isinstance(one, CallEnd) and one.is_whole]
            if self._said.content or self._said.reasoning or ends:
                yield line(self._told([self._said.calls[end.index] for end in ends]))
                self._said = Reply(calls=self._said.calls)
            if update.is_last:
                yield line(self._told() | self._end(update.step))

    def _told(self, calls: Collection[ToolCall] = ()) -> dict[str, Any]:
        return _answer(self.loaded.facts.name, self.is_chat, self._said, calls)

    def _end(self, step: Step) -> dict[str, Any]:
        usage, reason = self.usage, finish_reason(step)
        note_usage(self.http, usage, reason)
        found: dict[str, Any] = {"done": True, "done_reason": reason}
        times = {"load": usage.queued_s, "prompt_eval": usage.prefill_s, "eval": usage.decode_s}
        times["total"] = sum(times.values())
        found |= {f"{name}_duration": round(seconds * 1e9) for name, seconds in times.items()}
        return {**found, "prompt_eval_count": usage.n_prompt, "eval_count": usage.n_generated}

    def failed(self, error: ApiError) -> list[bytes]:
        """Return the line that ends an answer which fails."""
        return [line(_error(error))]


def _error(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


async def _respond(request: HttpRequest, is_chat: bool) -> Response:
    given = await read_schema(request, OllamaBody)
    body = given.openai()
    if body is None:
        state = state_of(request)
        async with state.using(state.find(given.name)) as loaded:
            answer = _answer(loaded.facts.name, is_chat, Reply(), ())
        return reply({**answer, "done": True, "done_reason": "load"})
    return await respond(request, _Run, body, body.texts, is_chat=is_chat)


async def chat(request: HttpRequest) -> Response:
    """Answer a conversation in Ollama's form."""
    return await _respond(request, is_chat=True)


async def generate(request: HttpRequest) -> Response:
    """Answer a question or continue a text in Ollama's form."""
    return await _respond(request, is_chat=False)


def _described(facts: ModelFacts) -> dict[str, Any]:
    n = facts.n_params
    return {
        "name": facts.name, "model": facts.name, "modified_at": _time(facts.created),
        "size": facts.n_bytes, "context_length": facts.n_ctx, "details": {
            "format": "gguf", "family": facts.family, "families": [facts.family],
            "parameter_size": f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M",
            "quantization_level": "",
        },
        "digest": sha256(f"{facts.name} {n} {facts.created}".encode()).hexdigest(),
    }  # fmt: skip


async def tags(request: HttpRequest) -> Response:
    """List the models in Ollama's form."""
    return reply({"models": [_described(one.facts) for one in state_of(request).backend.models]})


async def running(request: HttpRequest) -> Response:
    """List the models in memory in Ollama's form."""
    found = state_of(request).backend.peek()
    return reply({"models": [_described(found.facts)] if found else []})


async def show(request: HttpRequest) -> Response:
    """Describe a model in Ollama's form."""
    given = await read_schema(request, OllamaBody)
    facts = state_of(request).find(given.name).facts
    info = {
        "general.architecture": facts.family,
        f"{facts.family}.context_length": facts.n_ctx,
        f"{facts.family}.embedding_length": facts.n_embd,
    }
    able = ["completion", "tools", *["thinking"] * ("think" in facts.template)]
    able += ["vision"] * facts.reads_pictures + ["insert"] * facts.fills_gaps
    more = {"template": facts.template, "model_info": info, "capabilities": able}
    return reply({**_described(facts), **more})


async def version(request: HttpRequest) -> Response:
    """Tell of which version of Ollama this is the interface."""
    return reply({"version": _VERSION})


TABLE = RouteTable(
    [
        Operation("/api/chat", chat, OllamaBody, streams=LINES),
        Operation("/api/generate", generate, OllamaBody, streams=LINES),
        Operation("/api/show", show, OllamaBody),
        Operation("/api/tags", tags),
        Operation("/api/ps", running),
        Operation("/api/version", version),
    ],
    error_body=_error,
    error_schema={"type": "object", "required": ["error"]},
    prefixes=("/api/",),
)
