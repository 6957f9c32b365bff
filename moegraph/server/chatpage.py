"""The page at /: a chat in the browser, from files of the package."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from .state import RouteTable

FILES = Path(__file__).resolve().parent / "page"
_START = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Whatever a model writes, the page runs only the server's own scripts and asks only this server;
# trusted-types refuses to make HTML of text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
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


def _table() -> RouteTable:
    """Return a route for each file, whose bytes are read now: no path of a client is opened."""
    found = {path.name: path for path in sorted(FILES.iterdir()) if path.suffix in _TYPES}
    paths = {f"/page/{name}": path for name, path in found.items() if name != _START}
    paths["/"] = found[_START]
    return RouteTable([_route(url, path) for url, path in paths.items()], public=tuple(paths))


def _route(url: str, path: Path) -> Route:
    content, kind = path.read_bytes(), _TYPES[path.suffix]

    async def send(request: HttpRequest) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return Route(url, send)


TABLE = _table()
