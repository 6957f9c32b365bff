"""The web application: its routes, its guards, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from .body import BODIES
from .errors import OPENAI_ERROR, ApiError, openai_body, told
from .guards import Gate, Guard
from .reply import reply
from .requestlog import WARNING, RequestLog
from .state import ServerState
from .talk import ClientLeft

# The status that servers log for a client that left; it never reaches one.
_LEFT = 499
Handler = Callable[[HttpRequest], Awaitable[Response]]
_EXPOSED = ("X-Request-Id", "Retry-After", WARNING)


class Operation(Route):
    """A route that the OpenAPI document describes, in the words of its handler's docstring.

    bodies: what `read_schema` may read of a request; a request with a body is a POST. answer: the
    content type of what succeeds. streams: it may also be a stream of events.
    """

    def __init__(
        self, path: str, handler: Handler, *bodies: type[BaseModel], method: str = "",
        answer: str = "application/json", streams: bool = False,
    ) -> None:  # fmt: skip
        self.method = method or ("POST" if bodies else "GET")
        super().__init__(path, handler, methods=[self.method])
        self.bodies, self.answer, self.streams = bodies, answer, streams

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether a request is for this route, and what its handler finds in its scope."""
        match, found = super().matches(scope)
        return match, {**found, BODIES: self.bodies}


def operations(paths: Sequence[str], *given: Any, **more: Any) -> list[Operation]:
    """Return the same operation at several paths."""
    return [Operation(path, *given, **more) for path in paths]


def either(path: str) -> tuple[str, str]:
    """Return a path that begins with /v1, and the path without it."""
    return path, path.removeprefix("/v1")


@dataclass(frozen=True)
class RouteTable:
    """The routes of one interface, and how it writes errors.

    error_schema: what error_body returns. prefixes: paths whose errors have this form, also where
    no route fits; none for OpenAI's form. public: paths that need no key.
    """

    routes: Sequence[BaseRoute]
    error_body: Callable[[ApiError], Mapping[str, Any]] = openai_body
    error_schema: Mapping[str, Any] = field(default_factory=lambda: OPENAI_ERROR)
    prefixes: tuple[str, ...] = ()
    public: tuple[str, ...] = ()


def build_app(state: ServerState, tables: Sequence[RouteTable], guard: Guard) -> Starlette:
    """Return the application that serves these routes with this state."""
    forms = _ErrorForms(tables)
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
            Gate, guard=guard, public=public, answer=forms.answer_failure,
            held_bytes=state.limits.held_bytes,
        )
    )  # fmt: skip
    app = Starlette(
        routes=[route for table in tables for route in table.routes],
        middleware=middleware,
        exception_handlers={HTTPException: forms.handle},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


class _ErrorForms:
    """Answers that errors become, in the form that the interface of their path expects."""

    def __init__(self, tables: Sequence[RouteTable]) -> None:
        self._tables = tables

    def answer_failure(self, path: str, failure: Exception) -> Response:
        """Return the response to a request for a path whose handler raised."""
        if isinstance(failure, ClientLeft):
            return Response(status_code=_LEFT)
        return self._answer(path, told(failure, path))

    def _answer(self, path: str, error: ApiError) -> Response:
        bodies = [t.error_body for t in self._tables if path.startswith(t.prefixes)]
        body = dict((bodies[0] if bodies else openai_body)(error))
        return reply(body, status=error.status, headers=error.headers)

    async def handle(self, request: HttpRequest, failure: Exception) -> Response:
        """Answer a request that no route takes."""
        if not isinstance(failure, HTTPException):
            raise failure
        return self._answer(request.url.path, _routing_error(request, failure))


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
