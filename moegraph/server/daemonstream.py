"""What `moegraph daemon` writes to --stream-fd: tokens as little-endian 32-bit integers."""

from __future__ import annotations

import os
import struct

from ..errors import ConfigError

DONE, TAG, GOES_ON = -1, -2, -4


class Frames:
    """Tokens and ends of requests on a file descriptor.

    Tagged, each is a frame of three integers: -2, the number of the request, and a token, -4 (the
    request can be continued) or -1 (it has ended). Otherwise each is one integer: a token, or -1.
    """

    def __init__(self, fd: int | None, is_tagged: bool = False) -> None:
        """fd: None writes nothing.

        Raises:
            ConfigError: the descriptor is not open for writing.
        """
        self.fd, self.is_tagged = fd, is_tagged
        self._write(b"")

    def token(self, request: int, token: int) -> None:
        """Write a token of a request."""
        self._frame(request, token)

    def goes_on(self, request: int) -> None:
        """Say that a request can be continued; only in tagged frames."""
        if self.is_tagged:
            self._frame(request, GOES_ON)

    def done(self, request: int) -> None:
        """Say that a request has ended."""
        self._frame(request, DONE)

    def _frame(self, request: int, value: int) -> None:
        values = (TAG, request, value) if self.is_tagged else (value,)
        self._write(struct.pack(f"<{len(values)}i", *values))

    def _write(self, data: bytes) -> None:
        """Write all bytes.

        Raises:
            ConfigError: the descriptor is not open, or its reader has gone.
        """
        if self.fd is None:
            return
        view = memoryview(data)
        try:
            if not view:
                os.write(self.fd, view)
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            why = f"--stream-fd {self.fd}: cannot write: {error.strerror}"
            raise ConfigError(why) from error
