"""llama-server's own interface: /completion, /infill, which editors ask, and slots in files."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import TextRequest
from ..loop.requests import Step
from ..text.chat.parts import ContentPart, Reply
from ..text.infill import Gap
from .answers import Update
from .completions import TextBody, TextFields
from .errors import ApiError
from .exchange import Completion, chat_logprobs, finish_reason, respond, timings_object
from .guards import cache_owner, owner_of
from .info import sampling_object
from .replies import EVENTS, reply
from .schemas import LIMITS, Body, Defaults
from .state import Operation, RouteTable, read_schema, state_of

# Actions on slots, and the names of what they return.
_ACTIONS = {
    "save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read"), "erase": ("n_erased",),
}  # fmt: skip
_ODD = re.compile('[/\\\\:*?"<>|\uff0e\ufffd\u2215\u2216]|\\.\\.|[ .]$|^ |^$')


class Extra(Body):
    """A part of another file."""

    text: str
    filename: str = "tmp"


class InfillBody(TextFields):
    """The text around a gap. prompt: what is in its line already."""

    input_prefix: str
    input_suffix: str
    input_extra: list[Extra] = Field(default_factory=list, max_length=LIMITS.messages)
    prompt: str = ""

    def prompts(self) -> list[TextRequest]:
        """Return what the answers follow."""
        extra = [(one.filename, one.text) for one in self.input_extra]
        return [TextRequest(gap=Gap(self.input_prefix, self.input_suffix, self.prompt, extra))]


@dataclass(kw_only=True)
class _Run(Completion):
    """Answers in the making."""

    body: TextFields
    defaults: Defaults
    _with_line_end: set[int] = field(default_factory=set, init=False)

    id_prefix = kind = chunk_kind = ""
    empty: ClassVar = {"content": "", "tokens": []}
    done = b""

    async def whole(self) -> Any:
        """Return the answer, or a list of several."""
        choices = (await super().whole())["choices"]
        return choices if len(choices) > 1 else choices[0]

    def choice(self, index: int, reply: Reply, last: Step) -> dict[str, Any]:
        tokens = last.tokens if self.body.return_tokens else ()
        return self._ended(index, reply.content, replace(last, tokens=tokens))

    def chunk(self, index: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return an event with these fields."""
        usage = self.answers.usages[index]
        counts = {"tokens_predicted": usage.n_generated, "tokens_evaluated": usage.n_prompt}
        return {"index": index, "id_slot": -1, "stop": False, **counts, **fields}

    def _part(self, index: int, text: str, step: Step) -> dict[str, Any]:
        found: dict[str, Any] = {"content": text, "tokens": step.tokens}
        if step.logprobs:
            told = chat_logprobs(step.logprobs, self.loaded.chat.tokenizer)
            found["completion_probabilities"] = told["content"]
        if "\n" in text:
            self._with_line_end.add(index)
        return self.chunk(index, found)

    def step(self, update: Update) -> tuple[list[dict[str, Any]], str | None]:
        """Return the events of a step; the last has what the answer has cost, and no text."""
        index, step, chunks = update.index, update.step, list[dict[str, Any]]()
        text = "".join(part.text for part in update.parts if isinstance(part, ContentPart))
        if text or step.tokens:
            chunks.append(self._part(index, text, step))
            if self.body.timings_per_token:
                chunks[0]["timings"] = timings_object(step.usage)
        if update.is_last:
            chunks.append(self._ended(index, "", replace(step, tokens=(), logprobs=())))
        return chunks, finish_reason(step)

    def _ended(self, index: int, text: str, step: Step) -> dict[str, Any]:
        """Return an answer that has ended, or the fields of it that are wanted."""
        body, usage = self.body, self.answers.usages[index]
        drawn, limit = body.drawn(self.defaults), body.limit(self.defaults.max_tokens)
        params = {name: drawn[name] for name in ("stop", "ignore_eos")}
        params["logit_bias"] = body.logit_bias or []
        n_held = usage.n_prompt + max(usage.n_generated - 1, 0) - usage.n_dropped
        is_stop, is_full = step.finish_reason == "stop", n_held >= self.loaded.facts.n_ctx
        found = {
            **self._part(index, text, step),
            "stop": True,
            "model": self.loaded.facts.name,
            "generation_settings": {**sampling_object(drawn["sampling"], limit), **params},
            "has_new_line": index in self._with_line_end,
            "truncated": usage.n_dropped > 0 or (is_full and not is_stop),
            "stop_type": ("word" if step.stop else "eos") if is_stop else "limit",
            "stopping_word": step.stop or "",
            "tokens_cached": n_held,
            "timings": timings_object(usage),
        }
        if isinstance(body, TextBody):
            found["prompt"] = body.shown(index, self.loaded.chat.tokenizer)
        if not body.response_fields:
            return found
        inner = [(name, one) for name, one in found.items() if isinstance(one, dict)]
        found |= {f"{name}/{key}": value for name, one in inner for key, value in one.items()}
        return {path: found[path] for path in body.response_fields if path in found}


async def _respond(request: HttpRequest, body: TextFields) -> Response:
    defaults = state_of(request).find(body.model).defaults
    body.logprobs = body.logprobs or None  # 0 is none here
    return await respond(request, _Run, body, body.texts, body.n_choices, defaults=defaults)


async def complete(request: HttpRequest) -> Response:
    """Continue texts in llama-server's form, at once or as they are written."""
    return await _respond(request, await read_schema(request, TextBody))


async def infill(request: HttpRequest) -> Response:
    """Write what belongs between two texts."""
    return await _respond(request, await read_schema(request, InfillBody))


class SlotBody(Body):
    """A file of --slot-save-path; the name of the model, where there are several."""

    filename: str
    model: str | None = None


async def act(request: HttpRequest) -> Response:
    """Save what a slot holds to a file, restore or erase it, in llama-server's form."""
    state, slot, began = state_of(request), request.path_params["slot"], time.perf_counter()
    action = request.query_params.get("action", "")
    if action not in _ACTIONS:
        raise ApiError(400, "action is none of save, restore, erase", param="action")
    asked = SlotBody(filename="-") if action == "erase" else await read_schema(request, SlotBody)
    name = asked.filename  # by the rules of `fs_validate_filename` in common/common.cpp
    if _ODD.search(name) or not name.isprintable() or len(name.encode()) > 255:
        raise ApiError(400, "filename is no name of a file", param="filename")
    async with state.using(state.find(asked.model)) as loaded:
        owner = cache_owner(owner_of(request)) if state.cache_by_key else ""
        done = loaded.service.act(action, slot, name, owner)
        if done is None:
            message = "this server saves no slots; start it with --slot-save-path DIR"
            raise ApiError(501, message, kind="not_supported_error")
        counts = await asyncio.wrap_future(done)
    ms = {f"{action}_ms": (time.perf_counter() - began) * 1e3}
    more = {} if action == "erase" else {"filename": asked.filename, "timings": ms}
    return reply({"id_slot": slot, **dict(zip(_ACTIONS[action], counts)), **more})


TABLE = RouteTable(
    [
        Operation("/completion", complete, TextBody, streams=EVENTS),
        Operation("/completions", complete, TextBody, streams=EVENTS),
        Operation("/infill", infill, InfillBody, streams=EVENTS),
        Operation("/slots/{slot:int}", act, SlotBody),
    ]
)
