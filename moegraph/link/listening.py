"""The socket on which a worker listens."""

from __future__ import annotations

import errno
import socket

from ..errors import ConfigError
from .address import is_loopback

_WAITING = 16


def listen_on(host: str, port: int, has_keys: bool) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one."""
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"--listen {host}: other machines are served through TLS only; make keys with "
            "`moegraph worker --new-keys DIR` and give the worker's folder with --keys"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--listen {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_WAITING)
    except OSError as error:
        sock.close()
        reason = "in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"--listen {host}:{port}: {reason}") from None
    return sock
