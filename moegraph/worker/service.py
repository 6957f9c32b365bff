"""The worker: listens, lets clients prove themselves, and hands them to a child process.

One client is served at a time. The child is started before a client comes, and a new one after each
client. Bytes of strangers only meet Python's `ssl` and the hello, with limits on size, time and
number.
"""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, NativeError
from ..link import hello
from ..link.connect import start_python
from ..link.hello import Build, HelloRefused, RemoteDevice
from ..link.tls import relay, watch

# Connections that have not proved themselves yet. For one more, the one goes that has said nothing
# for longest, of the address that has most of them.
MAX_STRANGERS = 16
_BUSY = f"it has {MAX_STRANGERS} connections that wait; try again"
_READY_S = 120.0
# The process that served the last client needs a moment to end, and the next one longer to start.
_LEAVING_S, _STARTING_S = 5.0, 20.0
_RETRY_S = 2.0
_MAX_REPORT = 65536


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker lends. n_threads: of CPU devices. cache_dir: where weights are kept."""

    devices: tuple[str, ...]
    n_threads: int | None = None
    cache_dir: Path | None = None


@dataclass(eq=False)
class Stranger:
    """A connection that has not proved itself yet, and its address. has_greeted: it said hello."""

    sock: socket.socket
    host: str
    has_greeted: bool = False

    def turn_away(self, is_secured: bool) -> None:
        """Say that the worker is busy, and end the connection; its thread closes it."""
        with suppress(OSError):
            if not is_secured:
                self.sock.sendall(hello.refusal(_BUSY))
            # not TLS's own, which would pull the connection from under its thread
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Child:
    """A process that will serve one client; `build` and `devices` are what it reports."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Start it and wait until it has opened the devices."""
        self._ours, theirs = socket.socketpair()
        cache = str(settings.cache_dir.absolute()) if settings.cache_dir else None
        job = [settings.devices, settings.n_threads, cache, theirs.fileno()]
        with theirs:
            self.process = start_python("moegraph.worker.child", json.dumps(job), theirs)
        self.client = ""
        try:
            report = self._report()
        except BaseException:
            self.end()
            raise
        self.build = Build(**report["build"])
        self.devices = [RemoteDevice(**device) for device in report["devices"]]
        self.free: list[int] = report["free"]

    def _report(self) -> dict[str, Any]:
        try:
            line = hello.read_line(self._ours, _MAX_REPORT, _READY_S)
        except (OSError, HelloRefused):
            raise NativeError(
                "the process that opens the devices ended before it was ready"
            ) from None
        report: dict[str, Any] = json.loads(line)
        if "error" in report:
            kind = ConfigError if report["code"] == ConfigError.exit_code else NativeError
            raise kind(report["error"])
        return report

    def give(self, client: socket.socket) -> None:
        """Hand over a client's connection; the caller closes its own copy."""
        socket.send_fds(self._ours, [b"\1"], [client.fileno()])

    def wait(self) -> int:
        """Wait until it ends; return the exit status, negative for a signal."""
        try:
            return self.process.wait()
        finally:
            self._ours.close()

    def end(self) -> None:
        """End the process, if it has not ended."""
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._ours.close()


