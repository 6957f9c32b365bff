"""Devices of workers on other machines, over ggml's RPC backend.

What the devices of one worker exchange goes over one connection. After an exchange has failed,
every later one fails at once: reads give zeros, graphs a failed status, and
`RemoteLink.require_alive` says what happened.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from ..errors import ConfigError, DeviceLost, NativeError
from ..link.address import Address, parse_address
from ..link.connect import connect
from ..link.hello import Build, RemoteDevice
from .lib import C, ffi, versions

if TYPE_CHECKING:
    from . import _native

_serial = count(1)
_open: dict[tuple[str, int], RemoteLink] = {}


def this_build() -> Build:
    """Return the build, in which a worker and its client must agree."""
    found = versions()
    return Build(found["ggml"], found["patchset"])


class RemoteLink:
    """The connection to a worker; `open_link` makes it, and the last `close` ends it.

    worker: its HOST:PORT. devices: what it offers.
    """

    def __init__(self, address: Address) -> None:
        """Connect."""
        self._key = (address.worker, address.port)
        self.worker = address.worker
        self._timeout_s = address.timeout_s
        self._connection = connect(address, this_build())
        self.devices: list[RemoteDevice] = self._connection.devices
        # of its own, because ggml never forgets a name
        self._endpoint = f"worker:{next(_serial)}".encode()
        self.n_users = 0
        # ggml closes its copy; ours ends the connection early
        self._reg = C.moegraph_rpc_adopt(self._endpoint, os.dup(self._connection.sock.fileno()))
        n = C.ggml_backend_reg_dev_count(self._reg) if self._reg != ffi.NULL else 0
        if n != len(self.devices):
            C.moegraph_rpc_close(self._endpoint)
            self._connection.close()
            raise NativeError(f"worker {self.worker} ended the connection at once")

    def device(self, index: int) -> _native.ggml_backend_device_ptr:
        """Return ggml's handle of a device."""
        return C.ggml_backend_reg_dev_get(self._reg, index)

    @property
    def is_alive(self) -> bool:
        """Whether no exchange has failed so far."""
        return not C.moegraph_rpc_failure(self._endpoint)

    def require_alive(self) -> None:
        """Check that no exchange has failed."""
        code = C.moegraph_rpc_failure(self._endpoint)
        if code in (errno.EAGAIN, errno.EWOULDBLOCK):
            raise DeviceLost(
                f"worker {self.worker} did not answer within {self._timeout_s:g} s; it is taken "
                "for lost"
            )
        if code in (errno.ECONNRESET, errno.EPIPE):
            raise DeviceLost(f"worker {self.worker} is lost: it ended the connection")
        if code:
            raise DeviceLost(f"worker {self.worker} is lost: {os.strerror(code)}")

    def close(self) -> None:
        """Give up one user; with the last one, end the connection."""
        self.n_users -= 1
        if self.n_users == 0:
            if _open.get(self._key) is self:
                del _open[self._key]
            with suppress(OSError):  # it has ended already
                self._connection.sock.shutdown(socket.SHUT_RDWR)  # wakes a read that waits
            C.moegraph_rpc_close(self._endpoint)
            self._connection.close()


def open_link(name: str) -> tuple[RemoteLink, int]:
    """Return the connection to a device's worker, with one more user, and the device's number."""
    address = parse_address(name)
    key = (address.worker, address.port)
    link = _open.get(key)
    if link is None or not link.is_alive:
        link = _open[key] = RemoteLink(address)
    link.n_users += 1
    if address.device >= len(link.devices):
        link.close()
        raise ConfigError(
            f"device {name!r}: worker {address.worker} has {len(link.devices)} devices, counted "
            "from 0"
        )
    return link, address.device


def serve(
    sock: socket.socket, cache_dir: str | None, backends: list[_native.ggml_backend_ptr]
) -> None:
    """Serve one client on a connected socket until it leaves; ggml closes the socket.

    cache_dir: where weights are kept, by hash.
    """
    cache = ffi.NULL if cache_dir is None else ffi.new("char[]", os.fsencode(cache_dir))
    C.moegraph_rpc_serve(sock.detach(), cache, len(backends), ffi.new("ggml_backend_t[]", backends))
