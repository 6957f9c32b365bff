"""Paths that other servers have and this one does not: an error that says so."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from .app import RouteTable
from .errors import ApiError

_INSTEAD = {
    "/completion": "use /v1/completions",
    "/infill": "the model is not trained to fill gaps; use /v1/completions",
    "/embedding": "the model makes no embeddings",
    "/embeddings": "the model makes no embeddings",
    "/v1/embeddings": "the model makes no embeddings",
    "/v1/rerank": "the model makes no rankings",
    "/v1/reranking": "the model makes no rankings",
    "/rerank": "the model makes no rankings",
    "/v1/audio/transcriptions": "the model reads only text",
    "/v1/audio/speech": "the model writes only text",
    "/v1/images/generations": "the model writes only text",
    "/v1/moderations": "the model does not moderate",
}
_OLLAMA = "Ollama's interface is not served; use OpenAI's, such as /v1/chat/completions, /v1/models"


async def explain(request: HttpRequest) -> Response:
    """Refuse with what to use instead."""
    path = request.url.path
    # not 501: OpenAI's clients would ask again, twice, and then tell of a fault of the server
    instead = _INSTEAD.get(path, _OLLAMA)
    raise ApiError(404, f"{path} is not served: {instead}", code="not_served")


TABLE = RouteTable(
    [
        *(Route(path, explain, methods=["POST"]) for path in _INSTEAD),
        Route("/api/{name:path}", explain, methods=["GET", "POST", "DELETE"]),
    ]
)
