"""Texts and tokens: /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import ChatModel
from .openai_chat import ChatBody
from .replies import encode, reply
from .schemas import Body
from .state import Operation, RouteTable, fit, read_object, read_schema, state_of


class TokenizeBody(Body):
    """A text under llama-server's name or vLLM's; without one, the body is that of a chat."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """Ids that become a text."""

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


# Tokens that are written as JSON at once; no other thread runs Python meanwhile.
_SLICE = 10_000


async def tokenize(request: HttpRequest) -> Response:
    """Return the ids of a text, or those of the prompt that a chat would have."""
    value = await read_object(request)
    body = fit(TokenizeBody, value)
    state = state_of(request)
    is_chat = value.get("messages") is not None
    async with state.model() as loaded:
        model = loaded.chat

        def answer() -> bytes:
            if is_chat:
                ids = model.prompt(fit(ChatBody, value).chat(state)).encoded.ids
            else:
                ids = _ids(model, body)
            found = _encoded_tokens(ids, model if body.with_pieces else None)
            count, n_ctx = len(ids), loaded.facts.n_ctx
            return b'{"tokens":[%b],"count":%d,"max_model_len":%d}' % (found, count, n_ctx)

        return Response(await state.work(answer), media_type="application/json")


def _encoded_tokens(ids: list[int], model: ChatModel | None) -> bytes:
    """Return ids as JSON without its brackets, with their pieces if a model is given."""
    parts = list[bytes]()
    for at in range(0, len(ids), _SLICE):
        tokens: list[Any] = ids[at : at + _SLICE]
        if model:
            tokens = [{"id": one, "piece": _piece(model.piece(one))} for one in tokens]
        parts.append(encode(tokens)[1:-1])
    return b",".join(parts)


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
    async with state.model() as loaded:
        prompt = await state.work(lambda: loaded.chat.prompt(body.chat(state)))
    return reply({"prompt": prompt.text})


TABLE = RouteTable(
    [
        Operation("/tokenize", tokenize, TokenizeBody, ChatBody),
        Operation("/detokenize", detokenize, DetokenizeBody),
        Operation("/apply-template", apply_template, ChatBody),
    ]
)
