"""What the server shows of itself: health, models, slots, metrics, its API, the page at /."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..loop.requests import ServiceStatus, SlotStatus
from ..sampling import SamplingParams
from .errors import ApiError
from .guards import owner_of
from .host import Model, unavailable
from .metrics import CONTENT_TYPE
from .replies import reply
from .state import Operation, RouteTable, ServerState, operations, state_of


async def health(request: HttpRequest) -> Response:
    """Tell whether requests are answered: 200, or 503 with the reason."""
    backend = state_of(request).backend
    if backend.condition not in ("ready", "sleeping"):
        raise unavailable(backend.condition, backend.reason)
    return reply({"status": "ok"})


async def models(request: HttpRequest) -> Response:
    """List the models."""
    state = state_of(request)
    found = [model_object(state, one) for one in state.backend.models]
    ends = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
    return reply({"object": "list", "data": found, **ends})


async def model(request: HttpRequest) -> Response:
    """Describe the model that has the name in the path."""
    state = state_of(request)
    return reply(model_object(state, state.find(request.path_params["name"], exactly=True)))


def model_object(state: ServerState, model: Model) -> dict[str, Any]:
    """Return OpenAI's model object, with the fields of Anthropic, llama-server and vLLM."""
    facts = model.facts
    created = facts.created or state.started
    return {
        "id": facts.name,
        "object": "model",
        "created": created,
        "owned_by": "moegraph",
        "type": "model",
        "display_name": facts.name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": facts.n_ctx,
        "max_model_len": facts.n_ctx,
        "lifecycle": "active",
        "status": {"value": state.backend.status(model)},
        "meta": {
            "n_vocab": facts.n_vocab,
            "n_ctx_train": facts.n_ctx_train,
            "n_embd": facts.n_embd,
            "n_params": facts.n_params,
            "size": facts.n_bytes,
        },
    }


async def props(request: HttpRequest) -> Response:
    """Return llama-server's properties; no path of this machine is among them."""
    state = state_of(request)
    facts, defaults = state.backend.facts, state.find(state.backend.facts.name).defaults
    biases = [[token, max(b, -1e9)] for token, b in defaults.sampling.logit_bias.items()]
    params = {**sampling_object(defaults.sampling, defaults.max_tokens), "logit_bias": biases}
    return reply(
        {
            "default_generation_settings": {"n_ctx": facts.n_ctx, "params": params},
            "total_slots": facts.n_slots,
            "model_alias": facts.name,
            "chat_template": facts.template,
            "bos_token": facts.bos_token,
            "eos_token": facts.eos_token,
            "modalities": {"vision": facts.reads_pictures, "audio": False},
            "build_info": f"moegraph {__version__}",
            "is_sleeping": state.backend.condition == "sleeping",
            "moegraph": {"device": facts.device, "settings": dict(facts.settings)},
        }
    )


def sampling_object(sampling: SamplingParams, max_tokens: int | None) -> dict[str, Any]:
    """Return llama-server's names and values of samplers."""
    params = asdict(sampling)
    del params["logit_bias"]
    seed, limit = params.pop("seed"), -1 if max_tokens is None else max_tokens
    return {
        "max_tokens": limit, "n_predict": limit, "seed": -1 if seed is None else seed, **params,
    }  # fmt: skip


async def slots(request: HttpRequest) -> Response:
    """Return what each slot does, in llama-server's form and without its text.

    Of another client's request only the counts are told.
    """
    state = state_of(request)
    loaded = state.backend.peek()
    if loaded is None:
        return reply([])
    status: ServiceStatus = loaded.service.status()
    common = {"n_ctx": loaded.facts.n_ctx, "speculative": status.spec is not None}
    client = owner_of(request)
    return reply([{"id": slot.id, **common, **_slot(slot, client)} for slot in status.slots])


def _slot(slot: SlotStatus, client: str) -> dict[str, Any]:
    asked, found = slot.request, {"is_processing": slot.state != "idle", "state": slot.state}
    if asked is None:
        return found
    n_left = -1 if asked.max_tokens is None else asked.max_tokens - slot.n_generated
    params = {**sampling_object(asked.sampling, asked.max_tokens), "ignore_eos": asked.ignore_eos}
    own = {"request": asked.name, "params": params} if asked.client == client else {}
    return {
        **found,
        **own,
        "id_task": slot.number,
        "n_prompt_tokens": slot.n_prompt,
        "n_prompt_tokens_processed": max(slot.n_read - slot.n_cached, 0),
        "n_prompt_tokens_cache": slot.n_cached,
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": slot.has_new_line,
                "n_remain": n_left,
                "n_decoded": slot.n_generated,
            }
        ],
    }


async def metrics(request: HttpRequest) -> Response:
    """Return figures for Prometheus; with ?peek, means since it asked last do not begin anew."""
    state = state_of(request)
    page = state.metrics.page(is_scrape="peek" not in request.query_params)
    found = Response(page, media_type=CONTENT_TYPE)
    # some clients of llama-server look for the very letters
    found.raw_headers.append((b"Process-Start-Time-Unix", b"%d" % state.started))
    return found


