"""The server as a process: it listens, loads the model, obeys signals, and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from starlette.applications import Starlette

from ..errors import MoegraphError, NativeError
from .host import ModelHost
from .listening import QuietServer, web_server

log = logging.getLogger("moegraph.server")
_INTERRUPTED = 130
# An engine that has work to end gets this time.
_CLOSE_S = 10.0
# Seconds for threads that still prepare a request whose client has left.
_GRACE_S = 1.0
_EXIT_CODES = {signal.SIGINT: _INTERRUPTED, signal.SIGTERM: 0}


@dataclass(frozen=True)
class Hooks:
    """What the process does besides serving.

    ready: called when requests are answered. reload: called at SIGHUP; it raises to keep what is
    in force. say: prints a line for the user. drain_s: how long requests may go on after SIGTERM.
    """

    ready: Callable[[], None]
    reload: Callable[[], None]
    say: Callable[[str], None]
    drain_s: float


def run(app: Callable[[ModelHost], Starlette], host: Callable[[], ModelHost],
        sock: socket.socket, hooks: Hooks) -> int:  # fmt: skip
    """Serve until a signal comes; return the exit code.

    host: makes the model's host, on the event loop. app: makes the application for it.
    """
    return asyncio.run(_Process(app, host, sock, hooks).run())


class _Process:
    def __init__(
        self, app: Callable[[ModelHost], Starlette], host: Callable[[], ModelHost],
        sock: socket.socket, hooks: Hooks,
    ) -> None:  # fmt: skip
        self._app, self._make_host, self._sock, self._hooks = app, host, sock, hooks
        self._code = 0
        self._is_drained = True
        self._ending = asyncio.Event()

    async def run(self) -> int:
        host = self._make_host()
        app = self._app(host)
        web = web_server(app)
        self._take_signals()
        serving = asyncio.ensure_future(web.serve(sockets=[self._sock]))
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
                self._hooks.ready()
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
            self._hooks.say(f"error: {failure}")
        elif self._code == _INTERRUPTED:
            self._hooks.say("interrupted")
        if is_stuck:
            self._hooks.say(
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
        if host.n_users:
            requests = "1 request" if host.n_users == 1 else f"{host.n_users} requests"
            self._hooks.say(
                f"ending; waiting up to {self._hooks.drain_s:g} s for {requests} "
                "(again to end at once)"
            )
        self._is_drained = await host.drain(self._hooks.drain_s)
        if not self._is_drained:
            log.warning("requests that are cut off: %d", host.n_users)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _EXIT_CODES:
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _end(self, number: signal.Signals) -> None:
        if self._ending.is_set():
            self._hooks.say("ended at once")
            _leave(_INTERRUPTED if number == signal.SIGINT else 128 + number)
        self._code = _EXIT_CODES[number]
        self._ending.set()

    def _reload(self) -> None:
        try:
            self._hooks.reload()
        except MoegraphError as error:
            log.error("%s; the keys stay as they are", error)
        else:
            log.info("keys read again")


async def _stop(web: QuietServer, serving: asyncio.Future[None]) -> None:
    web.should_exit = True
    with suppress(asyncio.CancelledError):
        await serving


def _leave(code: int) -> NoReturn:
    """Exit without waiting for threads that compute or load."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
