"""Mutual TLS: each side has a folder with ca.pem, cert.pem and key.pem (keys.py makes them).

`relay` copies bytes between such a connection and another one.
"""

from __future__ import annotations

import select
import socket
import ssl
from pathlib import Path

from ..errors import ConfigError

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"


def tls_context(folder: Path, is_server: bool) -> ssl.SSLContext:
    """Return a context for one side: TLS 1.3, and the other side must show a certificate too.

    Certificates name a role, worker or client, and no host: who has a worker's key is a worker.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / CA)
        context.load_cert_chain(folder / CERT, folder / KEY)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"{folder}: {CA}, {CERT} and {KEY} cannot be used: {error.strerror or error}; make "
            "keys with `moegraph worker --new-keys`"
        ) from None
    if is_server:
        context.num_tickets = 0  # each client proves itself again
    return context


_BLOCK = 256 << 10
# A peer that is gone without a word is noticed after this time.
_GONE_S = 30


def watch(sock: socket.socket) -> None:
    """Have the system notice a TCP peer that is gone, within half a minute."""
    for option, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 1000 * _GONE_S),
        (socket.TCP_NODELAY, 1),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class _Way:
    """One direction: what was read and is not sent yet."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self._block = memoryview(bytearray(_BLOCK))
        self.left = self._block[:0]
        self.is_over = False
        self.wants: set[tuple[socket.socket, int]] = set()

    def step(self) -> bool:
        """Read or send once; return whether something moved, and note what it waits for."""
        self.wants.clear()
        try:
            if self.left:
                self.left = self.left[self.sink.send(self.left) :]
                return True
            n = self.source.recv_into(self._block)
            self.is_over = n == 0
            self.left = self._block[:n]
            return n > 0
        except ssl.SSLWantReadError:
            self.wants.add((self.sink if self.left else self.source, select.POLLIN))
        except ssl.SSLWantWriteError:
            self.wants.add((self.sink if self.left else self.source, select.POLLOUT))
        except BlockingIOError:
            waits = (self.sink, select.POLLOUT) if self.left else (self.source, select.POLLIN)
            self.wants.add(waits)
        return False


def relay(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes both ways until one side ends or fails; then close both."""
    ways = [_Way(one, other), _Way(other, one)]
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        try:
            while True:
                moved = [way.step() for way in ways]
                if any(way.is_over for way in ways):
                    return
                if not any(moved):
                    _wait(ways)
        except OSError:
            return  # for RPC, all ends of a connection are alike


def _wait(ways: list[_Way]) -> None:
    events: dict[int, int] = {}
    for way in ways:
        for sock, event in way.wants:
            events[sock.fileno()] = events.get(sock.fileno(), 0) | event
    poll = select.poll()
    for fd, mask in events.items():
        poll.register(fd, mask)
    if events:
        poll.poll()
