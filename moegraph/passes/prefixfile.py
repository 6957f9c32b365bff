"""Files of saved beginnings of prompts: a run of tokens, its KV rows, and the states after it.

A file begins with MAGIC, the length of the header as U32, the header in JSON, and the tokens of the
run as I32; then a hash of these. Then follow the rows of each cache and a hash, then the states and
a hash. All numbers are little-endian; a hash has 16 bytes (BLAKE2b).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import mkstemp
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..resident.hostcopies import RowsCopy

PART = ".part"
MAGIC = b"moegraph prefix 1\n"
_HASH = 16
# Bytes of a header, and tokens of a run; no file has more.
_MAX_HEADER, _MAX_TOKENS = 1 << 20, 1 << 24

Ids = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class DamagedFile(Exception):
    """A file is not what was written; the message says where."""


@dataclass(frozen=True)
class Widths:
    """What a loaded model keeps of sequences.

    rows: bytes of a position in each cache. drafted: the same of each drafter that has caches of
    its own. states: bytes of the states.
    """

    rows: list[int]
    drafted: dict[str, list[int]]
    states: int


@dataclass(frozen=True)
class Head:
    """What a file says of itself.

    identity: what the model and its settings are. parent: the key of the beginning before the run;
    without one, the owner, who alone may use the file ('' for everyone). first: position of the
    run's first token. rows: [n_rows, bytes of a row] of each cache of the model. drafted: the same
    of the caches of each drafter, for the last positions. n_states: bytes of the states.
    """

    identity: str
    parent: str
    first: int
    n_tokens: int
    rows: list[list[int]]
    drafted: dict[str, list[list[int]]]
    n_states: int
    tokens: Ids = field(default_factory=lambda: np.zeros(0, np.int32), compare=False)

    @property
    def key(self) -> str:
        """Return the name of the beginning that ends with this run."""
        found = hashlib.blake2b(digest_size=16)
        found.update(f"{self.identity}/{self.parent}/".encode())
        found.update(self.tokens.tobytes())
        return found.hexdigest()

    @property
    def row_parts(self) -> list[list[int]]:
        """Return the shapes of all rows, in order."""
        return [*self.rows, *(shape for each in self.drafted.values() for shape in each)]

    def require(self, widths: Widths) -> None:
        """Check that every shape is what a model keeps."""
        if self.rows != [[self.n_tokens, width] for width in widths.rows]:
            raise DamagedFile(f"KV rows of shapes that {self.n_tokens} positions do not have")
        if self.n_states != widths.states:
            raise DamagedFile(f"{self.n_states} bytes of states; this model has {widths.states}")
        for name, shapes in self.drafted.items():
            fits = [width for _, width in shapes] == widths.drafted.get(name)
            if not fits or any(n > self.n_tokens for n, _ in shapes):
                raise DamagedFile(f"rows of shapes that the drafter {name!r} does not have")

    @property
    def n_rows_bytes(self) -> int:
        """Return the bytes of all rows."""
        return sum(n * size for n, size in self.row_parts)

    @property
    def n_bytes(self) -> int:
        """Return the size of the file."""
        begin = len(MAGIC) + 4 + len(self.text) + 4 * self.n_tokens
        return begin + self.n_rows_bytes + self.n_states + 3 * _HASH

    @property
    def text(self) -> bytes:
        """Return the header as it is written."""
        return json.dumps({name: getattr(self, name) for name in _NAMES}).encode()


def head_of(
    identity: str, parent: str, first: int, ids: Ids, rows: RowsCopy, n_states: int
) -> tuple[Head, list[Bytes]]:
    """Return what a file of a run says of itself, and all its rows, in order."""

    def shapes(parts: Iterable[Bytes]) -> list[list[int]]:
        return [list(part.shape) for part in parts]

    drafted = {name: shapes(each) for name, each in rows.drafted.items()}
    head = Head(identity, parent, first, len(ids), shapes(rows.parts), drafted, n_states, ids)
    return head, [*rows.parts, *(part for each in rows.drafted.values() for part in each)]


_NAMES = tuple(f.name for f in fields(Head) if f.name != "tokens")


def write_file(path: Path, head: Head, rows: Iterable[Bytes], states: Bytes) -> None:
    """Write a file, whole or not at all."""
    text = head.text
    beginning = MAGIC + len(text).to_bytes(4, "little") + text + head.tokens.tobytes()
    # a name that nobody can foretell, which only its owner can read: it has what users wrote
    fd, half_done = mkstemp(PART, f"{path.name}.", path.parent)
    try:
        with open(fd, "wb") as file:
            for parts in ([np.frombuffer(beginning, np.uint8)], rows, [states]):
                found = hashlib.blake2b(digest_size=_HASH)
                for part in parts:
                    data = np.ascontiguousarray(part).reshape(-1).data
                    found.update(data)
                    file.write(data)
                file.write(found.digest())
        os.replace(half_done, path)
    except BaseException:
        os.unlink(half_done)
        raise


def _opened(path: Path) -> IO[bytes]:
    """Open a file to read; no link is followed, and a pipe waits for no writer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is not a regular file")
    return open(fd, "rb")


