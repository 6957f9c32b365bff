"""Texts and tokens: /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from .app import RouteTable
from .body import read_schema
from .contract import ChatModel
from .reply import reply
from .schemas.texts import DetokenizeBody, TemplateBody, TokenizeBody
from .state import state_of


async def tokenize(request: HttpRequest) -> Response:
    """Return the ids of a text, or of a conversation's prompt."""
    body = await read_schema(request, TokenizeBody)
    state = state_of(request)
    async with state.model() as loaded:
        ids = await state.work(lambda: _ids(loaded.chat, body))
        tokens: list[Any] = ids
        if body.with_pieces:
            tokens = [{"id": one, "piece": _piece(loaded.chat.piece(one))} for one in ids]
        return reply({"tokens": tokens, "count": len(ids), "max_model_len": loaded.facts.n_ctx})


def _ids(model: ChatModel, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        return model.tokenize(_rendered(model, body), add_special=False, parse_special=True)
    text = body.content if body.content is not None else body.prompt or ""
    parse = body.parse_special is not False
    return model.tokenize(text, add_special=bool(body.add_special), parse_special=parse)


def _piece(data: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if it is only a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: HttpRequest) -> Response:
    """Return the text of ids."""
    body = await read_schema(request, DetokenizeBody)
    state = state_of(request)
    async with state.model() as loaded:
        text = await state.work(lambda: loaded.chat.detokenize(body.tokens))
    return reply({"content": text, "prompt": text})


async def apply_template(request: HttpRequest) -> Response:
    """Return the prompt of a conversation."""
    body = await read_schema(request, TemplateBody)
    state = state_of(request)
    async with state.model() as loaded:
        prompt = await state.work(lambda: _rendered(loaded.chat, body))
    return reply({"prompt": prompt})


def _rendered(model: ChatModel, body: TemplateBody | TokenizeBody) -> str:
    messages = [message.plain() for message in body.messages or ()]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    return model.render(messages, tools, body.variables())


TABLE = RouteTable(
    [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
    ]
)
