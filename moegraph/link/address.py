"""Addresses of workers: rpc://HOST:PORT[/N][?keys=FOLDER&timeout=S], and sockets."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from ..errors import ConfigError

# No graph of ours takes so long; a worker that is silent for longer counts as lost.
TIMEOUT_S = 120.0
# Connections that the system keeps until they are accepted.
_WAITING = 16
_SPELLING = "rpc://HOST:PORT[/N][?keys=FOLDER&timeout=SECONDS]"


@dataclass(frozen=True)
class Address:
    """A device of a worker.

    device: its number there. keys: the client's folder of keys, or "" without TLS. timeout_s: how
    long one exchange may take.
    """

    host: str
    port: int
    device: int = 0
    keys: str = ""
    timeout_s: float = TIMEOUT_S

    @property
    def worker(self) -> str:
        """The worker as messages name it, HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, whatever a name server says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(name: str) -> Address:
    """Read the spelling of a device on another machine."""
    try:
        parts = urlsplit(name)
        host, port = parts.hostname, parts.port
        settings = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        number = parts.path.strip("/") or "0"
        timeout_s = float(settings.pop("timeout", TIMEOUT_S))
        keys = settings.pop("keys", "")
        if not (host and port and number.isdecimal() and not settings and 0 < timeout_s <= 86400):
            raise ValueError
        if parts.username or parts.fragment:
            raise ValueError
    except ValueError:
        raise ConfigError(f"device {name!r} is not of the form {_SPELLING}") from None
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"device {name!r}: another machine is used through TLS only; add ?keys=FOLDER, the "
            "client's folder that `moegraph worker --new-keys` made"
        )
    return Address(host, port, int(number), keys, timeout_s)


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
