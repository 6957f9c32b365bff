"""A bounded cursor over the header of a GGUF file: every length is checked before it is used.

The cursor reads with pread and never through a mapping, so a file that shrinks during the scan
causes an error and not a signal. Positions are absolute file offsets.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import NoReturn

import numpy as np

from ..errors import ModelFileError

# A 250,000-token vocabulary with its merges needs about 11 MB of header.
HEADER_LIMIT = 128 << 20
# Limits time and memory for headers full of empty strings (8 bytes each in the file).
STRINGS_LIMIT = 1 << 22
_FIRST_READ = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class StringArray:
    """A string array of the header, kept as bytes and offsets and decoded on access."""

    def __init__(self, data: bytes, starts: np.ndarray) -> None:
        """data: the array's raw bytes. starts: the start of each string, then the end plus 8.

        An 8-byte length precedes each string, so string i ends 8 bytes before starts[i + 1].
        """
        self._data = data
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        return self.raw(index).decode("utf-8", "replace")

    def raw(self, index: int) -> bytes:
        """Return the undecoded bytes of one string."""
        at = range(len(self))[index]
        return self._data[int(self._starts[at]) : int(self._starts[at + 1]) - 8]

    @property
    def n_longest(self) -> int:
        """Return the bytes of the longest string; 0 if there is none."""
        return int(np.diff(self._starts).max(initial=8)) - 8

    def raw_strings(self) -> Iterator[bytes]:
        """Yield every string as bytes, several times faster than indexing."""
        bounds = self._starts.tolist()
        data = self._data
        return (data[a : b - 8] for a, b in pairwise(bounds))


class Reader:
    """Reads little-endian values from an open file, never past its size or the header limit."""

    def __init__(self, fd: int, path: os.PathLike[str] | str, size: int) -> None:
        """Start at byte 0 of fd, a regular file of size bytes; path is for messages."""
        self.path = path
        self.pos = 0
        self.size = size
        self._fd = fd
        self._data = bytearray()
        self._limit = min(size, HEADER_LIMIT)
        self._strings_left = STRINGS_LIMIT

    @property
    def remaining(self) -> int:
        """Return how many bytes may still be read."""
        return self._limit - self.pos

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        """Raise a ModelFileError that names the file and the byte offset."""
        offset = self.pos if at is None else at
        raise ModelFileError(f"{self.path}: {what} (at byte {offset})")

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer; what names it in an error."""
        value: int = _U32.unpack_from(self._data, self._take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer; what names it in an error."""
        value: int = _U64.unpack_from(self._data, self._take(8, what))[0]
        return value

    def raw(self, n: int, what: str) -> bytes:
        """Read n bytes."""
        start = self._take(n, what)
        return bytes(self._data[start : start + n])

    def peek(self, n: int) -> bytes:
        """Return the next n bytes (fewer at the end of the file) without advancing."""
        n = min(n, self.remaining)
        self._fill(self.pos + n)
        return bytes(self._data[self.pos : self.pos + n])

    def text(self, what: str, longest: int) -> str:
        """Read a length-prefixed string of 1 to longest bytes: UTF-8 without NUL."""
        start = self.pos
        n = self.u64(f"length of {what}")
        if not 1 <= n <= longest:
            self.fail(f"{what} has {n} bytes; allowed are 1 to {longest}", start)
        raw = self.raw(n, what)
        try:
            value = raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", start)
        if "\0" in value:
            self.fail(f"{what} {value!r} contains a NUL byte", start)
        return value

    def bytes_value(self, what: str) -> bytes:
        """Read a length-prefixed string of any length that the header can hold."""
        return self.raw(self.u64(f"length of {what}"), what)

    def string_array(self, n: int, what: str) -> StringArray:
        """Read n length-prefixed strings; record only where each one starts."""
        if n > self._strings_left:
            self.fail(f"{what} has {n} strings; a header may hold {STRINGS_LIMIT} in all")
        self._strings_left -= n
        first = pos = self.pos
        data, end = self._data, len(self._data)
        starts = array("Q")
        unpack, append = _U64.unpack_from, starts.append
        for i in range(n):
            if pos + 8 > end:
                end = self._fill_or_fail(pos, 8, f"length of string {i} of {what}")
            size = unpack(data, pos)[0]
            pos += 8
            if pos + size > end:
                end = self._fill_or_fail(pos, size, f"string {i} of {what}")
            append(pos - first)
            pos += size
        append(pos + 8 - first)
        self.pos = pos
        return StringArray(bytes(data[first:pos]), np.frombuffer(starts, dtype=np.uint64))

    def _take(self, n: int, what: str) -> int:
        """Make the next n bytes available, advance over them, and return where they start."""
        start = self.pos
        if start + n > len(self._data):
            self._fill_or_fail(start, n, what)
        self.pos = start + n
        return start

    def check_room(self, n: int, what: str, at: int | None = None, pos: int | None = None) -> None:
        """Check that n bytes exist from pos on before the caller allocates; at: for the message."""
        pos = self.pos if pos is None else pos
        if n <= self._limit - pos:
            return
        at = pos if at is None else at
        if self._limit < self.size and n <= self.size - pos:
            self.fail(f"the header is larger than {HEADER_LIMIT >> 20} MiB, in {what}", at)
        self.fail(
            f"{what} needs {n} bytes but the file ends after {self.size}; "
            "it is truncated or damaged, download or convert it again",
            at,
        )

    def _fill_or_fail(self, pos: int, n: int, what: str) -> int:
        """Make bytes [pos, pos + n) available; return how many bytes are now in memory."""
        self.check_room(n, what, pos=pos)
        self._fill(pos + n)
        return len(self._data)

    def _fill(self, end: int) -> None:
        """Read the file at least up to byte end; each read doubles what is in memory."""
        have = len(self._data)
        want = min(self._limit, max(end, 2 * have, _FIRST_READ))
        while have < end:
            try:
                chunk = os.pread(self._fd, want - have, have)
            except OSError as error:
                raise ModelFileError(f"{self.path}: cannot read: {error.strerror}") from error
            if not chunk:
                self.fail(f"the file shrank while it was read; it had {self.size} bytes", have)
            self._data += chunk
            have += len(chunk)
