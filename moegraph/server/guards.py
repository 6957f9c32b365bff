"""Which requests are let in: their key, their host, and the type of their body."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ConfigError
from .errors import RETRY_S, ApiError, forget_frames

VARIABLE = "MOEGRAPH_API_KEY"
_MAX_BYTES = 1 << 20


def read_keys(given: Sequence[str], file: Path | None, variable: str | None) -> list[str]:
    """Return all keys. given: of the command line; commas part several. variable: of VARIABLE."""
    keys = [key.strip() for text in given for key in text.split(",")]
    if file is not None:
        keys += _lines(file)
    elif not given and variable:
        keys += [key.strip() for key in variable.split(",")]
    for number, key in enumerate(keys, 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key {number} is empty or has a character that a header cannot carry; "
                "use letters, digits and signs without spaces"
            )
    return keys


def _lines(file: Path) -> list[str]:
    try:
        with open(file, "rb") as stream:
            text = stream.read(_MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{file}: cannot read keys: {why}") from None
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"{file}: it has no key; write one in each line")
    return keys


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_JSON = "application/json"
# An address in brackets, or a name; then a port, perhaps.
_HOST = re.compile(r"(?:\[([^\[\]@/\s]+)\]|([a-z0-9._~-]*))(?::[0-9]*)?")
_OWNER = "moegraph.owner"
Answer = Callable[[str, Exception], Response]


class Keys:
    """The keys that clients may use; none: every client is let in."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Take other keys from now on."""
        self._digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: bytes) -> str | None:
        """Return the name of the client whose key this is; None: the key is not one of ours.

        The name is a hash of the key. The time does not depend on how much of a key fits.
        """
        digest, found = hashlib.sha256(key).hexdigest(), False
        for ours in self._digests:
            found |= hmac.compare_digest(digest, ours)
        return digest if found else None


@lru_cache(1024)
def cache_owner(owner: str) -> str:
    """Return under which name a cache keeps what a client sent: a slow hash of the client's name.

    It is written to disk, where a key must not be found by trying many.
    """
    if not owner:
        return ""
    return hashlib.scrypt(owner.encode(), salt=b"moegraph", n=1 << 14, r=8, p=1, dklen=16).hex()


def owner_of(request: HttpRequest) -> str:
    """Return the name of the client of a request, one for each key; "" where keys are not used."""
    found: str = request.scope.get(_OWNER, "")
    return found


@dataclass(frozen=True)
class Guard:
    """Whom the server lets in.

    hosts: names that the header Host may have; None: any name. any_address: it may also be any IP
    address, as no page can make a browser send one that is not its own. origins: of pages that may
    use the server.
    """

    keys: Keys
    hosts: frozenset[str] | None = frozenset(LOOPBACK_NAMES)
    any_address: bool = False
    origins: tuple[str, ...] = ()

    def admits_host(self, header: str) -> bool:
        """Return whether a page that had its own name lead here could not have sent this Host."""
        name = host_name(header)
        if self.hosts is None or name in self.hosts:
            return True
        return self.any_address and is_address(name or "")


def host_name(header: str) -> str | None:
    """Return the name in a Host header, without its port and in lower case; None: it has none."""
    found = _HOST.fullmatch(header.lower())
    return None if found is None else (found[1] or found[2].rstrip("."))


def is_address(name: str) -> bool:
    """Return whether a name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Gate:
    """Answer requests that are not let in, or that fail; pass on the others.

    public: paths that need no key. answer: makes the response from a path and an error. held_bytes:
    of the bodies of all requests that are being served; one that is too much is refused.
    """

    def __init__(
        self, app: ASGIApp, guard: Guard, public: frozenset[str], answer: Answer,
        held_bytes: int,
    ) -> None:  # fmt: skip
        self._app = app
        self._held, self._limit = 0, held_bytes
        self._guard = guard
        self._public = public
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False
        n_bytes = 0

        async def counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_new = len(message.get("body", b""))
            n_bytes += n_new
            self._held += n_new
            if n_new and self._held > self._limit:
                raise ApiError(
                    503, "too many large requests are being served", code="too_large_together",
                    retry_after_s=RETRY_S, headers={"Connection": "close"},
                )  # fmt: skip
            return message

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        error: Exception | None = self._problem(scope)
        if error is None:
            try:
                await self._app(scope, counted, watched)
            except Exception as failure:
                if has_begun:
                    raise
                error = failure
            finally:
                self._held -= n_bytes
        if error is not None:
            response = self._answer(scope["path"], error)
            forget_frames(error)
            await response(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if host_name(headers.get("host", "")) is None:
            close = {"Connection": "close"}
            return ApiError(400, "the header Host is not a name and a port", headers=close)
        if not self._guard.admits_host(headers.get("host", "")):
            return ApiError(
                403, "the header Host does not name this server; start it with --alias-host NAME "
                "to let it have this name", code="unknown_host",
            )  # fmt: skip
        if self._guard.keys and scope["path"] not in self._public:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            key = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
            owner = self._guard.keys.owner((key or "").encode("latin-1", "replace"))
            if owner is None:
                words = "no API key was given" if key is None else "the API key is wrong"
                asks = {"WWW-Authenticate": "Bearer"}
                return ApiError(401, words, code="invalid_api_key", headers=asks)
            scope[_OWNER] = owner
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        # clients of slots may send no body; every page that sends a POST has an origin
        is_slots = scope["path"].startswith("/slots/") and "origin" not in headers
        if scope["method"] == "POST" and media_type != _JSON and not is_slots:
            header = f"Content-Type: {_JSON}"
            message = f"a POST needs the header {header}; with curl add -H '{header}'"
            return ApiError(415, message, code="unsupported_media_type")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            return ApiError(
                415, "compressed bodies are not read; send the body without Content-Encoding",
                code="unsupported_media_type",
            )  # fmt: skip
        return None