TABLE = RouteTable(
    [
        *operations("/v1/health", health),
        *operations("/v1/models", models),
        Operation("/v1/models/{name:path}", model),
        Operation("/props", props),
        Operation("/slots", slots),
        Operation("/metrics", metrics, answer="text/plain"),
    ],
    public=("/v1/health", "/health"),
)


_EMBEDDINGS = "/embedding", "/embeddings", "/v1/embeddings", "/api/embed", "/api/embeddings"
_INSTEAD = {
    **dict.fromkeys(_EMBEDDINGS, "the model makes no embeddings"),
    **dict.fromkeys(("/v1/rerank", "/v1/reranking", "/rerank"), "the model makes no rankings"),
    "/v1/audio/transcriptions": "the model reads only text",
    "/v1/audio/speech": "the model writes only text",
    "/v1/images/generations": "the model writes only text",
    "/v1/moderations": "the model does not moderate",
}
_OLLAMA = "of Ollama's interface there are chat, generate, tags, show, ps and version"


async def explain(request: HttpRequest) -> Response:
    """Refuse with what to use instead."""
    path = request.url.path
    # not 501: OpenAI's clients would ask again, twice, and then tell of a fault of the server
    instead = _INSTEAD.get(path, _OLLAMA)
    raise ApiError(404, f"{path} is not served: {instead}", code="not_served")


ABSENT = RouteTable(
    [
        *(Route(path, explain, methods=["POST"]) for path in _INSTEAD),
        Route("/api/{name:path}", explain, methods=["GET", "POST", "DELETE"]),
    ]
)


_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")
# What may become of every request, and of one with a body or with a name in its path.
_ERRORS = {
    401: "The API key is missing or wrong.",
    403: "The header Host names another server.",
    415: "The body is compressed, or its type is not application/json.",
    500: "The engine failed.",
    503: "The model is not there, or there is no room for the request.",
}
_OF_BODIES = {
    400: "The body is not JSON, a field is wrong, or the prompt does not fit.",
    404: "There is no such model, or no such response.",
    408: "The body took too long.",
    413: "The body is too large.",
    429: "Too many requests wait.",
}
_OF_NAMES = {404: "There is nothing of this name."}
Schemas = Mapping[type[BaseModel], Mapping[str, Any]]


def document(tables: Sequence[RouteTable]) -> dict[str, Any]:
    """Return the OpenAPI document of tables of routes."""
    found = [(t, r) for t in tables for r in t.routes if isinstance(r, Operation)]
    models = dict.fromkeys(body for _, route in found for body in route.bodies)
    refs, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas = {model: refs[model, "validation"] for model in models}
    paths: dict[str, dict[str, Any]] = {}
    for table, route in found:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(table, route, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "moegraph serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        # without keys, the server lets in everyone
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _operation(table: RouteTable, route: Operation, path: str, schemas: Schemas) -> dict[str, Any]:
    names = [name for name, _ in _PARAMETER.findall(route.path)]
    errors = _ERRORS | (_OF_BODIES if route.bodies else {}) | (_OF_NAMES if names else {})
    answers: dict[str, Any] = {route.answer: {"schema": {}}}
    if route.streams:
        answers[route.streams] = {}
    error = {"application/json": {"schema": table.error_schema}}
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_"),
        "summary": (route.endpoint.__doc__ or "").strip().partition("\n")[0],
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            **{
                str(status): {"description": words, "content": error}
                for status, words in sorted(errors.items())
            },
        },
    }
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.bodies:
        forms = [schemas[body] for body in route.bodies]
        schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
        found["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": schema}},
        }  # fmt: skip
    if route.path in table.public:
        found["security"] = []
    return found


def openapi_table(tables: Sequence[RouteTable]) -> RouteTable:
    """Return the route of the document of other tables, and of itself."""
    own: list[RouteTable] = []

    async def describe(request: HttpRequest) -> Response:
        """Return this document."""
        return reply(document([*tables, *own]))

    own.append(RouteTable([Operation("/openapi.json", describe)]))
    return own[0]


# The files of a chat in the browser.
FILES = Path(__file__).resolve().parent / "page"
_FIRST = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}
# Whatever a model writes, the page runs only the server's own scripts and asks only this server;
# trusted-types refuses to make HTML of text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",  # pictures that the user sends
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # another version of the program may answer next
    "Cache-Control": "no-cache",
}


def _page() -> RouteTable:
    """Return a route for each file, whose bytes are read now: no path of a client is opened."""
    files = (path for path in sorted(FILES.rglob("*")) if path.suffix in _TYPES)
    found = {path.relative_to(FILES).as_posix(): path for path in files}
    paths = {f"/page/{name}": path for name, path in found.items() if name != _FIRST}
    paths["/"] = found[_FIRST]
    return RouteTable([_route(url, path) for url, path in paths.items()], public=tuple(paths))


def _route(url: str, path: Path) -> Route:
    content, kind = path.read_bytes(), _TYPES[path.suffix]

    async def send(request: HttpRequest) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return Route(url, send)


PAGE = _page()
