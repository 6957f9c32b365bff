"""Texts and tokens: /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from .app import Operation, RouteTable
from .body import fit, read_object, read_schema
from .contract import ChatModel
from .reply import reply
from .schemas.chat import ChatBody
from .schemas.texts import DetokenizeBody, TokenizeBody
from .state import state_of


async def tokenize(request: HttpRequest) -> Response:
    """Return the ids of a text, or those of the prompt that a chat would have."""
    value = await read_object(request)
    body = fit(request, TokenizeBody, value)
    state = state_of(request)
    chat = None if value.get("messages") is None else fit(request, ChatBody, value).chat(state)
    async with state.model() as loaded:
        model = loaded.chat
        ids = await state.work(
            lambda: model.prompt(chat).encoded.ids if chat else _ids(model, body)
        )
        tokens: list[Any] = ids
        if body.with_pieces:
            tokens = [{"id": one, "piece": _piece(loaded.chat.piece(one))} for one in ids]
        return reply({"tokens": tokens, "count": len(ids), "max_model_len": loaded.facts.n_ctx})


def _ids(model: ChatModel, body: TokenizeBody) -> list[int]:
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
    """Return the prompt that a chat would have."""
    body = await read_schema(request, ChatBody)
    state = state_of(request)
    chat = body.chat(state)
    async with state.model() as loaded:
        prompt = await state.work(lambda: loaded.chat.prompt(chat))
    return reply({"prompt": prompt.text})


TABLE = RouteTable(
    [
        Operation("/tokenize", tokenize, TokenizeBody, ChatBody),
        Operation("/detokenize", detokenize, DetokenizeBody),
        Operation("/apply-template", apply_template, ChatBody),
    ]
)
