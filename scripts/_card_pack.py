"""Pack what was built into files that a machine without compilers or packages unpacks.

A pack is one .tar.xz, cut into pieces NAME.000, NAME.001, ... of at most so many bytes. Its first
member, manifest.json, holds the options of scripts/build, the patch set, and the size of all
files. Members lie under the names of FOLDERS.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from _tools import BuildError

MANIFEST = "manifest.json"
Manifest = dict[str, object]


class Pieces:
    """A file that is written, and goes on in a new piece where one is full."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self._path, self._most, self._left = path, n_bytes, 0
        self._file: BinaryIO | None = None
        self.paths: list[Path] = []

    def write(self, data: bytes) -> int:
        """Write all of data."""
        view = memoryview(data)
        while view:
            if not self._left:
                self._next()
            assert self._file is not None
            n = self._file.write(view[: self._left])
            self._left -= n
            view = view[n:]
        return len(data)

    def _next(self) -> None:
        self.close()
        self.paths.append(self._path.with_name(f"{self._path.name}.{len(self.paths):03d}"))
        self._file, self._left = self.paths[-1].open("wb"), self._most

    def close(self) -> None:
        """Close the last piece."""
        if self._file:
            self._file.close()


class Joined:
    """All pieces of a pack, read as one file."""

    def __init__(self, paths: list[Path]) -> None:
        self._waiting = list(paths)
        self._file: BinaryIO | None = None

    def read(self, n: int) -> bytes:
        """Return up to n bytes; none at the end of the last piece."""
        while True:
            if data := self._file.read(n) if self._file else b"":
                return data
            self.close()
            if not self._waiting:
                return b""
            self._file = self._waiting.pop(0).open("rb")

    def close(self) -> None:
        """Close the piece that is being read."""
        if self._file:
            self._file.close()
        self._file = None


def pieces_of(path: Path) -> list[Path]:
    """Return the pieces of a pack, or the file itself if it is in one.

    Raises:
        BuildError: there is no such pack, or a piece is missing.
    """
    if path.is_file():
        return [path]
    found = sorted(path.parent.glob(f"{path.name}.[0-9][0-9][0-9]"))
    if not found:
        raise BuildError(f"{path}: no such pack (nor {path.name}.000)")
    for at, piece in enumerate(found):
        if piece.suffix != f".{at:03d}":
            raise BuildError(f"{path.name}.{at:03d} is missing in {path.parent}")
    return found


def pack(path: Path, folders: Mapping[str, Path], about: Manifest, n_bytes: int) -> list[Path]:
    """Pack files and folders by name into pieces; return these. Old pieces of that name go.

    Raises:
        BuildError: something is not there.
    """
    files = dict(_files(folders))
    for old in path.parent.glob(f"{path.name}.[0-9][0-9][0-9]"):
        old.unlink()
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    text = json.dumps({**about, "files": digests}).encode()
    with closing(Pieces(path, n_bytes)) as out:
        with tarfile.open(fileobj=cast(BinaryIO, out), mode="w|xz", bufsize=1 << 20) as tar:
            head = tarfile.TarInfo(MANIFEST)
            head.size = len(text)
            tar.addfile(head, io.BytesIO(text))
            for name, file in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = file.stat().st_size, file.stat().st_mode & 0o777
                with file.open("rb") as content:
                    tar.addfile(info, content)
        return out.paths


def _files(folders: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    for name, path in folders.items():
        found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        found = [p for p in found if p.is_file() and "__pycache__" not in p.parts]
        if not found:
            raise BuildError(f"{path} is not there to be packed; run prepare first")
        for file in found:
            inside = file.relative_to(path).as_posix() if path.is_dir() else ""
            yield str(PurePosixPath(name) / inside), file


def unpack(path: Path, folders: Mapping[str, Path]) -> Manifest:
    """Unpack into folders by name; return the manifest.

    Raises:
        BuildError: the pack is not one of ours, or is broken.
    """
    try:
        with (
            closing(Joined(pieces_of(path))) as source,
            tarfile.open(fileobj=cast(BinaryIO, source), mode="r|xz", bufsize=1 << 20) as tar,
        ):
            return _take(tar, folders)
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise BuildError(f"{path} is broken or no pack of measure_card: {error}") from error


def _take(tar: tarfile.TarFile, folders: Mapping[str, Path]) -> Manifest:
    about: Manifest = {}
    digests: dict[str, str] = {}
    for member in tar:
        content = tar.extractfile(member)
        if content is None:
            raise ValueError(f"{member.name} is no file")
        data = content.read()
        if not about:
            if member.name != MANIFEST:
                raise ValueError("no manifest")
            about = json.loads(data)
            digests = dict(about.pop("files"))  # type: ignore[call-overload]
            continue
        if hashlib.sha256(data).hexdigest() != digests.pop(member.name):
            raise ValueError(f"{member.name} is not what was packed")
        target = place(member.name, folders)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a running process may map it
        target.write_bytes(data)
        target.chmod(member.mode)
    if digests:
        raise ValueError(f"{next(iter(digests))} is missing")
    return about


def place(name: str, folders: Mapping[str, Path]) -> Path:
    """Return where a member goes.

    Raises:
        ValueError: to no folder that we know, or out of it.
    """
    parts = PurePosixPath(name).parts
    for known, folder in folders.items():
        own = PurePosixPath(known).parts
        if parts[: len(own)] == own and ".." not in parts:
            return folder.joinpath(*parts[len(own) :])
    raise ValueError(f"unexpected file {name}")


def chosen(folders: Mapping[str, Path], names: Collection[str]) -> dict[str, Path]:
    """Return the folders of these kinds: the first part of their names."""
    return {name: path for name, path in folders.items() if name.partition("/")[0] in names}