def private_folder(folder: Path) -> None:
    """Make a folder for a cache, which only its owner can use, or check one that is there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot keep a cache there: {error.strerror}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{folder}: belongs to user {status.st_uid}, who could put anything into the cache; "
            f"name a folder of user {os.geteuid()}"
        )
    if status.st_mode & 0o022:
        raise ConfigError(
            f"{folder}: others can write there (mode {status.st_mode & 0o7777:o}) and could put "
            f"anything into the cache; run: chmod go-w {shlex.quote(str(folder))}"
        )


def read_head(path: Path) -> Head:
    """Read what a file says of itself."""
    with _opened(path) as file:
        start = file.read(len(MAGIC) + 4)
        if not start.startswith(MAGIC):
            raise DamagedFile("it does not begin as such a file")
        n_text = int.from_bytes(start[len(MAGIC) :], "little")
        if n_text > _MAX_HEADER:
            raise DamagedFile(f"a header of {n_text} bytes")
        text = file.read(n_text)
        head = _parsed(text)
        tokens = file.read(4 * head.n_tokens)
        _compare(file, hashlib.blake2b(start + text + tokens, digest_size=_HASH), "the header")
        if os.fstat(file.fileno()).st_size != head.n_bytes:
            raise DamagedFile("it is too short or too long")
    return replace(head, tokens=np.frombuffer(tokens, np.int32))


def _parsed(text: bytes) -> Head:
    try:
        head = Head(**json.loads(text))
        numbers = [head.first, head.n_tokens, head.n_states]
        numbers += [n for pair in head.row_parts for n in pair]
        if head.text != text or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError
        if not 0 < head.n_tokens <= _MAX_TOKENS or any(len(pair) != 2 for pair in head.row_parts):
            raise ValueError
        return head
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile("its header cannot be read") from error


def read_rows(path: Path, head: Head) -> tuple[list[Bytes], dict[str, list[Bytes]]]:
    """Read the rows of a file: of the model's caches, and of each drafter's, U8 [n, bytes]."""
    parts: list[Bytes] = [np.empty((n, size), np.uint8) for n, size in head.row_parts]
    with _opened(path) as file:
        file.seek(len(MAGIC) + 4 + len(head.text) + 4 * head.n_tokens + _HASH)
        _read(file, parts, "the KV rows")
    rest = iter(parts[len(head.rows) :])
    drafted = {name: [next(rest) for _ in each] for name, each in head.drafted.items()}
    return parts[: len(head.rows)], drafted


def read_states(path: Path, head: Head, out: Bytes) -> None:
    """Read the states of a file into U8 [n_states]."""
    with _opened(path) as file:
        file.seek(head.n_bytes - head.n_states - _HASH)
        _read(file, [out], "the states")


def _read(file: IO[bytes], parts: list[Bytes], what: str) -> None:
    found = hashlib.blake2b(digest_size=_HASH)
    for part in parts:
        data = part.reshape(-1).data
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise DamagedFile(f"{what} are cut short")
        found.update(data)
    _compare(file, found, what)


def _compare(file: IO[bytes], found: Any, what: str) -> None:
    if file.read(_HASH) != found.digest():
        raise DamagedFile(f"the hash of {what} is wrong")