class Worker:
    """Serves clients on a listening socket until the program ends.

    context: for TLS; None on loopback. say: takes one line for the log.
    """

    def __init__(
        self, settings: WorkerSettings, listening: socket.socket, context: ssl.SSLContext | None,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._settings, self._listening = settings, listening
        self._context, self._say = context, say
        self._strangers: list[Stranger] = []  # the oldest first; with `_changed`
        self._changed = threading.Condition()
        self._free: Child | None = None  # ready, and without a client
        self._serving = ""  # the client being served

    def run(self, ready: Callable[[Child], None]) -> None:
        """Serve; `ready` is called when the first child has opened the devices.

        The main thread starts the children, because they end with the thread that started them.
        """
        child = Child(self._settings)
        ready(child)
        threading.Thread(target=self._accept, daemon=True).start()
        while True:
            try:
                with self._changed:
                    self._free, self._serving = child, ""
                    self._changed.notify_all()
                status = child.wait()
                self._ended(child, status)
            finally:
                child.end()
            child = self._next()

    def _next(self) -> Child:
        while True:
            try:
                return Child(self._settings)
            except (ConfigError, NativeError) as error:
                self._say(f"cannot serve: {error}; trying again")
                time.sleep(_RETRY_S)

    def _ended(self, child: Child, status: int) -> None:
        with self._changed:
            self._free, self._serving = None, ""
            self._changed.notify_all()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        if status == 0:
            self._say(f"client {child.client} has left")
        elif child.client:
            self._say(
                f"client {child.client}: the process that served it ended with {how}; another one "
                "serves the next client"
            )
        else:
            self._say(f"the process that waited for a client ended with {how}; another one waits")

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listening.accept()
            except OSError:
                time.sleep(0.1)  # too many open files, or a peer that left at once
                continue
            stranger = Stranger(sock, address[0])
            if not self._let_in(stranger):
                stranger.turn_away(self._context is not None)
                sock.close()
                continue
            name = f"{address[0]}:{address[1]}"
            threading.Thread(target=self._meet, args=(stranger, name), daemon=True).start()

    def _let_in(self, stranger: Stranger) -> bool:
        """Return whether a stranger may stay; another one that says nothing may have to leave."""
        with self._changed:
            if len(self._strangers) >= MAX_STRANGERS:
                silent = [one for one in self._strangers if not one.has_greeted]
                if not silent:
                    return False
                hosts = [one.host for one in silent]
                oldest = max(silent, key=lambda one: hosts.count(one.host))
                self._strangers.remove(oldest)
                oldest.turn_away(self._context is not None)
            self._strangers.append(stranger)
            return True

    def _meet(self, stranger: Stranger, name: str) -> None:
        """Let a stranger prove itself, and see it to a child."""
        try:
            try:
                self._secure(stranger)
                child = self._greet(stranger, name)
            except BaseException:
                stranger.sock.close()
                raise
            finally:
                with self._changed:
                    if stranger in self._strangers:
                        self._strangers.remove(stranger)
            with stranger.sock as client:
                self._hand_over(client, child)
        except HelloRefused as refused:
            self._say(f"refused {name}: {refused}")
        except OSError as error:
            self._say(f"refused {name}: {_reason(error)}")

    def _secure(self, stranger: Stranger) -> None:
        watch(stranger.sock)
        stranger.sock.settimeout(hello.HELLO_S)
        if self._context:
            stranger.sock = secured = self._context.wrap_socket(
                stranger.sock, server_side=True, do_handshake_on_connect=False
            )
            secured.do_handshake()

    def _hand_over(self, client: socket.socket, child: Child) -> None:
        """Have a child serve a client; with TLS, this thread copies the bytes until the end."""
        if not isinstance(client, ssl.SSLSocket):
            child.give(client)
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child.give(theirs)
            theirs.close()  # else the end of the child would go unnoticed
            relay(client, ours)

    def _greet(self, stranger: Stranger, name: str) -> Child:
        """Return what serves a client, if it may be served."""
        sock = stranger.sock
        build = hello.read_question(hello.read_line(sock, hello.MAX_QUESTION, hello.HELLO_S))
        if build is None:
            raise HelloRefused("what it sends is no hello")
        stranger.has_greeted = True
        child = self._take(name)
        try:
            reason = self._refusal(child, build)
            if child and not reason:
                sock.sendall(hello.answer_of(child.devices))
                sock.settimeout(None)
                self._say(f"client {name} is served")
                return child
            with suppress(OSError):
                sock.sendall(hello.refusal(reason))
            raise HelloRefused(reason)
        except BaseException:
            if child:
                self._put_back(child)
            raise

    def _take(self, name: str) -> Child | None:
        """Take the child that is free; wait a moment for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self._serving, _LEAVING_S)
            if not self._serving:
                self._changed.wait_for(lambda: self._free, _STARTING_S)
            child, self._free = self._free, None
            if child:
                child.client = self._serving = name
            return child

    def _put_back(self, child: Child) -> None:
        with self._changed:
            child.client = ""
            if self._free is None and child.process.poll() is None:
                self._free, self._serving = child, ""
                self._changed.notify_all()

    def _refusal(self, child: Child | None, build: Build) -> str:
        if child is None:
            return f"it serves another client, {self._serving or 'which is leaving'}"
        differs = hello.difference(child.build, build)
        return f"{differs}; both need the same build" if differs else ""


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason or error}"
    return error.strerror or str(error)
