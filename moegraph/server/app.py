"""The web application: its routes, its guards, and what becomes of errors."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from . import anthropic, completions, info, llamacpp, ollama, openai_chat, responses
from .answers import ClientLeft
from .errors import ApiError, openai_body, public_error
from .guards import Gate, Guard
from .logs import WARNING, RequestLog
from .replies import reply
from .state import RouteTable, ServerState

# The status that servers log for a client that left; it never reaches one.
_LEFT = 499
_EXPOSED = ("X-Request-Id", "Retry-After", WARNING)


# A new interface adds its table here; the first that fits a path writes its errors.
TABLES: tuple[RouteTable, ...] = (
    openai_chat.TABLE, completions.TABLE, llamacpp.TABLE, responses.TABLE, anthropic.TABLE,
    ollama.TABLE, info.TABLE, info.ABSENT, info.PAGE,
)  # fmt: skip


def build_site(state: ServerState, guard: Guard) -> Starlette:
    """Return the application with every interface."""
    tables = (*TABLES, info.openapi_table(TABLES))
    public = frozenset(path for table in tables for path in table.public)
    middleware = [Middleware(RequestLog)]
    if guard.origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(guard.origins), allow_headers=["*"],
                allow_methods=["GET", "POST", "DELETE"], expose_headers=list(_EXPOSED),
            )
        )  # fmt: skip
    # Errors are answered here: starlette would answer them outside of all middleware, and raise
    # them again.
    middleware.append(
        Middleware(
            Gate, guard=guard, public=public, answer=_answer_failure,
            held_bytes=state.limits.held_bytes,
        )
    )  # fmt: skip
    app = Starlette(
        routes=[route for table in tables for route in table.routes],
        middleware=middleware,
        exception_handlers={HTTPException: _answer_unrouted},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _answer_failure(path: str, failure: Exception) -> Response:
    """Return the response to a request for a path whose handler raised."""
    if isinstance(failure, ClientLeft):
        return Response(status_code=_LEFT)
    return _answer(path, public_error(failure, path))


def _answer(path: str, error: ApiError) -> Response:
    """Return an error in the form that the interface of its path has."""
    bodies = [table.error_body for table in TABLES if path.startswith(table.prefixes)]
    body = dict((bodies[0] if bodies else openai_body)(error))
    return reply(body, status=error.status, headers=error.headers)


async def _answer_unrouted(request: HttpRequest, failure: Exception) -> Response:
    if not isinstance(failure, HTTPException):
        raise failure
    return _answer(request.url.path, _routing_error(request, failure))


def _routing_error(request: HttpRequest, failure: HTTPException) -> ApiError:
    method, path = request.method, request.url.path[:200]
    if failure.status_code == 404:
        message = f"there is no {method} {path!a}{_near(request)}"
        return ApiError(404, message, code="unknown_path")
    if failure.status_code == 405:
        message = f"{path!a} takes no {method}"
        return ApiError(405, message, code="method_not_allowed", headers=failure.headers)
    return ApiError(failure.status_code, failure.detail, headers=failure.headers)


def _near(request: HttpRequest) -> str:
    """Return a hint at the path that a client meant whose address lacks /v1, or has it twice."""
    path = request.url.path
    known = {getattr(route, "path", "") for route in request.app.routes}
    meant = (path.removeprefix("/v1"), f"/v1{path}", path.rstrip("/"))
    return next((f"; there is {one}" for one in meant if one != path and one in known), "")
