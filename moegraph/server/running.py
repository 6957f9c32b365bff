"""The server as a process: its sockets, uvicorn with our limits, its signals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ConfigError, MoegraphError, NativeError
from .guards import is_address
from .host import ModelHost

# The head of a request must arrive within this time, so that no one holds connections for nothing.
HEAD_S = 20.0
_MAX_HEAD_BYTES = 64 << 10
MAX_CONNECTIONS = 1024
# Connections that are accepted before the first of them is looked at.
_AT_A_TIME = 128
_KEEP_ALIVE_S = 75
# After the requests have ended, connections get this time to send what is left.
_LINGER_S = 5
# Seconds after which a client that takes nothing of an answer is given up.
STALL_S = 60.0
# A machine that vanished does not say so. After these seconds of silence it is asked, as often, at
# this interval.
_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\n"
    b"Content-Length: 0\r\n\r\n"
)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # a name such as localhost has both: clients expect the old kind
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # the system finds out which clients have vanished; connections inherit it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.bind(address)
        sock.listen(MAX_CONNECTIONS)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use; choose another with --port, or 0 for a free one"
            ) from None
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
    return sock


def url_of(sock: socket.socket, host: str) -> str:
    """Return the address under which a browser on this machine finds a socket."""
    address, port = sock.getsockname()[:2]
    name = host if not is_address(host) else address
    if name in ("0.0.0.0", "::", ""):
        name = "127.0.0.1" if sock.family == socket.AF_INET else "::1"
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


# Where a head has a bare CR or LF, or a line that goes on with the next one.
_BAD_LINE = re.compile(rb"(?<!\r)\n|\r[^\n]|\r\n[ \t]")
_LENGTH = re.compile(rb"\ncontent-length:", re.I)
_CODING = re.compile(rb"\ntransfer-encoding:", re.I)


class StrictConnection(h11.Connection):
    """Reads no heads that another server may read differently, such as a proxy before this one.

    h11 reads lines that end with LF alone, folded lines, and a length beside a transfer coding.
    """

    def next_event(self) -> Any:
        """Return the next event."""
        if self.their_state is h11.IDLE:
            head, end, _ = self.trailing_data[0].partition(b"\r\n\r\n")
            if _BAD_LINE.search(head) or (end and _LENGTH.search(head) and _CODING.search(head)):
                raise h11.RemoteProtocolError("an ambiguous head", error_status_hint=400)
        return super().next_event()


class PatientProtocol(H11Protocol):
    """Uvicorn's protocol, which reads heads strictly and closes idle connections.

    They never complete a request's head, do not end a body that was refused, or do not read. If
    there are too many connections, the one that has asked nothing for longest gives way.
    """

    _heard_at = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.conn = StrictConnection(h11.SERVER, _MAX_HEAD_BYTES)

    def connection_made(self, transport: Any) -> None:
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._heard_at = self.loop.time()
        self._await_head()
        if len(self.connections) > _most_connections():
            self._make_room()

    def _make_room(self) -> None:
        others = [one for one in self.connections if one is not self]
        idle = [one for one in others if isinstance(one, PatientProtocol) and one._lacks_head()]
        if idle:
            min(idle, key=lambda one: one._heard_at).transport.abort()
        else:
            self.transport.write(_FULL)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        self._heard_at = self.loop.time()
        super().data_received(data)
        if not self._lacks_head():
            self._stop_waiting()
        elif self._head_timer is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection after the answer that is being made, but wait for no body."""
        super().shutdown()
        if self.conn.their_state is h11.SEND_BODY and not self.cycle.response_started:
            self.transport.close()

    def pause_writing(self) -> None:
        """Watch a client that reads more slowly than we write."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has read enough."""
        self._stop_watching()
        super().resume_writing()

    def _watch(self, n_unread: int) -> None:
        self._stall_timer = self.loop.call_later(STALL_S, self._check_progress, n_unread)

    def _stop_watching(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_progress(self, n_before: int) -> None:
        """Cut off a client that has taken nothing meanwhile."""
        n_unread = self.transport.get_write_buffer_size()
        if n_unread < n_before:
            self._watch(n_unread)
        else:
            self.transport.abort()

    def _lacks_head(self) -> bool:
        """Return whether the next head is due; a body that is still sent then was refused."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self._lacks_head() and not self.transport.is_closing():
            self.transport.close()


def _most_connections() -> int:
    """Return how many connections there may be: half of what the process may open, at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


class QuietServer(uvicorn.Server):
    """Uvicorn without its signal handlers: `running` decides what signals mean."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve; what is not accepted yet waits in the system, in its own number."""
        await super().startup(sockets=sockets)
        for sock in sockets or ():
            sock.listen(MAX_CONNECTIONS)  # asyncio has set it to `backlog`


def web_server(app: Starlette) -> QuietServer:
    """Return uvicorn for an application; it is given its sockets when it serves."""
    _allow_files()
    config = uvicorn.Config(
        app, http=PatientProtocol, loop="asyncio", ws="none", lifespan="off", log_config=None,
        access_log=False, server_header=False, proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_LINGER_S,
        backlog=max(1, min(_AT_A_TIME, _most_connections() // 4)),
    )  # fmt: skip
    return QuietServer(config)


def _allow_files() -> None:
    """Let the process open what its connections need, and files beside them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


log = logging.getLogger("moegraph.server")
_INTERRUPTED = 130
# An engine that has work to end gets this time.
_CLOSE_S = 10.0
# Seconds for threads that still prepare a request whose client has left.
_GRACE_S = 1.0
_EXIT_CODES = {signal.SIGINT: _INTERRUPTED, signal.SIGTERM: 0}


@dataclass(kw_only=True)
class ServerProcess:
    """The server until a signal ends it.

    host: makes the model's host, on the event loop. app: makes the application for it. ready:
    called when requests are answered. reload: called at SIGHUP; it raises to keep what is in force.
    say: prints a line for the user. drain_s: how long requests may go on after SIGTERM.
    """

    app: Callable[[ModelHost], Starlette]
    host: Callable[[], ModelHost]
    sock: socket.socket
    ready: Callable[[], None]
    reload: Callable[[], None]
    say: Callable[[str], None]
    drain_s: float
    _code: int = field(default=0, init=False)
    _is_drained: bool = field(default=True, init=False)
    _ending: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def run(self) -> int:
        """Serve; return the exit code."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        host = self.host()
        app = self.app(host)
        web = web_server(app)
        self._take_signals()
        serving = asyncio.ensure_future(web.serve(sockets=[self.sock]))
        failure: MoegraphError | None = None
        try:
            await self._serve(host, serving)
        except MoegraphError as error:
            failure, self._code = error, error.exit_code
        finally:
            # first the model: requests that are cut off get an answer that says so
            closing = asyncio.ensure_future(host.close())
            limit = None if self._is_drained else _CLOSE_S
            await asyncio.wait((closing,), timeout=limit)
            await _stop(web, serving)
            is_stuck = not await app.state.server.workers.end(_GRACE_S)
            if host.is_loading or not self._is_drained or is_stuck:
                # threads that load or compute cannot be interrupted, and Python would wait for them
                self._say_last(failure, is_stuck)
                _leave(self._code)
            closing.result()
        if failure is not None:
            raise failure
        return self._code

    async def _serve(self, host: ModelHost, serving: asyncio.Future[None]) -> None:
        """Load the model and serve until a signal comes or the engine fails; then drain."""
        watching = asyncio.ensure_future(host.watch())
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await self._load(host)
            if not self._ending.is_set():
                self.ready()
            some = (ending, serving, watching)
            await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(host)
            if watching.done():
                raise NativeError(f"the server has failed: {watching.result()}")
        finally:
            ending.cancel()
            watching.cancel()

    def _say_last(self, failure: MoegraphError | None, is_stuck: bool) -> None:
        if failure is not None:
            self.say(f"error: {failure}")
        elif self._code == _INTERRUPTED:
            self.say("interrupted")
        if is_stuck:
            self.say(
                f"ended; a prompt or grammar was still being prepared after {_GRACE_S:g} s more"
            )

    async def _load(self, host: ModelHost) -> None:
        """Load the model; return early when a signal comes."""
        loading = asyncio.ensure_future(host.start())
        ending = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait((loading, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if loading.done():
            loading.result()

    async def _drain(self, host: ModelHost) -> None:
        if n := host.line.n_users:
            requests = "1 request" if n == 1 else f"{n} requests"
            self.say(
                f"ending; waiting up to {self.drain_s:g} s for {requests} (again to end at once)"
            )
        self._is_drained = await host.drain(self.drain_s)
        if not self._is_drained:
            log.warning("requests that are cut off: %d", host.line.n_users)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _EXIT_CODES:
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _end(self, number: signal.Signals) -> None:
        if self._ending.is_set():
            self.say("ended at once")
            _leave(_INTERRUPTED if number == signal.SIGINT else 128 + number)
        self._code = _EXIT_CODES[number]
        self._ending.set()

    def _reload(self) -> None:
        try:
            self.reload()
        except MoegraphError as error:
            log.error("%s; the keys stay as they are", error)
        else:
            log.info("keys read again")


async def _stop(web: QuietServer, serving: asyncio.Future[None]) -> None:
    web.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _leave(code: int) -> NoReturn:
    """Exit without waiting for threads that compute or load."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
